"""Where a run lives on disk: a hidden partial folder with lock, log and checkpoints, then the finished folder.

``runs/.NAME.partial/`` stands beside ``runs/NAME/`` while a run is under way. A checkpoint is written under another
name, flushed and renamed, so whatever is there is whole; the finished folder appears in one rename, its manifest
written last.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lm_eval_elude.core import jsonio
from lm_eval_elude.core.manifest import Manifest, ManifestError, read_manifest, write_atomically
from lm_eval_elude.core.records import DataError
from optout_train.config import ConfigError, TrainConfig
from optout_train.sources import source_of

WEIGHTS, OPTIMIZER, STATE, LOG, SETTINGS = (
    "model.safetensors", "optimizer.safetensors", "state.json", "train_log.jsonl", "config.json",
)  # fmt: skip
# What a run keeps in its partial folder, also half-written.
_OURS = re.compile(r"step-\d+|.*\.tmp|final|replaced|\.?(config\.json|train_log\.jsonl)(\..*)?")


class RunFolder:
    """One run's place on disk, locked while this object is open.

    The lock is the kernel's (``flock`` on the partial folder): it ends with the process, however that ends.

    Attributes:
        output: the finished checkpoint's folder.
        partial: the hidden folder beside it.

    Raises:
        ConfigError: the path is none that a folder can have, or a symbolic link.
    """

    def __init__(self, output: Path) -> None:
        try:
            str(output).encode()  # a name that is not UTF-8 would break the manifest at the end
            if output.is_symlink():
                raise ConfigError(f"--output-dir {output} is a symbolic link; name the folder itself")
            self.output = output.resolve()
        except (ValueError, OSError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"--output-dir {str(output)[:200]!r} cannot be a folder: {error}") from None
        if not self.output.name:
            raise ConfigError(f"--output-dir {self.output} is no place for a run; name a new folder")
        self.partial = self.output.with_name(f".{self.output.name}.partial")
        self._replaced = self.partial / "replaced"  # a finished run, between the two renames that put a new one there
        self._lock, self._ready = -1, False

    def open(self, config: TrainConfig, *, overwrite: bool, resume: bool) -> Path | None:
        """Take the lock and make ready. Nothing is removed that is not a run's, and no finished run before its
        successor is whole.

        Returns:
            The checkpoint to go on from; None starts anew; :attr:`output` is finished as asked for.

        Raises:
            ConfigError: a run or something else is there and no flag says what to do with it, it had other settings,
                or it is running.
            OSError: the folder cannot be written.
        """
        self._keep_clear(config)
        self._take_lock()
        if self._replaced.exists() and not self.output.exists():  # killed between the two renames
            os.replace(self._replaced, self.output)
        there = self._what_is_there()
        if foreign := [path.name for path in self.partial.iterdir() if not _OURS.fullmatch(path.name)]:
            raise ConfigError(f"{self.partial} is where a run is kept, but holds {foreign[0]!r}: move it away")
        settings = self.partial / SETTINGS
        begun = _json(settings) if settings.exists() and not overwrite else None
        if resume and there and not config.differences(there.settings):
            if other := _changed_data(config, there):
                raise ConfigError(f"--resume: {self.output} is finished, but {other}; give another --output-dir")
            self._ready = not begun or not config.differences(begun)  # another run's beginning stays
            self.discard()
            return self.output
        if resume and begun and (other := config.differences(begun)):
            raise ConfigError(f"--resume: the interrupted run was started with {other}; give the same settings")
        if resume and there and not begun:
            raise ConfigError(
                f"--resume: {self.output} is a finished run with {config.differences(there.settings)}; give the same "
                "settings, another --output-dir, or --overwrite"
            )
        if not (resume or overwrite) and (there or begun):
            what = "is a finished run; give" if there else "has an unfinished run: --resume goes on,"
            then = "to replace it, or another folder" if there else "starts anew"
            raise ConfigError(f"--output-dir {self.output} {what} --overwrite {then}")
        if overwrite:
            for path in self.partial.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        write_atomically(settings, json.dumps(config.to_json(), indent=2) + "\n")
        self._ready = True
        for stale in [*self.partial.glob("*.tmp"), self.partial / "final", self._replaced]:
            shutil.rmtree(stale, ignore_errors=True)
        steps = sorted(self.partial.glob("step-*"))
        return steps[-1] if steps else None

    def _keep_clear(self, config: TrainConfig) -> None:
        """Refuse an output that is, contains or lies in what a run reads, or contains the current folder."""
        here = Path.cwd()
        for name, given in (("--model", config.model_path), ("--dataset", config.dataset), ("", str(here))):
            read = Path(os.path.realpath(os.path.expanduser(given)))
            inside = name and self.output.is_relative_to(read) and not here.is_relative_to(read)
            if os.path.exists(read) and (read.is_relative_to(self.output) or inside):
                what = f"that {name} names" if name else "that you are in"
                where = "is or lies in" if inside else "is or contains"
                raise ConfigError(f"--output-dir {self.output} {where} the folder {what}; name another folder")

    def _what_is_there(self) -> Manifest | None:
        """The manifest of the run at :attr:`output`; None where nothing is there, or an empty folder."""
        try:
            there = read_manifest(self.output)
        except ManifestError:
            there = None
        if not there or not there.settings:
            there = None
            if self.output.exists() and (not self.output.is_dir() or any(self.output.iterdir())):
                raise ConfigError(f"--output-dir {self.output} exists and is no run of optout-train; name a new folder")
        return there

    def log(self, entry: Mapping[str, Any]) -> None:
        """Append one line to the training log. It holds no times, so that the same command gives the same bytes."""
        with (self.partial / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any]) -> Path:
        """Write checkpoint ``step-N`` whole, then drop the others but the state's ``best`` and ``epoch_end``.

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
            if other.name not in (name, state["best"], state["epoch_end"]):
                shutil.rmtree(other)
        return self.partial / name

    def read_state(self, checkpoint: Path) -> dict[str, Any]:
        """The state of a checkpoint; the process that holds the lock cuts the log back to where it was then.

        Raises:
            ConfigError: its file is damaged.
        """
        state = _json(checkpoint / STATE)
        if self._lock >= 0 and (log := self.partial / LOG).exists():
            os.truncate(log, state["log_bytes"])
        return state

    def finish(self, fill: Callable[[Path], None]) -> None:
        """Make the finished folder: ``fill`` writes it (manifest last), one rename shows it, the partial one goes."""
        self._write_folder(fill, self.partial / "final")
        if old := self._what_is_there():  # asked again: a user may have put something there in the meantime
            os.replace(self.output, self._replaced)
        try:
            os.replace(self.partial / "final", self.output)
        except OSError:
            if old:
                os.replace(self._replaced, self.output)
            raise
        self.discard()

    def discard(self) -> None:
        """Remove the partial folder, if this run holds it and may write there, and let go of the lock."""
        if self._ready:
            shutil.rmtree(self.partial, ignore_errors=True)
        elif self._lock >= 0:
            with suppress(OSError):  # made for the lock; a folder with anything in it stays
                self.partial.rmdir()
        self.close()

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock, self._ready = -1, False

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


def _json(path: Path) -> dict[str, Any]:
    try:
        value = jsonio.load(path, nan=True)
    except DataError as error:
        raise _damaged(path, error) from None
    if not isinstance(value, dict):
        raise _damaged(path, "not a JSON object")
    return value


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, why: object) -> ConfigError:
    return ConfigError(f"{path} is damaged ({why}): the interrupted run cannot go on; --overwrite starts anew")


def _changed_data(config: TrainConfig, run: Manifest) -> str:
    """Which of the sets that a finished run read has other rows now; "" where none has."""
    source = source_of(config)
    for name, fingerprint in run.data_fingerprints.items():
        subset, _, split = name.rpartition("-")
        if source.load(subset, split).fingerprint != fingerprint:  # type: ignore[arg-type]
            return f"the data of {name} has changed since"
    return ""


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
    saved = _tensors(folder / WEIGHTS)
    with torch.no_grad():
        for name, parameter in trained_weights(model).items():
            parameter.copy_(_placed(saved[name], parameter))


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Put a checkpoint's optimizer state back, sharded as the parameters are."""
    parameters = dict(model.named_parameters())
    for entry, tensor in _tensors(folder / OPTIMIZER).items():
        name, key = entry.rsplit("/", 1)
        parameter = parameters[name]
        if key != "step":
            optimizer.state[parameter][key] = _placed(tensor, parameter)
        else:  # a fused step count lives beside the parameter, any other on the CPU
            optimizer.state[parameter][key] = tensor.to(parameter.device) if optimizer.defaults.get("fused") else tensor


def _placed(tensor: Tensor, like: Tensor) -> Tensor:
    data = tensor.to(like.device)
    return distribute_tensor(data, like.device_mesh, like.placements) if isinstance(like, DTensor) else data
