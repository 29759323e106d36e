"""Where a run lives on disk: a hidden partial folder with lock, log and checkpoints, then the finished folder.

``runs/.NAME.partial/`` stands beside ``runs/NAME/`` while a run is under way. Checkpoints and the finished folder are
written under another name, flushed and renamed, so whatever is there is whole. What is removed was written here: the
partial folder has our lock file in it, and a finished run lists its files with their hashes in :data:`WRITTEN`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock
from safetensors.torch import save_file
from torch import Tensor

from lm_eval_elude.data import jsonio
from lm_eval_elude.data.files import file_hashes, new_folder, sha256, write_text
from lm_eval_elude.data.manifest import Manifest, read_manifest
from lm_eval_elude.errors import UserError
from optout_train.config import TrainConfig
from optout_train.sources import base_folder, source_of

LOCK = "optout-train.lock"  # in a partial folder: the mark that it is ours
WRITTEN = ".optout-train.json"  # in a finished run: the SHA-256 of each file that we wrote
LOG, SETTINGS, STATE = "train_log.jsonl", "config.json", "state.json"
FINAL, REPLACED, SCORES = "final", "replaced", "scores"
# What a run keeps in its partial folder; the names with dots are being written, or were when the run was killed.
_NAMES = rf"step-\d{{8}}|{FINAL}|{SCORES}|{REPLACED}|{SETTINGS}|{LOG}"
_KEPT = re.compile(rf"{LOCK}|{_NAMES}|\.({_NAMES})\.\w+")


class RunFolder:
    """One run's place on disk: ``output`` is the finished folder, ``partial`` the hidden one beside it.

    :meth:`open` or :meth:`lock` takes the lock, which also ends with the process. UserError where the path is none that
    a folder can have, or a symbolic link.
    """

    def __init__(self, output: Path) -> None:
        if output.is_symlink():
            raise UserError(f"--output-dir {output} is a symbolic link; name the folder itself")
        try:
            str(output).encode()  # a name that is not UTF-8 would break the manifest at the end
            self.output = output.resolve()
        except (ValueError, OSError) as error:
            raise UserError(f"--output-dir {str(output)[:200]!r} cannot be a folder: {error}") from None
        if not self.output.name:
            raise UserError(f"--output-dir {self.output} is no place for a run; name a new folder")
        self.partial = self.output.with_name(f".{self.output.name}.partial")
        self._lock = filelock.FileLock(self.partial / LOCK, timeout=0.2)
        self._holds_this_run = False
        self._made: list[Path] = []  # folders above it that there were not, the innermost first

    def open(self, config: TrainConfig, *, overwrite: bool, resume: bool) -> Path | None:
        """Take the lock and make ready. No finished run is removed before its successor is whole.

        Returns the checkpoint to go on from; None to start anew; the output itself where it is finished as asked for.
        UserError where a run or something else is there and no flag says what to do with it, it had other settings, or
        it is running.
        """
        self._keep_clear(config)
        self.lock()
        finished, settings = self._finished_run(), self.partial / SETTINGS
        begun = read_object(settings) if settings.exists() and not overwrite else None
        is_cut_off = begun and not config.differences(begun) and not self._is_result()
        if resume and finished and not is_cut_off and not config.differences(finished.settings):
            if changed := _changed(config, finished):
                raise UserError(f"--resume: {self.output} is finished, but {changed}; give another --output-dir")
            self._holds_this_run = not begun or not config.differences(begun)  # another run's beginning stays
            self.discard()
            return self.output
        if resume and begun and (other := config.differences(begun)):
            raise UserError(f"--resume: the interrupted run was started with {other}; give the same settings")
        if resume and finished and not begun:
            raise UserError(
                f"--resume: {self.output} is a finished run with {config.differences(finished.settings)}; give the "
                "same settings, another --output-dir, or --overwrite"
            )
        if not (resume or overwrite) and (finished or begun):
            what = "is a finished run; give" if finished else "has an unfinished run: --resume goes on,"
            then = "to replace it, or another folder" if finished else "starts anew"
            raise UserError(f"--output-dir {self.output} {what} --overwrite {then}")
        if finished:
            self._refuse_foreign_files(self.output)
        if overwrite or not begun:  # a kill may have left steps of a run whose settings are gone
            self._clear()
        jsonio.write(settings, config.to_json(), indent=2)
        self._holds_this_run = True
        for stale in [*self.partial.glob(".*"), self.partial / FINAL, self.partial / REPLACED]:
            _remove(stale)
        last = max(self.partial.glob("step-*"), default=None)
        if not last:
            write_text(self.partial / LOG, "")
        return last

    @property
    def is_ours(self) -> bool:
        """Whether this process holds the lock: of several that train together, the first. The others write nothing."""
        return self._lock.is_locked

    def lock(self) -> None:
        """Take the lock, and put back a finished run that a kill left between the two renames of :meth:`finish`.

        UserError where another process holds it, or the partial folder has something that is not ours.
        """
        is_ours = (self.partial / LOCK).exists()
        for path in self.partial.iterdir() if self.partial.exists() else ():
            if not (is_ours and _KEPT.fullmatch(path.name)):
                raise UserError(f"{self.partial} is where a run is kept, but holds {path.name!r}: move it away")
        self._made = [folder for folder in self.partial.parents if not folder.exists()]
        self.partial.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except filelock.Timeout:
            raise UserError(f"--output-dir {self.output}: another optout-train is writing there") from None
        if (self.partial / REPLACED).exists() and not self.output.exists():
            os.replace(self.partial / REPLACED, self.output)

    def _keep_clear(self, config: TrainConfig) -> None:
        """Refuse an output that is, contains or lies in what a run reads, or contains the current folder."""
        here = Path.cwd()
        for name, given in (("--model", config.model_path), ("--dataset", config.dataset), ("", str(here))):
            read = Path(os.path.realpath(os.path.expanduser(given)))
            inside = name and self.output.is_relative_to(read) and not here.is_relative_to(read)
            if os.path.exists(read) and (read.is_relative_to(self.output) or inside):
                what = f"that {name} names" if name else "that you are in"
                where = "is or lies in" if inside else "is or contains"
                raise UserError(f"--output-dir {self.output} {where} the folder {what}; name another folder")

    def _finished_run(self) -> Manifest | None:
        """The manifest of the run at :attr:`output`; None where nothing is there, or an empty folder."""
        with suppress(UserError):
            if (manifest := read_manifest(self.output)) and manifest.settings:
                return manifest
        if self.output.exists() and (not self.output.is_dir() or any(self.output.iterdir())):
            raise UserError(f"--output-dir {self.output} exists and is no run of optout-train; name a new folder")
        return None

    def _is_result(self) -> bool:
        """Whether the finished run is that of the partial folder, which a kill kept from being removed."""
        with suppress(OSError):
            return (self.partial / LOG).read_bytes() == (self.output / LOG).read_bytes()
        return False

    def _refuse_foreign_files(self, folder: Path) -> None:
        """Refuse to replace a folder of the finished run that holds anything but what we wrote, as we wrote it."""
        written = self._written()
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(self.output).as_posix()
            if (path.is_dir() and not path.is_symlink()) or name == WRITTEN:
                continue
            if path.is_symlink() or not path.is_file() or written.get(name) != sha256(path):
                raise UserError(
                    f"--output-dir {self.output}: {name!r} was not written by optout-train, or was changed since, and "
                    "would be lost; move it away, or name another folder"
                )

    def _written(self) -> dict[str, Any]:
        return read_object(self.output / WRITTEN) if (self.output / WRITTEN).is_file() else {}

    def log(self, entry: Mapping[str, Any]) -> None:
        """Append one line to the training log. It holds no times, so that the same command gives the same bytes."""
        if not self.is_ours:
            return
        with (self.partial / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def save(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Write the checkpoint of a step whole, then drop the others but the state's ``best`` and ``epoch_end``.

        The tensors are by file and name. The state is JSON-ready; the length of the log is added.
        """
        if not self.is_ours:
            return
        with (self.partial / LOG).open("rb") as file:
            os.fsync(file)  # as the checkpoint that says how long it was
        state = {**state, "log_bytes": (self.partial / LOG).stat().st_size}
        name = step_name(state["step"])
        with new_folder(self.partial / name) as folder:
            for file, content in tensors.items():
                save_file({key: value.contiguous() for key, value in content.items()}, folder / file)
            (folder / STATE).write_text(json.dumps(state), encoding="utf-8")
        for other in self.partial.glob("step-*"):
            if other.name not in (name, state["best"], state["epoch_end"]):
                shutil.rmtree(other)

    def read_state(self, checkpoint: Path) -> dict[str, Any]:
        """The state of a checkpoint; the process that holds the lock cuts the log back to where it was then."""
        state = read_object(checkpoint / STATE)
        log_bytes = state.pop("log_bytes", 0)
        if self.is_ours and (log := self.partial / LOG).exists():
            if log.stat().st_size < log_bytes:
                raise damaged(log, "its end is missing")
            os.truncate(log, log_bytes)
        return state

    def finish(self, fill: Callable[[Path], None]) -> None:
        """Make the finished folder: ``fill`` writes it (manifest last), one rename shows it, the partial one goes.

        UserError where a user has put something into the run that this one replaces; the checkpoints stay.
        """
        with new_folder(self.partial / FINAL) as folder:
            fill(folder)
            jsonio.write(folder / WRITTEN, file_hashes(folder, "**/*"), indent=2)
        if replaces := self._finished_run():
            self._refuse_foreign_files(self.output)
            os.replace(self.output, self.partial / REPLACED)
        try:
            os.replace(self.partial / FINAL, self.output)
        except OSError:
            if replaces:
                os.replace(self.partial / REPLACED, self.output)
            raise
        self.discard()

    @contextmanager
    def adding(self, name: str) -> Iterator[Path]:
        """A folder to fill that is the finished run's folder ``name`` once the block ends, in the place of an old one.

        UserError where the old one has something that we did not write.
        """
        staged, place = self.partial / SCORES, self.output / name
        for stale in self.partial.glob(f"*{SCORES}*"):
            _remove(stale)
        self._refuse_foreign_files(place)  # before hours of scoring, and after them
        with new_folder(staged) as folder:
            yield folder
        self._refuse_foreign_files(place)
        _remove(place)
        self._record({f"{name}/{file}": digest for file, digest in file_hashes(staged, "**/*").items()})
        place.parent.mkdir(exist_ok=True)
        os.replace(staged, place)

    def add_file(self, name: str, text: str) -> None:
        """Write a file of the finished run, but not over one that a user put there or changed."""
        place = self.output / name
        if not place.exists() or self._written().get(name) == sha256(place):
            place.parent.mkdir(exist_ok=True)
            written = {name: hashlib.sha256(text.encode()).hexdigest()}
            if not place.exists():  # or a kill would leave a file that is not known for ours
                self._record(written)
            write_text(place, text)
            self._record(written)

    def _record(self, hashes: Mapping[str, str]) -> None:
        jsonio.write(self.output / WRITTEN, {**self._written(), **hashes}, indent=2)

    def discard(self) -> None:
        """Remove this run's partial folder, or one that was made for the lock only, and let go of the lock."""
        if self.is_ours:
            if self._holds_this_run:
                self._clear()
            if [path.name for path in self.partial.iterdir()] == [LOCK]:
                with suppress(OSError):
                    (self.partial / LOCK).unlink()
                    for folder in (self.partial, *self._made):
                        folder.rmdir()
        self.close()

    def close(self) -> None:
        """Let go of the lock."""
        self._lock.release()
        self._holds_this_run = False

    def _clear(self) -> None:
        # The settings go first: steps without them are of no run, whatever else a kill leaves.
        for path in sorted(self.partial.iterdir(), key=lambda path: path.name != SETTINGS):
            if path.name != LOCK and _KEPT.fullmatch(path.name):
                _remove(path)


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object that a run wrote; the error for a damaged file is :func:`damaged`."""
    try:
        return jsonio.read(path, dict[str, Any])
    except UserError as error:
        raise damaged(path, error) from None


def damaged(path: Path, reason: object) -> UserError:
    """The error for a file of an interrupted run."""
    return UserError(f"{path} is damaged ({reason}): the interrupted run cannot go on; --overwrite starts anew")


def _changed(config: TrainConfig, run: Manifest) -> str:
    """What a finished run read and what is another now, a set or the base model's weights; "" for nothing.

    A base model that is no longer at hand says nothing.
    """
    now: dict[str, str] = {}
    with suppress(UserError):
        now = file_hashes(base_folder(config))
    if any(now.get(name, digest) != digest for name, digest in run.base_model["weights"].items()):
        return f"the weights in {config.model_path} have changed since"
    source = source_of(config)
    for name, fingerprint in run.data_fingerprints.items():
        subset, _, split = name.rpartition("-")
        if source.load(subset, split).fingerprint != fingerprint:  # type: ignore[arg-type]
            return f"the data of {name} has changed since"
    return ""


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
