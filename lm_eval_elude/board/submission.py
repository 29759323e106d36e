"""A submission: a folder with what one run scored, each file by hash, so that anyone can form every number again.

``submission.json`` (:class:`Submission`), ``results.json`` (lm-eval's results file), ``samples/TASK.jsonl.gz`` (its
logged samples, in the order of the documents), where there is one the checkpoint's ``optout.json``, where the run had
one its ``attacks.jsonl``, and where its weights were attacked what ``elude stress`` wrote, without the curves, in
``stress/``. A submission is data of others: read within bounds, never executed, never followed.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import unicodedata
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from lm_eval_elude.data import jsonio, manifest
from lm_eval_elude.data.dataset import HUB
from lm_eval_elude.data.files import sha256, write_text
from lm_eval_elude.errors import UserError
from lm_eval_elude.scoring.benchmark import OF_TASK
from lm_eval_elude.scoring.runs import SUMMARY, Run
from lm_eval_elude.stress.outcome import Outcome

FILE_NAME, RESULTS, ATTACKS, SAMPLES = "submission.json", "results.json", "attacks.jsonl", "samples"
STRESS = "stress"
_OF_STRESS = re.compile(r"stress\.json|(results|samples_elude_forget)_[a-z0-9_]{1,40}-[a-z]{1,20}\.jsonl?")
_FILES = re.compile(
    rf"(submission|results|optout)\.json|attacks\.jsonl|{SAMPLES}/elude_[a-z_]{{1,60}}\.jsonl\.gz"
    rf"|{STRESS}/({_OF_STRESS.pattern})"
)
MAX_JSON = 1 << 20  # bytes of submission.json, of a verdict, and of what is kept of a submission
_MAX_FILE, _MAX_UNPACKED, _MAX_ROW, _MAX_STRESS = 1 << 28, 1 << 31, 1 << 22, 1 << 27  # bytes
_MAX_TEXT = 300  # characters of a name
# Line ends of Unicode, fillers and joiners; other characters that are not seen have a category of C.
_UNSEEN = "\u2028\u2029\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0"


class Submission(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``submission.json``."""

    model: jsonio.Text  # the name that the board shows; of a model of the Hub its id
    base_model: jsonio.Text  # what the model was made from, the same text for all that are compared
    method: jsonio.Text
    role: Literal["submission", "original", "retrained"]  # only the first is ranked, against the other two
    submitter: jsonio.Text
    hardware: str  # that the model was made on
    trained_on: str  # data that the method saw
    scored: dict[str, Any]  # what every task says of the run: targets, data, template, versions, settings
    fingerprints: dict[str, str]  # of the scored documents, by task
    files: dict[str, str]  # SHA-256 of every other file of the folder
    revision: str = ""  # of a model of the Hub
    code: jsonio.Link = ""  # what made the model
    paper: jsonio.Link = ""  # that describes the method
    weights: dict[str, str] | None = None  # SHA-256 of each weight file, where they were at hand
    cost: Annotated[float, msgspec.Meta(ge=0, le=1e7)] | None = None  # hours of one device that making the model took
    schema_version: Literal[1] = 1

    @property
    def attacked(self) -> bool:
        """Whether it brings attacks on the model's weights."""
        return f"{STRESS}/{SUMMARY}" in self.files


class Packed(Run):
    """The run of a submission, whose samples are packed and whose rows come one by one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(folder / RESULTS)

    def sample_file(self, task: str) -> Path:
        return self.folder / SAMPLES / f"{task}.jsonl.gz"

    def rows(self, task: str) -> list[dict[str, Any]]:
        return list(packed_rows(self.sample_file(task)))


def finished(path: Path) -> Run:
    """The run at a path, a submission's or lm-eval's own."""
    return Packed(path) if (path / FILE_NAME).is_file() else Run(path)


def reference_of(run: Run) -> Run | None:
    """The finished run that a run names as its reference; None where it names none, a model, or what is not there."""
    name = run.settings(run.tasks[0]).get("reference") or ""
    path = Path(os.path.expanduser(name))
    return finished(path) if name and path.exists() and not (path / "config.json").exists() else None


def data_elsewhere(folder: Path) -> str:
    """The data set of a submission that is a folder elsewhere; "" for any other, and where it cannot be read."""
    with suppress(UserError):
        source = str(read(folder).scored.get("dataset"))
        return "" if source == "mini" or HUB.revision(source) is not None else source
    return ""


# ---- reading
def read(folder: Path) -> Submission:
    """``submission.json`` of a folder.

    UserError where it is missing, a field is wrong, or a text is too long or has characters that are not seen.
    """
    file = folder / FILE_NAME
    if file.is_symlink() or (file.exists() and not file.is_file()):  # a pipe would never end
        raise UserError(f"{FILE_NAME} is no regular file")
    submission: Submission = jsonio.check(with_texts(jsonio.load(file), _printable), Submission, FILE_NAME)
    return submission


def _printable(text: str) -> str:
    if odd := next((c for c in text if unicodedata.category(c)[0] == "C" or c in _UNSEEN), None):
        raise UserError(f"{FILE_NAME}: the character U+{ord(odd):04X}, which is not seen, is in {shown(text)}")
    if len(text) > _MAX_TEXT:
        raise UserError(f"{FILE_NAME}: {len(text):,} characters, {_MAX_TEXT} at most: {shown(text)}")
    return text


def check_files(folder: Path, hashes: Mapping[str, str]) -> None:
    """That a folder holds the files that its submission names, by SHA-256, and nothing else.

    UserError for a link, a file of another name, size or content, or one that is missing.
    """
    names = set(listing(folder)) - {FILE_NAME}
    if missing := sorted(hashes.keys() - names):
        raise UserError(f"{shown(missing[0])} is missing")
    if extra := sorted(names - hashes.keys()):
        raise UserError(f"{extra[0]} is not in {FILE_NAME}")
    for name in sorted(names):
        if sha256(folder / name) != hashes[name]:
            raise UserError(f"{name} is not the file that was submitted (SHA-256 differs)")


def listing(folder: Path) -> list[str]:
    """Names of a submission's files, those of its folders included, in name order.

    UserError for a link, anything but files, a name that no submission has, a file that is too long.
    """
    names = []
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise UserError(f"{shown(name)} is a link")
        if name in (SAMPLES, STRESS) and path.is_dir():
            continue
        if not path.is_file() or not _FILES.fullmatch(name):
            raise UserError(f"{shown(name)} is no file of a submission")
        longest = _MAX_STRESS if name.startswith(STRESS) else _MAX_FILE
        if path.stat().st_size > longest:
            raise UserError(f"{name}: longer than {longest:,} bytes")
        names.append(name)
    return sorted(names)


def packed_rows(path: Path, most: int = 1 << 20) -> Iterator[Any]:
    """The rows of a packed file of samples, no more than ``most``.

    UserError where it is not gzip, cut off, not UTF-8 or JSON, or beyond the bounds.
    """
    unpacked = number = 0
    try:
        with gzip.open(path, "rb") as file:
            while line := file.readline(_MAX_ROW + 1):
                number += 1
                unpacked += len(line)
                where = f"{path.name}, row {number}"
                if number > most:
                    raise UserError(f"{path.name}: more than the {most} rows that there should be")
                if len(line) > _MAX_ROW or unpacked > _MAX_UNPACKED:
                    raise UserError(f"{where}: longer than {_MAX_ROW:,} bytes, or the file than {_MAX_UNPACKED:,}")
                yield jsonio.loads(line.decode("utf-8"), where)
    except UnicodeDecodeError:
        raise UserError(f"{path.name}, row {number}: not UTF-8") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path.name}: not a whole gzip file ({shown(str(error))})") from None


def digest(folder: Path) -> str:
    """What names a submission: the SHA-256 of ``submission.json``, which holds those of all other files."""
    return sha256(folder / FILE_NAME)


def shown(value: Any) -> str:
    """A submitter's value in a message: one line of printable characters, not long."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---- packing
_FOLDERS = re.compile(r"""(?<![\w.:/~-])(?:file:/+|(?:~|[A-Za-z]:)?[/\\])(?:[^\s/\\,;:"']+[/\\])+""")

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# Fields that hold a path, a Hub's id, or a name of data.
_PLACES = {
    "name", "dataset", "repository", "world", "reference", "original", "attack_file", "mia_reference", "model_name",
    "pretrained", "peft", "delta", "tokenizer", "model", "output_dir", "cache_dir", "offload_folder", "gguf_file",
}  # fmt: skip


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A value in which every text, also one that is a key, is changed."""
    if isinstance(value, dict):
        return {change(key): with_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [with_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def without_paths(value: Any, folders: Collection[str] = ()) -> Any:
    """A value in whose texts a file has its name in place of its path.

    Of a free text that is a full path; of a field that holds a path also a relative one, with whatever is in its names.
    ``folders`` are texts that are paths, though they read like a Hub's id.
    """
    if isinstance(value, list):
        return [without_paths(item, folders) for item in value]
    if not isinstance(value, dict):
        return with_texts(value, lambda text: _FOLDERS.sub("", text.replace(f"{Path.home()}{os.sep}", "~/")))
    changed = {}
    for key, item in value.items():
        if key == "model_args" and isinstance(item, str):
            parts = [part.partition("=") for part in item.split(",")]
            item = ",".join(f"{name}{equals}{_last_name(text, folders)}" for name, equals, text in parts)
        elif key in _PLACES and isinstance(item, str):
            item = _last_name(item, folders)
        else:
            item = without_paths(item, folders)
        changed[without_paths(key)] = item
    return changed


def _last_name(text: str, folders: Collection[str]) -> str:
    """The last name of a path; a Hub's id that is no folder here, data of the Hub, and an address stay."""
    if text not in folders and not text.startswith("file:"):
        of_hub = _HUB_ID.fullmatch(text) and not os.path.exists(text)
        if of_hub or HUB.revision(text) is not None or "://" in text:
            return text
    return re.split(r"[/\\]", text.rstrip("/\\"))[-1]


def card_without_paths(card: Path) -> str:
    """The text of a checkpoint's card, in which a path has its last name, as in the manifest beside it."""
    file = card.with_name(manifest.FILE_NAME)
    table = jsonio.load(file) if file.is_file() else {}
    names = dict(zip(_texts(table), _texts(without_paths(table)), strict=True))
    names |= {str(place): place.name for place in (card.parent, card.parent.absolute()) if place.name}
    text = card.read_text(encoding="utf-8")
    for path in sorted((path for path, name in names.items() if path != name), key=len, reverse=True):
        text = text.replace(path, names[path])
    return str(without_paths(text))


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value, but for keys."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value


def pack(run: Run, folder: Path, stress: Path | None = None, **about: Any) -> Submission:
    """Write the submission of a finished run into an empty folder.

    ``stress`` is a finished folder of ``elude stress`` on the same checkpoint. ``about`` has fields of
    :class:`Submission` that only the submitter knows; one that is empty is taken from the checkpoint's manifest where
    that has it. UserError where the run lacks what a submission needs, or ``stress`` is no finished folder.
    """
    if stress:
        Outcome(stress)
    (folder / SAMPLES).mkdir()
    settings = {name: value for name, value in run.settings(run.tasks[0]).items() if name not in OF_TASK}
    folders = {str(model.get("name")) for model in settings["checkpoint"] or () if model.get("weights")}
    scored = without_paths(settings, folders)
    for task in run.tasks:
        path = folder / SAMPLES / f"{task}.jsonl.gz"
        with path.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
            for row in run.rows(task):
                for asked in row["arguments"].values():
                    if "arg_2" in asked:  # another model that was asked
                        asked["arg_2"] = _last_name(asked["arg_2"], folders)
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    # lm-eval's "sanitized" name of the model is its full path with other separators.
    results = {key: value for key, value in run.results.items() if key != "model_name_sanitized"}
    write_text(folder / RESULTS, json.dumps(without_paths(results, folders), indent=2, ensure_ascii=False))
    identity = (scored["checkpoint"] or [{}])[0]
    name, weights = identity.get("name", ""), identity.get("weights") or None
    known = {"model": name}
    if source := run.checkpoint:
        table = without_paths(jsonio.load(source / manifest.FILE_NAME), folders)
        jsonio.write(folder / manifest.FILE_NAME, table, indent=2)
        trained = manifest.read_manifest(source)
        assert trained
        known["base_model"] = _last_name(trained.first_base, folders)
        known["method"] = trained.method
        known["trained_on"] = ", ".join(n for n in trained.data_fingerprints if n.endswith("-train"))
    if settings["attack_file"]:
        shutil.copyfile(run.folder / ATTACKS if isinstance(run, Packed) else settings["attack_file"], folder / ATTACKS)
    if stress:
        (folder / STRESS).mkdir()
        for path in (path for path in sorted(stress.iterdir()) if _OF_STRESS.fullmatch(path.name)):
            if path.suffix == ".json":
                jsonio.write(folder / STRESS / path.name, without_paths(jsonio.load(path), folders))
            else:
                shutil.copyfile(path, folder / STRESS / path.name)
    stated = {key: value for key, value in about.items() if value not in ("", None)}
    fields: dict[str, Any] = {"hardware": "", "trained_on": "", **known, **stated}
    if unknown := [key for key in ("model", "base_model", "method", "submitter") if not fields.get(key)]:
        flags = ", ".join(f"--{key.replace('_', '-')}" for key in unknown)
        raise UserError(f"{run.path}: neither it nor a manifest says this of the model; give {flags}")
    submission = Submission(
        **fields, scored=scored, revision=identity.get("revision", ""), weights=weights,
        fingerprints={task: run.settings(task)["fingerprint"] for task in run.tasks},
        files={name: sha256(folder / name) for name in listing(folder)},
    )  # fmt: skip
    jsonio.write(folder / FILE_NAME, msgspec.to_builtins(submission), indent=2)
    return read(folder)
