"""One run, read from top to bottom: open the folder, set up, take the steps, write the checkpoint.

Setup loads and builds everything before the first step, so that a bad record or flag stops a run early. A step is the
gradient of Eq. 8 in passes that fit in memory, clipped, and one update. After each epoch the model is measured and a
checkpoint is written, from which ``--resume`` goes on to the same bytes.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lm_eval_elude.data.files import file_hashes
from lm_eval_elude.errors import UserError
from lm_eval_elude.model.layers import repeatable
from lm_eval_elude.model.scorer import AnswerLogProbs, Scorer, emulates_bfloat16, load_model, score_all
from lm_eval_elude.text.chat import Encoded, Renderer, load_tokenizer
from optout_train.config import WHOLE_BATCH, TrainConfig
from optout_train.data import KEPT, StepIndices, TrainingData, load_training_data, passes
from optout_train.export import export
from optout_train.gradients import Setup, along_direction, backward, backward_at_worst, backward_relearned
from optout_train.relearned import Relearned
from optout_train.repselect import collapsed_gradient
from optout_train.run_folder import RunFolder, damaged, step_name
from optout_train.sources import Source, base_folder, lessons_model, source_of
from optout_train.stranger.lessons import with_lessons
from optout_train.stranger.teacher import Teacher
from optout_train.transport import Transport
from optout_train.validation import Validation, judge, unknown
from optout_train.weights import (
    InitialParameters,
    beside_text,
    checkpoint_tensors,
    distribute,
    freeze,
    make_optimizer,
    noise,
    placed,
    quiet,
    read_tensors,
    restore,
    text_parameters,
    trained_weights,
)

RELEARNED = "relearned.safetensors"  # in a checkpoint


def train(
    config: TrainConfig,
    output: Path,
    say: Callable[[str], object],
    *,
    overwrite: bool = False,
    resume: bool = False,
    checkpoint_every: int = 0,
    tracker: str = "",
) -> bool:
    """Train and write the checkpoint; returns whether there was anything left to do.

    Under ``torchrun`` or ``accelerate launch`` every process calls it; the first one writes and speaks to the user.
    Nothing but ``config`` changes the weights. The other arguments are those of the command line. UserError for bad
    input or an output folder that cannot be used, or where the loss was not finite before the first checkpoint.
    """
    from accelerate import Accelerator
    from accelerate.utils import broadcast_object_list

    began = time.process_time()
    quiet()
    folder = RunFolder(output)
    source = source_of(config)
    tracking: dict[str, Any] = {}
    if tracker:
        if find_spec(tracker) is None:  # Accelerate would go on without it
            raise UserError(f"--tracker {tracker} is not installed: pip install {tracker}")
        tracking = {"log_with": tracker, "project_dir": str(folder.output.with_name(f"{folder.output.name}-tracker"))}
    # With cpu=True Accelerate makes a process group of CPU processes; its detection does not.
    accelerator = Accelerator(cpu=not torch.accelerator.is_available(), **tracking)
    is_first = accelerator.is_main_process
    start: list[Path | None] = [None]
    try:
        if is_first:
            start[0] = folder.open(config, overwrite=overwrite, resume=resume)
        broadcast_object_list(start)
        if start[0] == folder.output:
            return False
        if tracker:
            accelerator.init_trackers("optout-train", config={k: str(v) for k, v in config.to_json().items()})
        say = say if is_first else str
        run = prepare(config, source, accelerator, say)
        state = begin(run, folder, start[0], began, say)
        take_all_steps(run, folder, state, checkpoint_every)
        finish(run, folder, state, source, say)
        accelerator.end_training()
        return True
    except BaseException:
        if is_first and not list(folder.partial.glob("step-*")):
            folder.discard()  # nothing to go on from
        raise
    finally:
        folder.close()
        if dist.is_initialized():
            dist.destroy_process_group()


# Setup


def prepare(config: TrainConfig, source: Source, accelerator: Any, say: Callable[[str], object]) -> Setup:
    """Load and build everything; every sample that training reads is encoded, so a bad one stops the run here."""
    if config.whole_batch and accelerator.num_processes > 1:
        raise UserError(f"{WHOLE_BATCH}: train in one process")
    device = accelerator.device
    repeatable(device)
    if (config.autocast or config.dtype == "bfloat16") and emulates_bfloat16(device):
        flag = "--autocast" if config.autocast else "--dtype bfloat16"
        say(f"warning: {flag}: this processor has no bfloat16 arithmetic, and is many times as fast in float32")
    torch.manual_seed(config.seed)
    tokenizer = load_tokenizer(config.model_path, revision=config.revision or None)
    base = base_folder(config)

    def load(name: str) -> Any:
        revision = config.revision or None if name == config.model_path else None
        return load_model(name, revision, getattr(torch, config.dtype)).to(device)

    has_lessons = (config.loss.made and config.forget_weight) or config.self_distill or config.loss.steers
    teacher = lessons_model(config) if has_lessons else config.model_path
    model = load(teacher)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", sys.maxsize)
    convention = source.convention
    renderer = Renderer(tokenizer, convention.wording, convention.system) if convention else Renderer(tokenizer)

    data = load_training_data(config, source, renderer, context, say)
    if has_lessons:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.autocast):
            data = with_lessons(config, data, Teacher(model, renderer, context), say)
    if teacher != config.model_path:
        say(f"lessons were made with the model before the first request: {teacher}")
        del model  # before the next one is loaded
        model = load(config.model_path)
    plan = data.plan(config)
    validation = Validation(config, data, source, say) if config.validate else None
    validation = validation if validation and validation.sets else None
    for indices in (step for epoch in plan for step in epoch):
        passes(config, data, indices, 0, 1, device)  # encodes every sample
    if config.relearn:
        data.forget.encode_all()  # the answers that are learnt again

    direction = collapsed_gradient(config, data, model) if config.loss.direction else {}
    if config.loss.noised:
        noise(text_parameters(model), config.eta, config.seed)
    freeze(config, model)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    inner = model  # without the wrapper that model has with --lora
    if config.lora:
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(
            r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM",
            exclude_modules=beside_text(model) or None,
        )  # fmt: skip
        model = get_peft_model(model, adapter)
        for settings in model.peft_config.values():  # sets, which would be saved in another order each time
            settings.target_modules = sorted(settings.target_modules)
            settings.exclude_modules = sorted(settings.exclude_modules) if settings.exclude_modules else None
    initial = None
    if config.transport_weight and not config.lora:
        initial = InitialParameters(model, base)
        if initial.copies:
            say(f"{len(initial.copies)} initial parameters are kept in memory: the base's files hold them otherwise")
    scorer: nn.Module = Scorer(model).train()
    if config.compile:
        inner.get_decoder().compile(dynamic=True)
    scorer = distribute(config, accelerator, inner, scorer)
    sizes = inner.config.get_text_config()
    rate = config.peak_rate(sizes.hidden_size, sizes.num_hidden_layers, sum(map(len, plan)))
    optimizer = make_optimizer(config, rate, [p for p in model.parameters() if p.requires_grad])
    transport = Transport(model, initial, config.distance, config.directions, config.seed)
    if config.transport_weight:
        _ = transport.low_rank  # an adapter that has no distance stops the run here
    reference = score_reference(config, data, scorer)
    relearned = None
    if config.relearn and config.forget_weight:
        if len(data.forget) < 2:
            raise UserError(f"--relearn halves the forget set, and it has {len(data.forget)} record")
        relearned = Relearned(model, sizes.hidden_size, len(data.forget), config.seed)
    return Setup(
        config=config, accelerator=accelerator, device=device, data=data, plan=plan, validation=validation,
        model=model, scorer=scorer, transport=transport, learning_rate=rate, optimizer=optimizer, reference=reference,
        weights=dict(config.set_weights), direction=direction, relearned=relearned,
    )  # fmt: skip


def score_reference(config: TrainConfig, data: TrainingData, scorer: nn.Module) -> dict[str, AnswerLogProbs]:
    """Log-probabilities that the forget loss compares with, by sequence: one pass before training, none after."""
    size = config.micro_batch_size or config.batch_size
    scores = {}
    for kind in config.loss.reference if config.forget_weight else ():
        samples = [Encoded(*data.samples("forget", i, (kind,))[0][:2]) for i in range(len(data.sequences[kind]))]
        scores[kind] = score_all(scorer, samples, size, autocast=config.autocast)
    return scores


# One step


def take_step(run: Setup, step: int, total: int, indices: StepIndices) -> dict[str, float]:
    """Update the weights once: on Eq. 8, or in the released recipe on its forget term and then on the rest.

    Steps are counted from 1; the learning rate falls over the ``total`` of the plan. Where a gradient norm is not
    finite nothing is updated. Returns the loss of Eq. 8, its terms unweighted, the gradient norm before clipping (of
    the last update), and the rate.
    """
    config, rank = run.config, run.accelerator.process_index
    forget, rest = passes(config, run.data, indices, rank, run.accelerator.num_processes, run.device)
    updates = [side for side in (forget, rest) if side] if config.released else [forget + rest]
    rate = run.learning_rate * (1 - (step - 1) / total)
    values = {"loss": 0.0}
    for number, update in enumerate(updates, 1):
        last = number == len(updates)
        # Of dropout and stochastic rounding; torch takes 64 bits.
        seed = (config.seed * 1_000_003 + step * 2 + number) % (1 << 63)
        torch.manual_seed(seed)
        if run.relearned:
            values["relearned"] = backward_relearned(run, run.relearned, step, indices)
        of_forget = along_direction if run.direction else backward_at_worst if config.sam else None
        if of_forget and forget and number == 1:
            values |= of_forget(run, forget)
            update = update[len(forget) :]
        values |= backward(run, update) if update else {}
        if config.transport_weight and last:
            values["transport"] = float(run.transport.add_gradient(config.transport_weight, step))
        limit = config.max_grad_norm if config.max_grad_norm and last else math.inf
        norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), limit)
        values["grad_norm"] = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not math.isfinite(values["grad_norm"]):
            break
        for group in run.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        torch.manual_seed(seed)  # again: dropout drew as often as a process has passes, and all must round alike
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)
    weights = run.weights | {"transport": config.transport_weight}
    values["loss"] = sum(weights[name] * values[name] for name in weights if name in values)
    for name in KEPT if config.retain_budget else ():
        if name in values:  # the dual variable of the constraint (PDU)
            raised = run.weights[name] + config.dual_step * (values[name] - config.retain_budget)
            run.weights[name] = values[f"{name}_weight"] = max(0.0, raised)
    return values | {"learning_rate": rate}


# The loop


@dataclass
class State:
    """What a checkpoint keeps beside tensors; ``best`` and ``epoch_end`` name the best and the last saved epoch's."""

    data: dict[str, str]  # fingerprints of the sets
    step: int = 0  # steps done
    sums: dict[str, float] = field(default_factory=dict)  # of the losses since the epoch began
    epochs: list[dict[str, Any]] = field(default_factory=list)
    best: str | None = None
    epoch_end: str | None = None
    stopped: str | None = None  # why the run ended early
    processor_seconds: float = 0.0  # of the first process, with setup and lessons; its clock is added to it
    weights: dict[str, float] = field(default_factory=dict)  # of the sets' losses, as the budget has moved them
    # SHA-256 of the base model's files; only the first process has them.
    base: dict[str, str] = field(default_factory=dict)

    @property
    def spent(self) -> float:
        """Seconds of the processor that the run has taken until now."""
        return self.processor_seconds + time.process_time()


def begin(run: Setup, folder: RunFolder, checkpoint: Path | None, began: float, say: Callable[[str], object]) -> State:
    """The state of a checkpoint, with its weights in the model, or that before the first step, measured.

    ``began`` is what the processor's clock showed when the command began.
    """
    base = file_hashes(base_folder(run.config)) if folder.is_ours else {}
    state = State(run.data.fingerprints, base=base)
    if checkpoint:
        try:
            state = msgspec.convert(folder.read_state(checkpoint), State)
        except msgspec.ValidationError as error:
            raise damaged(checkpoint, error) from None
        if changed := [name for name, value in state.data.items() if run.data.fingerprints.get(name) != value]:
            raise UserError(f"--resume: the data of {', '.join(changed)} has changed since the run was cut off")
        if base and any(base.get(name) != digest for name, digest in state.base.items()):
            raise UserError(f"--resume: the weights in {run.config.model_path} have changed since the run was cut off")
        state.base = base
        restore(run.model, run.optimizer, checkpoint)
        if run.relearned:
            run.relearned.restore(read_tensors(checkpoint / RELEARNED))
        run.weights.update(state.weights)
        say(f"resuming after step {state.step} of {sum(map(len, run.plan))}")
    state.processor_seconds -= began
    if state.step == 0 and run.validation:
        state.epochs.append({"epoch": 0, "validation": run.validation.measure(run.scorer)})
        log(run, folder, state.epochs[0], 0)
        if not (run.config.loss.learns or run.config.loss.noised) and (
            warning := unknown(state.epochs[0]["validation"])
        ):
            say(f"warning: {warning}")
    return state


def take_all_steps(run: Setup, folder: RunFolder, state: State, checkpoint_every: int) -> None:
    """Go through what is left of the plan, unless early stopping or a loss that is not finite ends it."""
    from tqdm import tqdm

    schedule = [
        (epoch, position == len(steps), indices)
        for epoch, steps in enumerate(run.plan, 1)
        for position, indices in enumerate(steps, 1)
    ]
    shown = None if folder.is_ours else True  # None: on a terminal only
    with tqdm(total=len(schedule), initial=state.step, unit="step", desc=run.config.method, disable=shown) as bar:
        for step, (epoch, ends_epoch, indices) in list(enumerate(schedule, 1))[state.step :]:
            if state.stopped:
                break
            values = take_step(run, step, len(schedule), indices)
            log(run, folder, {"step": step, "epoch": epoch, **values}, step)
            if not all(map(math.isfinite, values.values())):
                if not state.epoch_end:
                    raise UserError(
                        f"the loss is not finite in step {step}, before the first checkpoint; lower --learning-rate"
                    )
                state.stopped = f"the loss is not finite in step {step}"
                state.best = state.best or state.epoch_end  # whatever checkpoints are written in between
                break
            for name, value in values.items():
                if name not in ("learning_rate", "grad_norm"):
                    state.sums[name] = state.sums.get(name, 0.0) + value
            bar.set_postfix(loss=f"{values['loss']:.3f}", refresh=False)
            bar.update()
            if ends_epoch:
                end_epoch(run, folder, state, epoch, step)
            if (ends_epoch and is_mark(run.config, epoch)) or (checkpoint_every and step % checkpoint_every == 0):
                save(run, folder, state, step)


def is_mark(config: TrainConfig, epoch: int) -> bool:
    """Whether an epoch ends with validation and a checkpoint: each one where it may be the one that is kept, else ten.

    Both cost more than the steps of a small forget set.
    """
    return bool(config.patience) or epoch % max(1, config.epochs // 10) == 0 or epoch == config.epochs


def end_epoch(run: Setup, folder: RunFolder, state: State, epoch: int, step: int) -> None:
    """Mean losses, validation, and the verdict of early stopping."""
    config, steps = run.config, len(run.plan[epoch - 1])
    entry: dict[str, Any] = {"epoch": epoch, "losses": {k: v / steps for k, v in state.sums.items()}}
    state.sums = {}
    if is_mark(config, epoch):
        state.epoch_end = step_name(step)
        if run.validation:
            entry["validation"] = run.validation.measure(run.scorer)
    state.epochs.append(entry)
    log(run, folder, entry, step)
    if run.validation and config.patience:
        verdict = judge([e["validation"] for e in state.epochs], config.patience)
        if verdict.best == epoch:
            state.best = state.epoch_end
        if epoch < config.epochs:
            state.stopped = verdict.reason or None


def save(run: Setup, folder: RunFolder, state: State, step: int) -> None:
    tensors = checkpoint_tensors(run.model, run.optimizer, keep=folder.is_ours)
    if run.relearned:
        tensors[RELEARNED] = run.relearned.tensors()
    state.step, state.weights = step, run.weights
    folder.save(tensors, asdict(state) | {"processor_seconds": state.spent})
    run.accelerator.wait_for_everyone()


def finish(run: Setup, folder: RunFolder, state: State, source: Source, say: Callable[[str], object]) -> None:
    """Go back to the epoch that is kept, and write the finished folder."""
    if state.stopped:
        state.epochs.append({"stopped": state.stopped})
        log(run, folder, {"stopped": state.stopped})
        say(f"stopped early: {state.stopped}")
    if not state.best and run.validation and run.config.patience:
        say("no epoch kept the model whole: its last weights are written as they are")
    if state.best:
        restore(run.model, None, folder.partial / state.best)
        state.epochs.append({"kept": state.best})
        log(run, folder, {"kept": state.best})
    if run.config.loss.negated:
        negate(run)
    run.accelerator.wait_for_everyone()
    export(run.config, source, run.data, run.model, folder, state.epochs, state.base, state.spent)


@torch.no_grad()
def negate(run: Setup) -> None:
    """Put the weights as far on the other side of the initial ones as training moved them, times eta."""
    config = run.config
    initial = {} if config.lora else dict(load_model(config.model_path, config.revision or None).named_parameters())
    for name, weight in trained_weights(run.model).items():
        if name in initial:
            before = placed(initial[name].to(weight.dtype), weight).float()  # what did not move stays to the bit
            weight.copy_(before + config.eta * (before - weight.float()))
        elif "lora_B" in name:  # the adapter's change is the product of its factors
            weight.mul_(-config.eta)


def log(run: Setup, folder: RunFolder, entry: Mapping[str, Any], step: int = 0) -> None:
    """One line of the training log; its numbers also go to the tracker, if there is one."""
    folder.log(entry)
    numbers = {k: v for k, v in {**entry, **entry.get("validation", {})}.items() if isinstance(v, float)}
    if numbers:
        run.accelerator.log(numbers, step=step)
