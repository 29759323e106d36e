"""A submission: a folder with what one run scored, each file by hash, so that anyone can form every number again.

``submission.json`` (:class:`Submission`), ``results.json`` (lm-eval's results file), ``samples/TASK.jsonl.gz`` (its
logged samples, in the order of the documents), where there is one the checkpoint's ``optout.json``, and where the run
had one its ``attacks.jsonl``. A submission is data of others: read within bounds, never executed, never followed.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import unicodedata
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from lm_eval_elude.data import jsonio, manifest
from lm_eval_elude.data.files import sha256, write_text
from lm_eval_elude.errors import UserError
from lm_eval_elude.report.comparison import NamedRun, checkpoint
from lm_eval_elude.report.runs import Run
from lm_eval_elude.scoring.benchmark import OF_TASK

SCHEMA_VERSION = 1
FILE_NAME, RESULTS, ATTACKS, SAMPLES = "submission.json", "results.json", "attacks.jsonl", "samples"
Role = Literal["submission", "original", "retrained"]  # only the first is ranked, against the other two
_FILES = re.compile(rf"(submission|results|optout)\.json|attacks\.jsonl|{SAMPLES}/elude_[a-z_]{{1,60}}\.jsonl\.gz")
_MAX_JSON = 1 << 20  # bytes of submission.json, of a verdict, and of what is kept of a submission
_MAX_FILE, _MAX_UNPACKED, _MAX_ROW = 1 << 30, 1 << 32, 1 << 24  # bytes
_MAX_FILES = 200
_MAX_TEXT = 300  # characters of a name
T = TypeVar("T")


class Submission(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``submission.json``.

    Attributes:
        model: name that the board shows; for a model of the Hub its id.
        revision: of a model of the Hub.
        weights: SHA-256 of each weight file, where they were at hand.
        base_model: what the model was made from, the same text for all that are compared.
        method: how.
        role: ``submission``, or ``original`` or ``retrained`` for the models that others are compared with.
        submitter: who submits.
        hardware: what the model was made on.
        trained_on: data that the method saw.
        cost: GPU or CPU hours that making the model took; None where unknown.
        scored: what every task says of the run: targets, data, template, versions, settings.
        fingerprints: of the scored documents, by task.
        files: SHA-256 of every other file of the folder.
    """

    model: str
    base_model: str
    method: str
    role: Role
    submitter: str
    hardware: str
    trained_on: str
    scored: dict[str, Any]
    fingerprints: dict[str, str]
    files: dict[str, str]
    revision: str = ""
    weights: dict[str, str] | None = None
    cost: Annotated[float, msgspec.Meta(ge=0)] | None = None
    schema_version: int = SCHEMA_VERSION


class Packed(Run):
    """The run of a submission, whose samples are packed and whose rows come one by one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(folder / RESULTS)

    def sample_file(self, task: str) -> Path:
        return self.folder / SAMPLES / f"{task}.jsonl.gz"

    def rows(self, task: str) -> list[dict[str, Any]]:
        return [row for _, row in packed_rows(self.sample_file(task))]


def finished(path: Path) -> Run:
    """The run at a path, a submission's or lm-eval's own."""
    return Packed(path) if (path / FILE_NAME).is_file() else Run(path)


# ---- reading
def load(kind: type[T], file: Path, *, nan: bool = False) -> T:
    """A small JSON file as the type that it must have; ``nan``: whether a number in it may be NaN.

    Raises:
        UserError: it cannot be read, is too long, or is of another type.
    """
    value: T = jsonio.check(jsonio.load(file, nan=nan, max_bytes=_MAX_JSON), kind, str(file))
    return value


def read(folder: Path) -> Submission:
    """``submission.json`` of a folder, its fields checked.

    Raises:
        UserError: it is missing, wrong, or a text in it has characters that no name has.
    """
    table = jsonio.load(folder / FILE_NAME, max_bytes=_MAX_JSON)
    if isinstance(table, dict) and (version := table.get("schema_version")) != SCHEMA_VERSION:
        raise UserError(f"{FILE_NAME}: schema_version {shown(version)}, expected {SCHEMA_VERSION}")
    if isinstance(table, dict) and table.pop("redacted", False):  # what earlier versions could write
        raise UserError(f"{FILE_NAME}: texts are withheld, so nothing can be checked")
    _check_texts(table)
    submission: Submission = jsonio.check(table, Submission, FILE_NAME)
    for field in ("model", "base_model", "method", "submitter"):
        if not getattr(submission, field).strip():
            raise UserError(f"{FILE_NAME}: field {field!r} is empty")
    return submission


def check_files(folder: Path, hashes: Mapping[str, str]) -> None:
    """That a folder holds the files that its submission names, by SHA-256, and nothing else.

    Raises:
        UserError: a link, a file of another name, size or content, or one that is missing.
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
    """Names of a submission's files, ``samples/`` included, in name order.

    Raises:
        UserError: a link, anything but files, a name that no submission has, too many or too large files.
    """
    names = []
    for path in islice(folder.rglob("*"), _MAX_FILES + 1):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise UserError(f"{shown(name)} is a link")
        if name == SAMPLES and path.is_dir():
            continue
        if not path.is_file() or not _FILES.fullmatch(name):
            raise UserError(f"{shown(name)} is no file of a submission")
        if path.stat().st_size > _MAX_FILE:
            raise UserError(f"{name}: longer than {_MAX_FILE:,} bytes")
        names.append(name)
    if len(names) > _MAX_FILES:
        raise UserError(f"more than {_MAX_FILES} files")
    return sorted(names)


def packed_rows(path: Path, most: int = 1 << 20) -> Iterator[tuple[str, Any]]:
    """The rows of a packed file of samples, each with how to call it in an error; no more than ``most``.

    Raises:
        UserError: not gzip, cut off, not UTF-8 or JSON, or beyond the bounds.
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
                yield where, jsonio.loads(line.decode("utf-8"), where, nan=True)
    except UnicodeDecodeError:
        raise UserError(f"{path.name}, row {number}: not UTF-8") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path.name}: not a whole gzip file ({shown(str(error))})") from None


def digest(folder: Path) -> str:
    """What names a submission: the SHA-256 of ``submission.json``, which holds those of all other files."""
    return sha256(folder / FILE_NAME)


def shown(value: Any) -> str:
    """A submitter's value in a message: one line of printable characters, not long."""
    text = ascii(value) if isinstance(value, str) else ascii(value)[:200]
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_texts(value: Any) -> None:
    """That a text, or every text and key of a table, is one that can be seen whole."""
    if isinstance(value, str):
        # Controls, marks of direction and other characters that are not seen.
        if odd := next((c for c in value if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029"), None):
            raise UserError(f"{FILE_NAME}: the character U+{ord(odd):04X}, which is not seen, is in {shown(value)}")
        if len(value) > _MAX_TEXT:
            raise UserError(f"{FILE_NAME}: {len(value):,} characters, {_MAX_TEXT} at most: {shown(value)}")
    elif isinstance(value, dict | list):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_texts(item)


# ---- packing
@dataclass(frozen=True)
class About:
    """What a results file does not say of a submission; "" is taken from the checkpoint's manifest where it says it."""

    model: str = ""
    base_model: str = ""
    method: str = ""
    role: Role = "submission"
    submitter: str = ""
    hardware: str = ""
    trained_on: str = ""
    cost: float | None = None


def pack(run: Run, folder: Path, about: About) -> Submission:
    """Write the submission of a finished run into an empty folder; ``about`` is what only the submitter knows.

    Raises:
        UserError: the run lacks what a submission needs.
    """
    (folder / SAMPLES).mkdir()
    scored = {name: value for name, value in run.settings(run.tasks[0]).items() if name not in OF_TASK}
    for task in run.tasks:
        _write_packed(folder / SAMPLES / f"{task}.jsonl.gz", run.rows(task))
    shutil.copyfile(run.path, folder / RESULTS)
    trained = None
    if source := checkpoint(NamedRun("", run)):
        shutil.copyfile(source / manifest.FILE_NAME, folder / manifest.FILE_NAME)
        trained = manifest.read_manifest(source)
    if scored["attack_file"]:
        shutil.copyfile(scored["attack_file"], folder / ATTACKS)
    identity = (scored["checkpoint"] or [{}])[0]
    name, weights = identity.get("name", ""), identity.get("weights") or None
    known = {"model": Path(name).name if weights else name}
    if trained:
        base = str(trained.base_model.get("name") or "")
        known["base_model"] = base if base.count("/") == 1 else Path(base).name
        known["method"] = trained.method
        known["trained_on"] = ", ".join(n for n in trained.data_fingerprints if n.endswith("-train"))
    fields = {name: value or known.get(name, value) for name, value in asdict(about).items()}
    if unknown := [name for name in ("model", "base_model", "method", "submitter") if not fields[name]]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in unknown)
        raise UserError(f"{run.path}: neither it nor a manifest says this of the model; give {flags}")
    submission = Submission(
        **fields, scored=scored, revision=identity.get("revision", ""), weights=weights,
        fingerprints={task: run.settings(task)["fingerprint"] for task in run.tasks},
        files={name: sha256(folder / name) for name in listing(folder)},
    )  # fmt: skip
    text = json.dumps(msgspec.to_builtins(submission), indent=2, ensure_ascii=False) + "\n"
    write_text(folder / FILE_NAME, text)
    return read(folder)


def _write_packed(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
