"""Where a run lives on disk: a hidden partial folder with lock, log and checkpoints, then the finished folder.

``runs/.NAME.partial/`` stands beside ``runs/NAME/`` while a run is under way. A checkpoint is written under another
name, flushed and renamed, so whatever is there is whole; the finished folder appears in one rename, its manifest
written last.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lm_eval_elude.core.manifest import FILE_NAME, write_atomically
from optout_train.config import ConfigError, TrainConfig

WEIGHTS, OPTIMIZER, STATE, LOG, SETTINGS = (
    "model.safetensors", "optimizer.safetensors", "state.json", "train_log.jsonl", "config.json",
)  # fmt: skip


class RunFolder:
    """One run's place on disk, locked while this object is open.

    The lock is the kernel's (``flock`` on the partial folder): it ends with the process, however that ends.

    Attributes:
        output: the finished checkpoint's folder.
        partial: the hidden folder beside it.
    """

    def __init__(self, output: Path) -> None:
        self.output = output.absolute()
        self.partial = self.output.with_name(f".{self.output.name}.partial")
        self._lock = -1

    @property
    def finished(self) -> bool:
        """Whether the output folder holds a complete checkpoint."""
        return (self.output / FILE_NAME).is_file()

    def open(self, config: TrainConfig, *, overwrite: bool, resume: bool) -> Path | None:
        """Take the lock and make ready.

        Returns:
            The checkpoint to go on from; None starts anew.

        Raises:
            ConfigError: a run is there and no flag says what to do with it, it had other settings, or it is running.
            OSError: the folder cannot be written.
        """
        if self.output.exists() and not overwrite:
            what = "is a finished run" if self.finished else "exists"
            raise ConfigError(f"--output-dir {self.output} {what}; give --overwrite to replace it, or another folder")
        self._take_lock()
        if overwrite:
            self._clear()
        settings = self.partial / SETTINGS
        if settings.exists():
            if not resume:
                raise ConfigError(
                    f"--output-dir {self.output} has an unfinished run: --resume goes on, --overwrite starts anew"
                )
            before, now = json.loads(settings.read_text(encoding="utf-8")), config.to_json()
            if other := [name for name in now if before.get(name) != now[name]]:
                flags = ", ".join(f"--{name.replace('_', '-')} {before.get(name)!r}" for name in other)
                raise ConfigError(f"--resume: the interrupted run was started with {flags}; give the same settings")
        else:
            write_atomically(settings, json.dumps(config.to_json(), indent=2) + "\n")
        for stale in [*self.partial.glob("*.tmp"), self.partial / "final"]:
            shutil.rmtree(stale, ignore_errors=True)
        steps = sorted(self.partial.glob("step-*"))
        return steps[-1] if steps else None

    def log(self, entry: Mapping[str, Any]) -> None:
        """Append one line to the training log. It holds no times, so that the same command gives the same bytes."""
        with (self.partial / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any]) -> Path:
        """Write checkpoint ``step-N`` whole, then drop the others but the one that ``state["best"]`` names.

        Args:
            step: optimizer steps done.
            tensors: by file name.
            state: JSON-ready; the length of the log is added.
        """
        log = self.partial / LOG
        state = {**state, "step": step, "log_bytes": log.stat().st_size if log.exists() else 0}
        name = f"step-{step:08d}"

        def fill(folder: Path) -> None:
            for file, content in tensors.items():
                save_file({key: value.contiguous() for key, value in content.items()}, folder / file)
            (folder / STATE).write_text(json.dumps(state), encoding="utf-8")

        self._write_folder(fill, self.partial / name)
        for other in self.partial.glob("step-*"):
            if other.name not in (name, state.get("best") or name):
                shutil.rmtree(other)
        return self.partial / name

    def read_state(self, checkpoint: Path) -> dict[str, Any]:
        """The state of a checkpoint; the process that holds the lock cuts the log back to where it was then."""
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        if self._lock >= 0 and (log := self.partial / LOG).exists():
            os.truncate(log, state["log_bytes"])
        return state

    def finish(self, fill: Callable[[Path], None]) -> None:
        """Make the finished folder: ``fill`` writes it (manifest last), one rename shows it, the partial one goes."""
        self._write_folder(fill, self.partial / "final")
        if self.output.exists():  # only under --overwrite
            os.replace(self.output, self.partial / "replaced.tmp")
        os.replace(self.partial / "final", self.output)
        self.discard()

    def discard(self) -> None:
        """Remove the partial folder, if this run holds it, and let go of the lock."""
        if self._lock >= 0:
            shutil.rmtree(self.partial, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take_lock(self) -> None:
        while True:
            self.partial.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.partial, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                raise ConfigError(f"--output-dir {self.output}: another optout-train is writing there") from None
            try:  # another run may have finished and removed the folder in between
                if os.stat(self.partial).st_ino == os.fstat(handle).st_ino:
                    self._lock = handle
                    return
            except FileNotFoundError:
                pass
            os.close(handle)

    def _clear(self) -> None:
        for path in self.partial.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    @staticmethod
    def _write_folder(fill: Callable[[Path], None], folder: Path) -> None:
        temporary = folder.with_name(f"{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            fill(temporary)
            for path in [*temporary.rglob("*"), temporary]:
                handle = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
            os.replace(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def whole_tensors(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Sharded or not, as ordinary CPU tensors. Every process must call it; only those that ``keep`` hold the result."""
    result = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            result[name] = whole.detach().cpu()
    return result


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that train, by name."""
    return {name: p.data for name, p in model.named_parameters() if p.requires_grad}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as ``parameter/entry``: plain tensors, so that nothing needs a pickle."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {f"{names[p]}/{key}": value for p, state in optimizer.state.items() for key, value in state.items()}


def load_weights(model: nn.Module, folder: Path) -> None:
    """Put a checkpoint's weights back into the model, sharded as it is."""
    saved = load_file(folder / WEIGHTS)
    with torch.no_grad():
        for name, parameter in trained_weights(model).items():
            parameter.copy_(_placed(saved[name], parameter))


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Put a checkpoint's optimizer state back, sharded as the parameters are."""
    parameters = dict(model.named_parameters())
    for entry, tensor in load_file(folder / OPTIMIZER).items():
        name, key = entry.rsplit("/", 1)
        parameter = parameters[name]
        if key != "step":
            optimizer.state[parameter][key] = _placed(tensor, parameter)
        else:  # a fused step count lives beside the parameter, any other on the CPU
            optimizer.state[parameter][key] = tensor.to(parameter.device) if optimizer.defaults.get("fused") else tensor


def _placed(tensor: Tensor, like: Tensor) -> Tensor:
    data = tensor.to(like.device)
    return distribute_tensor(data, like.device_mesh, like.placements) if isinstance(like, DTensor) else data
