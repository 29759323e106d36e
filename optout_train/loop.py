"""One run from configuration to finished checkpoint: steps, log, checkpoints, validation, early stopping."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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
from optout_train.export import export
from optout_train.setup import Setup, prepare, quiet
from optout_train.sources import source_of
from optout_train.step import take_step
from optout_train.validation import judge, unknown


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


def train(config: TrainConfig, options: RunOptions, say: Callable[[str], None]) -> bool:
    """Train and write the checkpoint of ``options.output``; returns whether there was anything left to do.

    Args:
        config: what to train.
        options: where and how.
        say: prints one line for the user (called in the main process only).

    Raises:
        ConfigError, DataError, ChatError, UnknownTargetError: bad input, one line each.
        TrainingError: the loss became infinite or NaN in the first epoch.
        OSError: the disk; the last checkpoint stays whole.
    """
    quiet()
    from accelerate import Accelerator
    from accelerate.utils import broadcast_object_list

    folder = RunFolder(options.output)
    source = source_of(config)
    # Told so, Accelerate joins CPU processes into a group; left to find out, it does not.
    accelerator = Accelerator(cpu=not torch.accelerator.is_available(), **_tracking(options))
    main = accelerator.is_main_process
    start: list[Path | None] = [None]
    try:
        if main:
            start[0] = folder.open(config, overwrite=options.overwrite, resume=options.resume)
        broadcast_object_list(start)
        if start[0] == folder.output:
            return False
        if options.tracker:
            accelerator.init_trackers("optout-train", config={k: str(v) for k, v in config.to_json().items()})
        tell = say if main else lambda line: None
        _Loop(prepare(config, source, accelerator, tell), folder, tell).train(start[0], options)
        return True
    except BaseException:
        if main and not list(folder.partial.glob("step-*")):
            folder.discard()  # nothing to go on from
        raise
    finally:
        folder.close()
        if dist.is_initialized():
            dist.destroy_process_group()


class _Loop:
    def __init__(self, run: Setup, folder: RunFolder, say: Callable[[str], None]) -> None:
        self.run, self.folder, self.say = run, folder, say

    def train(self, checkpoint: Path | None, options: RunOptions) -> None:
        """Loop over the plan from a checkpoint (or the start) to the finished folder."""
        from tqdm import tqdm

        run, total = self.run, sum(map(len, self.run.plan))
        state: dict[str, Any] = {"step": 0, "epochs": [], "sums": {}, "best": None, "stopped": None}
        state |= {"epoch_end": None, "data": run.data.fingerprints}
        if checkpoint:
            state = self.folder.read_state(checkpoint)
            if other := [name for name, value in state["data"].items() if run.data.fingerprints.get(name) != value]:
                raise ConfigError(f"--resume: the data of {', '.join(other)} has changed since the run was cut off")
            load_weights(run.model, checkpoint)
            load_optimizer(run.model, run.optimizer, checkpoint)
            self.say(f"resuming after step {state['step']} of {total}")
        elif run.main:
            (self.folder.partial / LOG).write_text("", encoding="utf-8")
        if state["step"] == 0 and run.validation:
            state["epochs"].append({"epoch": 0, "validation": run.validation.measure(run.scorer, run.device)})
            self._log(state["epochs"][0], 0)
            if not run.forget_loss.learns and (warning := unknown(state["epochs"][0]["validation"])):
                self.say(f"warning: {warning}")
        step = 0
        bar = tqdm(
            total=total,
            initial=state["step"],
            unit="step",
            desc=run.config.method,
            disable=None if run.main else True,
        )
        with bar:
            for epoch, steps in enumerate(run.plan, 1):
                for position, indices in enumerate(steps, 1):
                    step += 1
                    if step <= state["step"] or state["stopped"]:
                        continue
                    values = take_step(run, step, total, indices)
                    self._log({"step": step, "epoch": epoch, **values}, step)
                    if not all(map(math.isfinite, values.values())):
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
            run.accelerator.end_training()

    def _end_epoch(self, state: dict[str, Any], epoch: int, steps: int, step: int) -> None:
        """Mean losses, validation, and the verdict of early stopping."""
        run = self.run
        entry: dict[str, Any] = {"epoch": epoch, "losses": {k: v / steps for k, v in state["sums"].items()}}
        state["sums"] = {}
        # It costs more than the steps of a small forget set: where it chooses no epoch, ten times show the course.
        every = 1 if run.config.patience else max(1, run.config.epochs // 10)
        if run.validation and (epoch % every == 0 or epoch == run.config.epochs):
            entry["validation"] = run.validation.measure(run.scorer, run.device)
        state["epochs"].append(entry)
        self._log(entry, step)
        state["epoch_end"] = f"step-{step:08d}"
        if run.validation and run.config.patience:
            verdict = judge([e["validation"] for e in state["epochs"]], run.config.patience)
            if verdict.best == epoch:
                state["best"] = state["epoch_end"]
            if epoch < run.config.epochs:
                state["stopped"] = verdict.reason or None

    def _stop_on_bad_loss(self, state: dict[str, Any], step: int) -> None:
        """Go back to the best epoch, or the last: which it is does not depend on how often checkpoints are written."""
        if not state["epoch_end"]:
            raise TrainingError(f"the loss is not finite in step {step}, in the first epoch; lower --learning-rate")
        state["stopped"] = f"the loss is not finite in step {step}"
        state["best"] = state["best"] or state["epoch_end"]

    def _save_checkpoint(self, state: dict[str, Any], step: int) -> None:
        run = self.run
        weights = whole_tensors(trained_weights(run.model), run.main)
        moments = whole_tensors(optimizer_tensors(run.model, run.optimizer), run.main)
        if run.main:
            self.folder.save(step, {WEIGHTS: weights, OPTIMIZER: moments}, state)
        state["step"] = step
        run.accelerator.wait_for_everyone()

    def _finish(self, state: dict[str, Any]) -> None:
        run = self.run
        if state["stopped"]:
            state["epochs"].append({"stopped": state["stopped"]})
            self._log({"stopped": state["stopped"]})
            self.say(f"stopped early: {state['stopped']}")
            if not state["best"]:
                self.say("no epoch kept the model whole: its last weights are written as they are")
        if state["best"]:
            load_weights(run.model, self.folder.partial / state["best"])
            state["epochs"].append({"kept": state["best"]})
            self._log({"kept": state["best"]})
        run.accelerator.wait_for_everyone()
        export(run, self.folder, state)

    def _log(self, entry: Mapping[str, Any], step: int = 0) -> None:
        """One line of the training log; its numbers also go to the tracker, if there is one."""
        if not self.run.main:
            return
        self.folder.log(entry)
        numbers = {k: v for k, v in {**entry, **entry.get("validation", {})}.items() if isinstance(v, float)}
        if numbers:
            self.run.accelerator.log(numbers, step=step)


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
