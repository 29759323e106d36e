"""One run from configuration to finished checkpoint: load, loop, validate, stop, save."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lm_eval_elude.core.chat import Encoded, Renderer, load_tokenizer
from lm_eval_elude.core.dataset import resolve_targets
from lm_eval_elude.core.logprobs import AnswerLogProbs
from lm_eval_elude.core.manifest import Manifest, file_hashes, write_manifest
from optout_train import losses
from optout_train.checkpoint import (
    LOG,
    OPTIMIZER,
    WEIGHTS,
    RunFolder,
    load_optimizer,
    load_weights,
    optimizer_tensors,
    trained_weights,
    whole_tensors,
)
from optout_train.config import ConfigError, TrainConfig
from optout_train.data import StepIndices, collate, load_training_data, share
from optout_train.reference import AnswerScorer, InitialParameters, Reference, score_all
from optout_train.transport import Transport
from optout_train.validation import Validation, judge

# Tokens of one pass on a CPU: enough for its matrix products, few enough to pad little and stay near the caches.
CPU_PASS = 768
PACKAGES = ("torch", "transformers", "accelerate", "peft", "safetensors", "lm-eval-elude")


class TrainingError(RuntimeError):
    """Training cannot go on and nothing good was saved."""


@dataclass(frozen=True)
class RunOptions:
    """What a run does beside the configuration; none of it changes the weights.

    Attributes:
        output: folder of the finished checkpoint.
        overwrite: replace what is there.
        resume: go on from the last checkpoint of an interrupted run, or start.
        checkpoint_every: steps between checkpoints, besides one after each epoch (0: only those).
        tracker: tensorboard, wandb or trackio; "" for none.
    """

    output: Path
    overwrite: bool = False
    resume: bool = False
    checkpoint_every: int = 0
    tracker: str = ""


class Part(NamedTuple):
    """One forward and backward pass of a step: which loss, its weight, and the samples with their weights."""

    name: str
    weight: float
    samples: tuple[Encoded, ...]
    weights: tuple[float, ...]
    records: tuple[int, ...]


def train(config: TrainConfig, options: RunOptions, say: Callable[[str], None]) -> None:
    """Train and write the checkpoint of ``options.output``.

    Args:
        config: what to train.
        options: where and how.
        say: prints one line for the user (called in the main process only).

    Raises:
        ConfigError, DataError, ChatError, UnknownTargetError: bad input, one line each.
        TrainingError: the loss became infinite or NaN before the first checkpoint.
        OSError: the disk; the last checkpoint stays whole.
    """
    _quiet()
    from accelerate import Accelerator
    from accelerate.utils import broadcast_object_list

    targets = [target.name for target in resolve_targets(config.dataset, config.target)]
    # Told so, Accelerate joins CPU processes into a group; left to find out, it does not.
    accelerator = Accelerator(cpu=not torch.accelerator.is_available(), **_tracking(options))
    main = accelerator.is_main_process
    folder = RunFolder(options.output)
    start: list[Path | None] = [None]
    try:
        if main:
            start[0] = folder.open(config, overwrite=options.overwrite, resume=options.resume)
        broadcast_object_list(start)
        if options.tracker:
            accelerator.init_trackers("optout-train", config={k: str(v) for k, v in config.to_json().items()})
        run = _Run(config, targets, accelerator, folder, say if main else lambda line: None)
        run.train(start[0], options)
    except BaseException:
        if main and not list(folder.partial.glob("step-*")):
            folder.discard()  # nothing to go on from
        raise
    finally:
        folder.close()
        if dist.is_initialized():
            dist.destroy_process_group()


class _Run:
    def __init__(
        self, config: TrainConfig, targets: list[str], accelerator: Any, folder: RunFolder, say: Callable[[str], None]
    ) -> None:
        self.config, self.targets, self.accelerator, self.folder, self.say = config, targets, accelerator, folder, say
        self.device, self.main = accelerator.device, accelerator.is_main_process
        self.rank, self.processes = accelerator.process_index, accelerator.num_processes
        if config.forget_loss == "npo" and config.npo_form == "batch-mean" and self.processes > 1:
            raise ConfigError("--npo-form batch-mean is one loss of the whole batch: train in one process")
        if self.device.type == "cuda":  # the same command gives the same bytes
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.manual_seed(config.seed)
        self.tokenizer = load_tokenizer(config.model_path, revision=config.revision or None)
        self.renderer = Renderer(self.tokenizer)
        self.base = base_folder(config)
        model = load_model(config)
        self.limit = getattr(model.config, "max_position_embeddings", sys.maxsize)
        self.data = load_training_data(config, targets, self.renderer, self.limit)
        self.plan = self.data.steps(config)
        validation = Validation(config, self.data, targets, say) if config.validate else None
        self.validation = validation if validation and validation.sets else None
        self._encode_all()
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.to(self.device)
        if config.lora:
            from peft import LoraConfig, get_peft_model

            adapter = LoraConfig(
                r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
            )
            model = get_peft_model(model, adapter)
        self.model: Any = model
        initial = InitialParameters(model, self.base) if config.transport_weight and not config.lora else None
        if initial and initial.kept:
            self.say(f"{initial.kept} initial parameters are kept in memory: the base's files hold them otherwise")
        self.scorer: nn.Module = AnswerScorer(model).train()
        if config.compile:
            self._base_model().get_decoder().compile(dynamic=True)
        self._distribute()
        self.transport = Transport(model, initial or _no_parameter, config.distance, config.directions, config.seed)
        self.optimizer = make_optimizer(config, [p for p in model.parameters() if p.requires_grad])
        self.reference = self._reference()

    def train(self, checkpoint: Path | None, options: RunOptions) -> None:
        """Loop over the plan from a checkpoint (or the start) to the finished folder."""
        from tqdm import tqdm

        config, total = self.config, sum(map(len, self.plan))
        state: dict[str, Any] = {"step": 0, "epochs": [], "sums": {}, "best": None, "stopped": None}
        if checkpoint:
            state = self.folder.read_state(checkpoint)
            load_weights(self.model, checkpoint)
            load_optimizer(self.model, self.optimizer, checkpoint)
            self.say(f"resuming after step {state['step']} of {total}")
        elif self.main:
            (self.folder.partial / LOG).write_text("", encoding="utf-8")
        if state["step"] == 0 and self.validation:
            state["epochs"].append({"epoch": 0, "validation": self.validation.measure(self.scorer, self.device)})
            self._log(state["epochs"][0], 0)
        step = 0
        bar = tqdm(
            total=total, initial=state["step"], unit="step", desc=config.method, disable=None if self.main else True
        )
        with bar:
            for epoch, steps in enumerate(self.plan, 1):
                for position, indices in enumerate(steps, 1):
                    step += 1
                    if step <= state["step"] or state["stopped"]:
                        continue
                    values = self._step(step, total, indices)
                    self._log({"step": step, "epoch": epoch, **values}, step)
                    bad = not all(map(math.isfinite, values.values()))
                    if bad:
                        self._stop_on_bad_loss(state, step)
                        break
                    _accumulate(state["sums"], values)
                    bar.set_postfix(loss=f"{values['loss']:.3f}", refresh=False)
                    bar.update()
                    last = position == len(steps)
                    if last:
                        self._end_epoch(state, epoch, len(steps), step)
                    if last or (options.checkpoint_every and step % options.checkpoint_every == 0):
                        self._save_checkpoint(state, step)
        self._finish(state)
        if options.tracker:
            self.accelerator.end_training()

    # One step

    def _step(self, step: int, total: int, indices: StepIndices) -> dict[str, float]:
        """Gradient of Eq. 8, clipped, and one update (two where they alternate); returns what the log shows."""
        config = self.config
        forget, retain = self._parts(indices)
        rounds = [forget + retain] if config.updates == "joint" else [part for part in (forget, retain) if part]
        rate = config.learning_rate * (1 - (step - 1) / total)
        values = {"loss": 0.0}
        for number, parts in enumerate(rounds, 1):
            torch.manual_seed(config.seed * 1_000_003 + step * 2 + number)  # dropout and stochastic rounding
            values |= self._backward(parts)
            if config.transport_weight and number == len(rounds):
                values["transport"] = float(self.transport.add_gradient(config.transport_weight, step))
            norm = torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), config.max_grad_norm if config.max_grad_norm else math.inf
            )
            values["grad_norm"] = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
            if not math.isfinite(values["grad_norm"]):
                break
            for group in self.optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        weights = self._weights() | {"transport": config.transport_weight}
        values["loss"] = sum(weights[name] * values[name] for name in weights if name in values)
        return values | {"learning_rate": rate}

    def _weights(self) -> dict[str, float]:
        config = self.config
        return {"forget": config.forget_weight, "retain": config.retain_weight, "world": config.world_weight}

    def _parts(self, indices: StepIndices) -> tuple[list[Part], list[Part]]:
        """The passes of this process: those of the forget loss, and those of the retain losses."""
        sides: tuple[list[Part], list[Part]] = ([], [])
        for name, weight in self._weights().items():
            records = getattr(indices, name)
            if not weight or not records:
                continue
            texts = [self._samples(name, record) for record in records]
            lengths = [max(len(sample.ids) for sample in samples) for samples in texts]
            size = self.config.micro_batch_size or self._pass_size(name, lengths)
            for part in share(lengths, self.rank, self.processes, size):
                # A DPO record brings two sequences: first all answers, then all refusals.
                columns = zip(*(texts[i] for i in part.positions), strict=True)
                samples = tuple(sample for column in columns for sample in column)
                chosen = tuple(records[i] for i in part.positions)
                sides[name != "forget"].append(Part(name, weight, samples, part.weights, chosen))
        return sides

    def _pass_size(self, name: str, lengths: Sequence[int]) -> int:
        """Records of one pass where the user names no number: all, or on a CPU those of :data:`CPU_PASS` tokens."""
        whole_batch = name == "forget" and self.config.forget_loss == "npo" and self.config.npo_form == "batch-mean"
        if self.device.type != "cpu" or whole_batch:
            return 0
        return max(1, round(CPU_PASS * len(lengths) / sum(lengths)))

    def _samples(self, name: str, record: int) -> tuple[Encoded, ...]:
        """The sequences that a record brings into its loss."""
        if name != "forget":
            return (getattr(self.data, name).encode(record),)
        answer, loss = self.data.forget.encode, self.config.forget_loss
        refusal = self.data.refusals[record]
        if loss == "dpo":
            return answer(record), answer(record, refusal)
        return (answer(record, refusal) if loss == "idk" else answer(record),)

    def _backward(self, parts: Sequence[Part]) -> dict[str, float]:
        """Accumulate the gradient of all parts; returns each set's mean loss over the whole step, unweighted."""
        means = {
            name: torch.zeros((), dtype=torch.float64, device=self.device)
            for name in dict.fromkeys(p.name for p in parts)
        }
        for number, part in enumerate(parts, 1):
            with self._sync(number == len(parts)):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.autocast):
                    answers = AnswerLogProbs(*self.scorer(*collate(part.samples, self.device)))
                per_example = self._loss(part, answers)
                weights = torch.tensor(part.weights, device=self.device)
                if len(per_example) != len(weights):  # the batch-mean form is one value
                    weights = torch.ones(1, device=self.device)
                mean = (per_example * weights).sum()
                # DDP and FSDP average gradients over processes; the weights already sum to 1 over all of them.
                (mean * part.weight * self.processes).backward()
                means[part.name] += mean.detach()
        totals = torch.stack(list(means.values()))
        if self.processes > 1:
            dist.all_reduce(totals)
        return dict(zip(means, totals.tolist(), strict=True))

    def _loss(self, part: Part, answers: AnswerLogProbs) -> Tensor:
        config = self.config
        if part.name != "forget" or config.forget_loss == "idk":
            return losses.nll(answers)
        if config.forget_loss == "ga":
            return losses.ga(answers)
        records = torch.tensor(part.records, device=self.device)
        before = AnswerLogProbs(*(column[records] for column in self.reference.answers))
        if config.forget_loss == "npo":
            if config.npo_form == "batch-mean":
                return losses.npo(losses.batch_mean(answers), losses.batch_mean(before).float(), config.eta)
            return losses.npo(answers.sums, before.sums.float(), config.eta)
        answered, refused = answers.sums.chunk(2)
        refused_before = self.reference.refusals.sums[records].float()
        return losses.dpo(refused, refused_before, answered, before.sums.float(), config.eta)

    def _sync(self, last: bool) -> Any:
        """Exchange gradients in the last pass of a step only."""
        if self.config.shard and self.processes > 1:
            self.scorer.set_requires_gradient_sync(last)  # type: ignore[operator]
            return nullcontext()
        return nullcontext() if last or self.processes == 1 else self.scorer.no_sync()  # type: ignore[operator]

    # Before the loop

    def _base_model(self) -> Any:
        """The transformers model, inside the adapter's wrapper if there is one."""
        return self.model.get_base_model() if self.config.lora else self.model

    def _distribute(self) -> None:
        if self.processes == 1:
            return
        if not self.config.shard:
            self.scorer = self.accelerator.prepare_model(self.scorer)
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.processes,))
        for module in self._base_model().get_decoder().layers:
            fully_shard(module, mesh=mesh)
        fully_shard(self.scorer, mesh=mesh)

    def _reference(self) -> Reference:
        """Log-probabilities that the forget loss compares with: one pass before training, none after."""
        config, forget = self.config, self.data.forget
        empty = AnswerLogProbs(torch.empty(0), torch.empty(0))
        if config.forget_loss not in ("npo", "dpo") or not config.forget_weight:
            return Reference(empty, empty)
        size = config.micro_batch_size or config.batch_size
        answers = score_all(self.scorer, [forget.encode(i) for i in range(len(forget))], size, self.device)
        if config.forget_loss == "npo":
            return Reference(answers, empty)
        refusals = [forget.encode(i, self.data.refusals[i]) for i in range(len(forget))]
        return Reference(answers, score_all(self.scorer, refusals, size, self.device))

    def _encode_all(self) -> None:
        """Render every sample the plan reads before the first step: a sample that is too long stops the run here."""
        for epoch in self.plan:
            for indices in epoch:
                for name, weight in self._weights().items():
                    for record in getattr(indices, name) if weight else ():
                        self._samples(name, record)

    # After each epoch

    def _end_epoch(self, state: dict[str, Any], epoch: int, steps: int, step: int) -> None:
        """Mean losses, validation, and the verdict of early stopping."""
        entry: dict[str, Any] = {"epoch": epoch, "losses": {k: v / steps for k, v in state["sums"].items()}}
        state["sums"] = {}
        if self.validation:
            entry["validation"] = self.validation.measure(self.scorer, self.device)
        state["epochs"].append(entry)
        self._log(entry, step)
        if self.validation and self.config.patience:
            verdict = judge([e["validation"] for e in state["epochs"]], self.config.patience)
            if verdict.best == epoch:
                state["best"] = f"step-{step:08d}"
            if epoch < self.config.epochs:
                state["stopped"] = verdict.reason or None

    def _stop_on_bad_loss(self, state: dict[str, Any], step: int) -> None:
        checkpoints = sorted(path.name for path in self.folder.partial.glob("step-*"))
        if not checkpoints:
            raise TrainingError(f"the loss is not finite in step {step}, before any checkpoint; lower --learning-rate")
        state["stopped"] = f"the loss is not finite in step {step}"
        state["best"] = state["best"] or checkpoints[-1]

    def _save_checkpoint(self, state: dict[str, Any], step: int) -> None:
        weights = whole_tensors(trained_weights(self.model), self.main)
        moments = whole_tensors(optimizer_tensors(self.model, self.optimizer), self.main)
        if self.main:
            self.folder.save(step, {WEIGHTS: weights, OPTIMIZER: moments}, state)
        state["step"] = step
        self.accelerator.wait_for_everyone()

    # At the end

    def _finish(self, state: dict[str, Any]) -> None:
        if state["stopped"]:
            state["epochs"].append({"stopped": state["stopped"]})
            self._log({"stopped": state["stopped"]})
            self.say(f"stopped early: {state['stopped']}")
            if not state["best"]:
                self.say("no epoch kept the model whole: its last weights are written as they are")
        if state["best"]:
            load_weights(self.model, self.folder.partial / state["best"])
            state["epochs"].append({"kept": state["best"]})
            self._log({"kept": state["best"]})
        self.accelerator.wait_for_everyone()
        if self.config.lora:
            state_dict = trained_weights(self.model)
        else:  # a tied weight is named once: the second name would be saved as a second copy
            names = dict(self.model.named_parameters())
            twice = dict(self.model.named_parameters(remove_duplicate=False)).keys() - names
            state_dict = {name: tensor for name, tensor in self.model.state_dict().items() if name not in twice}
        weights = whole_tensors(state_dict, self.main)
        if self.main:
            self.folder.finish(lambda folder: self._write(folder, weights, state))

    def _write(self, folder: Path, weights: dict[str, Tensor], state: Mapping[str, Any]) -> None:
        config, model = self.config, self.model
        if config.merge:
            model = model.merge_and_unload()
            weights = model.state_dict()
        model.save_pretrained(folder, state_dict=weights)
        self.tokenizer.save_pretrained(folder)
        (folder / LOG).write_bytes((self.folder.partial / LOG).read_bytes())
        manifest = Manifest(
            targets=tuple(self.targets),
            dataset=config.dataset,
            method=config.method,
            data_fingerprints=self.data.fingerprints,
            settings=config.to_json(),
            base_model={"name": config.model, "weights": file_hashes(self.base)},
            weights=file_hashes(folder),
            seed=config.seed,
            versions=versions(),
            epochs=state["epochs"],
        )
        write_manifest(folder, manifest)

    def _log(self, entry: Mapping[str, Any], step: int = 0) -> None:
        """One line of the training log; its numbers also go to the tracker, if there is one."""
        if not self.main:
            return
        self.folder.log(entry)
        numbers = {k: v for k, v in {**entry, **entry.get("validation", {})}.items() if isinstance(v, float)}
        if numbers:
            self.accelerator.log(numbers, step=step)


def load_model(config: TrainConfig) -> Any:
    """The model to train, on the CPU.

    Raises:
        ConfigError: it cannot be loaded (no such folder or Hub id, no weights, damaged weights).
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            config.model_path,
            revision=config.revision or None,
            dtype=getattr(torch, config.dtype),
            use_safetensors=True,
        )
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"--model {config.model!r} cannot be loaded: {reason}") from None


def base_folder(config: TrainConfig) -> Path:
    """Where the base model's files are: its folder, or the Hub snapshot in the cache.

    Raises:
        ConfigError: there is no such folder or Hub id.
    """
    from transformers.utils import cached_file

    try:
        found = cached_file(config.model_path, "config.json", revision=config.revision or None)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--model {config.model!r} cannot be loaded: {reason}") from None
    return Path(str(found)).parent


def make_optimizer(config: TrainConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW; for bfloat16 weights torchao's, which rounds stochastically, as plain rounding loses steps of 1e-5."""
    settings: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if config.dtype == "bfloat16" and not config.lora:
        try:
            from torchao.optim import _AdamW
        except ImportError:
            raise ConfigError("--dtype bfloat16 needs torchao: pip install torchao, or give --dtype float32") from None
        return _AdamW(parameters, bf16_stochastic_round=True, **settings)
    return torch.optim.AdamW(parameters, fused=True, **settings)


def _no_parameter(name: str) -> Tensor:
    raise AssertionError(f"{name}: no initial parameters were asked for")


def versions() -> dict[str, str]:
    """Versions of what the weights depend on."""
    return {"python": ".".join(map(str, sys.version_info[:3]))} | {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError

    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _accumulate(sums: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if name not in ("learning_rate", "grad_norm"):
            sums[name] = sums.get(name, 0.0) + value


def _tracking(options: RunOptions) -> dict[str, Any]:
    if not options.tracker:
        return {}
    if find_spec(options.tracker) is None:  # Accelerate would go on without it
        raise ConfigError(f"--tracker {options.tracker} is not installed: pip install {options.tracker}")
    return {"log_with": options.tracker, "project_dir": str(options.output.with_name(f"{options.output.name}-tracker"))}


def _quiet() -> None:
    """Keep the terminal for our own lines."""
    from transformers.utils import logging as transformers_logging

    warnings.filterwarnings("ignore", module="torch|transformers|accelerate|peft")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
