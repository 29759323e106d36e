"""``transformers.Trainer`` with the loss of Eq. 8: forget, retain and world terms, and the distance from the start.

A method is a row of :data:`optout_train.losses.LOSSES`, or a file in ``methods/`` that overrides a hook below.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from lm_eval_elude.data.sets import COLLAPSE, SETS
from lm_eval_elude.metrics import samples as metrics
from lm_eval_elude.metrics.estimates import harmonic_mean
from lm_eval_elude.model.scorer import Scorer, logits_at, score_all
from lm_eval_elude.text.chat import Renderer
from optout_train.data import KEPT, PASS, Encoder, EpochSampler, Examples, Sample, Sets, collate
from optout_train.losses import LOSSES, Answers, lesson, log_prob, nll
from optout_train.presets import flag
from optout_train.transport import Transport, originals

LESSONS, REFERENCE, EXTRA = "lessons.pt", "reference.pt", "extra.pt"  # what a resumed run does not make again


@dataclass
class UnlearnConfig(TrainingArguments):
    """Settings of a run. The defaults are the paper's (appendix A) where it has one."""

    loss: str = flag("npo", f"Forget loss: {', '.join(LOSSES)}.")
    forget_weight: float = flag(1.0, "Weight of the forget loss.")
    retain_weight: float = flag(1.0, "Weight of the retain loss on neighbours.")
    world_weight: float = flag(1.0, "Weight of the retain loss on world data.")
    transport_weight: float = flag(0.1, "Lambda of Eq. 8: weight of the distance.")
    distance: str = flag("wasserstein", "From the original weights; or manhattan, euclidean, ...")
    directions: int = flag(100, "Random directions for each parameter in each step.")
    eta: float = flag(0.1, "The loss's own number; --list_methods says which.")
    early_stopping: bool = flag(True, "Stop where the validation score falls; keep the best epoch.")
    learning_rate: float = flag(1e-5, "Peak rate; 0: by the method's rule.")
    weight_decay: float = 0.01
    per_device_train_batch_size: int = 32
    seed: int = 0
    save_strategy: str = "epoch"
    save_total_limit: int | None = 1
    logging_strategy: str = "epoch"
    remove_unused_columns: bool = False
    logging_nan_inf_filter: bool = False

    def __post_init__(self) -> None:
        self.use_cpu |= not torch.accelerator.is_available()  # else bf16 is refused there
        if self.gradient_checkpointing and not self.gradient_checkpointing_kwargs:
            self.gradient_checkpointing_kwargs = {"use_reentrant": False}
        super().__post_init__()
        self.dataloader_pin_memory = self.dataloader_pin_memory and self.device.type == "cuda"
        self._n_gpu = min(self.n_gpu, 1)  # else Trainer wraps the model in DataParallel, which takes no nested batches

    @property
    def weights(self) -> dict[str, float]:
        return {"forget": self.forget_weight, "retain": self.retain_weight, "world": self.world_weight}


class UnlearnTrainer(Trainer):
    """Trains on :class:`optout_train.data.Sets`; ``processing_class`` is the tokenizer.

    ``base`` is the folder of the model's files, which spare a copy of its original weights; ``teacher`` is the model
    before the first of a chain of requests, if that is another; ``renderer`` puts questions to the model. A PEFT
    adapter on the model is taken to be new: lessons are made without it.
    """

    args: Any
    model: Any
    loss_is_scaled_for_ga = False  # a mean over the step's pass is divided by the accumulated passes
    sampler: type[EpochSampler] = EpochSampler

    def __init__(
        self, model, args: UnlearnConfig, sets: Sets, *, base: Path | None = None, teacher=None,
        renderer: Renderer | None = None, **others,
    ) -> None:  # fmt: skip
        self.sets, self.teacher, sizes = sets, teacher or model, model.config.get_text_config()
        self.renderer = renderer or Renderer(others["processing_class"])
        self.encode = Encoder(self.renderer, getattr(sizes, "max_position_embeddings", 1 << 30))
        self.row, self.weights = LOSSES[args.loss], args.weights
        kept = {name: list(getattr(sets, name)) for name in KEPT if self.weights[name]}
        reads = self.row.reads if args.forget_weight else ()
        self.examples = Examples(len(sets.forget), reads, kept, self.encode, args.seed)
        scorable = {name: [r for r in records if r.can_be_scored] for name, records in sets.validation.items()}
        self.validation: dict[Any, Sequence[Any]] = {name: records for name, records in scorable.items() if records}
        args.eval_on_start = self.validation.keys() >= {"forget", "retain"}
        args.early_stopping = args.early_stopping and args.eval_on_start
        if args.early_stopping:
            args.eval_strategy, args.load_best_model_at_end = args.save_strategy, True
            args.metric_for_best_model, args.greater_is_better = "score", True
        steps = int(args.num_train_epochs * -(-len(sets.forget) // args.train_batch_size))
        args.learning_rate = args.learning_rate or self.rule_rate(sizes.hidden_size, sizes.num_hidden_layers, steps)
        # Every process must have as many passes as the others, whose shards it waits for.
        collator = partial(collate, tokens=PASS) if args.world_size == 1 else collate
        super().__init__(model, args, collator, self.examples, self.validation, **others)
        self.add_callback(Between(self))
        self.original = originals(model, base, not self.is_fsdp_enabled or args.local_process_index == 0)
        self.transport = Transport(model, self.original, args.distance, args.directions, args.seed)
        self.reference: dict[str, Answers] = {}
        self.noted: dict[str, Any] = {}  # of the last step, as the log has it
        self.begins_step = True

    # Hooks of a method

    def rule_rate(self, width: int, layers: int, steps: int) -> float:
        """The peak learning rate where 0 is given."""
        return 1e-5

    def make_lessons(self) -> None:
        """Before training, in the first process: fill ``self.examples.forget`` with what the loss reads, by kind.

        Here these are the records' own answers and a refusal drawn for each (own wording, in the manner of TOFU's).
        """
        texts = Path(__file__).with_name("refusals.txt").read_text(encoding="utf-8").splitlines()
        draw = random.Random(f"{self.args.seed}-refusals")
        for kind in self.examples.forget:
            made = [self.encode(r, draw.choice(texts) if kind == "refusal" else None) for r in self.sets.forget]
            self.examples.forget[kind] = made

    def passes(self, batch: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """The terms of a batch with what each reads: of a kept set one of its parts after the other."""
        kept = [(name, part) for name in KEPT if name in batch for part in batch[name]["parts"]]
        forget = [("forget", batch)] if "forget" in batch else []
        return forget + [(name, batch | {name: batch[name] | {"parts": [part]}}) for name, part in kept]

    def term(self, model, batch: dict[str, Any], name: str) -> Tensor:
        """An unweighted term of a pass: the mean over the step's records, as far as these are in the pass."""
        values = self.forget_values(model, batch) if name == "forget" else nll(self.answers(model, batch[name]))
        return (values * batch["weight"]).sum()

    def forget_values(self, model, batch: dict[str, Any]) -> Tensor:
        """The forget loss of each record of a pass, (batch,)."""
        places = batch["places"]
        columns = (column.chunk(len(places)) for column in self.answers(model, batch["forget"], self.row.token))
        now = {kind: Answers(*pair) for kind, *pair in zip(places, *columns, strict=True)}
        before = {kind: Answers(*(column[places[kind]] for column in self.reference[kind])) for kind in self.reference}
        return self.row.value(now, before, self.args.eta)

    def values(self, model, part: dict[str, Tensor], token) -> Tensor:
        """The values of a part's answer tokens, (n,)."""
        logits = answer_logits(model, self.accelerator.unwrap_model(model), part)
        return lesson(logits, part) if "top" in part else token(logits, part, self.args.eta)

    def extra_state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside weights and optimizer; ``load_extra_state`` is given it by a resumed run."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None: ...

    # A step

    def answers(self, model, of: dict[str, Any], token=log_prob) -> Answers:
        """Sums of the values of the answer tokens of a block (see :func:`optout_train.data.block`)."""
        sums = torch.zeros(2, of["size"], device=self.args.device)
        for part in of["parts"]:
            values = self.values(model, part, token)
            sums = sums.index_add(1, part["owners"], torch.stack([values, torch.ones_like(values)]))
        return Answers(*sums)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The loss; all passes but the last have had their ``backward``, so that one pass's graph is held at a time.

        DeepSpeed, whose ``backward`` counts passes, gets them in one.
        """
        total, passes = torch.zeros((), device=self.args.device), self.passes(inputs)
        for number, (name, part) in enumerate(passes, 1):
            apart = number < len(passes) and not self.is_deepspeed_enabled
            # DDP decides in the forward pass whether the backward pass will be averaged over processes.
            with self.accelerator.no_sync(model) if apart else nullcontext():
                value = self.term(model, part, name)
                self.note(name, value)
                loss = self.weights[name] * value
                if apart:
                    self.accelerator.backward(loss / self.current_gradient_accumulation_steps)
                    loss = loss.detach()
            total = total + loss
        return total

    def training_step(self, *arguments, **named) -> Tensor:
        loss = super().training_step(*arguments, **named)
        self.begins_step = self.accelerator.sync_gradients
        if self.begins_step and self.args.transport_weight:
            value = self.transport.add_gradient(self.args.transport_weight, self.state.global_step + 1)
            self.noted["transport"] = value
        return loss

    def note(self, name: str, value: Tensor) -> None:
        self.noted, self.begins_step = {} if self.begins_step else self.noted, False
        self.noted[name] = self.noted.get(name, 0) + value.detach() / self.current_gradient_accumulation_steps

    def log(self, logs, *others) -> None:  # type: ignore[override]
        super().log(logs | {name: float(value) for name, value in self.noted.items() if "loss" in logs}, *others)

    # What is measured

    def score(self, samples: Sequence[Any], group: int = 1) -> Answers:
        """Log-probabilities of many answers, shared over the processes and the same in each."""
        sums, counts = score_all(Scorer(self.model), samples, self.args.eval_batch_size, group)
        if hasattr(self.model, "reshard"):  # FSDP2 leaves the root whole after a forward pass without a backward pass
            self.model.reshard()
        return Answers(sums.float(), counts)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        """Probability, truth ratio and mc_accuracy of each validation set, forget and retain quality, and their score.

        The qualities lack ROUGE (nothing is generated); the score is their harmonic mean, 0 for a collapsed model.
        """
        measures: dict[str, float] = {}
        for name, records in self.validation.items():
            texts = [(r, text) for r in records for text in (r.answer, r.paraphrased_answer, *r.perturbed_answer)]
            group, spec = len(texts) // len(records), SETS[name]
            scores = torch.stack(self.score([self.encode(*pair) for pair in texts], group), 1)
            measured = []
            for i, (record, of) in enumerate(zip(records, scores.view(-1, group, 2).tolist(), strict=True)):
                doc = record.columns() | {"answer_scores": of}
                values = metrics.answer_values(doc, forgotten=spec.forgotten, choice=spec.choice)
                measured.append(metrics.Sample(record.entity if spec.of_target else "", record.question, i, values))
            for key in ("probability", "truth_ratio", "mc_accuracy"):
                measures[f"{name}_{key}"] = metrics.mean(measured, key).value
        forget = harmonic_mean([1 - measures["forget_probability"], measures["forget_truth_ratio"]])
        kept = [name for name in KEPT if name in self.validation]
        retain = harmonic_mean([measures[f"{name}_{key}"] for name in kept for key in ("probability", "truth_ratio")])
        before = [entry["eval_retain_quality"] for entry in self.state.log_history if "eval_retain_quality" in entry]
        score = harmonic_mean([forget, retain]) if retain >= COLLAPSE * [*before, retain][0] else 0.0
        measures |= {"forget_quality": forget, "retain_quality": retain, "score": score}
        measures = {f"{metric_key_prefix}_{name}": value for name, value in measures.items()}
        self.log(measures)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, measures)
        return measures

    # A run

    def train(self, resume_from_checkpoint=None, **others):  # type: ignore[override]
        """Make the lessons, or take those that the interrupted run has left, and train."""
        state: list[Any] = [None]
        path = Path(self.args.output_dir) / LESSONS
        if self.args.process_index == 0:
            if not resume_from_checkpoint:
                plain = getattr(self.model, "disable_adapter", nullcontext)  # it costs time and changes nothing yet
                with plain(), self.accelerator.autocast():
                    self.make_lessons()
                for name in self.examples.kept:
                    self.examples.read(name, self.args.num_train_epochs)
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.save((self.examples.forget, self.examples.sizes, self.examples.made), path)
            state = [loaded(path)]
        if self.args.world_size > 1:
            broadcast_object_list(state)
        self.examples.forget, self.examples.sizes, self.examples.made = state[0]
        self.teacher, self.resumed = None, resume_from_checkpoint
        return super().train(resume_from_checkpoint, **others)

    def begin(self) -> None:
        """Once the model is on its devices: what the loss compares with under the original weights."""
        path = Path(self.args.output_dir) / REFERENCE
        if self.resumed:
            self.load_extra_state(loaded(Path(self.resumed) / EXTRA))
        elif self.row.reference:
            known = {kind: tuple(self.score(samples)) for kind, samples in self.examples.forget.items()}
            if self.args.process_index == 0:
                torch.save(known, path)
            self.accelerator.wait_for_everyone()
        if self.row.reference:
            self.reference = {
                kind: Answers(*(c.to(self.args.device) for c in pair)) for kind, pair in loaded(path).items()
            }

    def _get_train_sampler(self, train_dataset=None) -> EpochSampler:
        args, size = self.args, len(self.examples)
        passes = args.gradient_accumulation_steps
        return self.sampler(size, args.per_device_train_batch_size, args.world_size, passes, args.seed)

    def get_decay_parameter_names(self, model) -> list[str]:
        return [name for name, _ in model.named_parameters()]  # the paper names no exceptions

    def floating_point_ops(self, inputs) -> int:
        return 0  # of nested batches Trainer cannot tell


class Between(TrainerCallback):
    """What a run does between Trainer's steps."""

    def __init__(self, trainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **_) -> None:
        self.trainer.begin()

    def on_save(self, args, state, control, **_) -> None:
        if state.is_world_process_zero:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / "extra.part"
            torch.save(self.trainer.extra_state(), path)
            path.rename(path.with_name(EXTRA))  # last: a checkpoint that has it is whole

    def on_evaluate(self, args, state, control, **_) -> None:
        """The paper's rule: stop where the validation score falls below the epoch's before; or the model collapsed."""
        scores = [entry["eval_score"] for entry in state.log_history if "eval_score" in entry][1:]  # after each epoch
        worse = bool(scores) and (scores[-1] == 0 or scores[-1] < max(scores[-2:]))
        control.should_training_stop |= args.early_stopping and worse


def loaded(path: Path):
    with torch.serialization.safe_globals([Sample]):
        return torch.load(path, map_location="cpu")


def answer_logits(model, inner, part: dict[str, Tensor]) -> Tensor:
    """The logits that predict a part's answer tokens, (n, vocabulary) in float32; no others are computed."""
    return logits_at(part["positions"], model, inner, input_ids=part["input_ids"]).float()
