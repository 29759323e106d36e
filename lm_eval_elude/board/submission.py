"""A submission: a folder with what one run scored, each file by hash, so that anyone can form every number again.

``submission.json`` (:class:`Submission`), ``results.json`` (lm-eval's results file), ``samples/TASK.jsonl.gz`` (its
logged samples, in the order of the documents), where there is one the checkpoint's ``optout.json``, and where the run
had one its ``attacks.jsonl``. A submission is data of others: read within bounds, never executed, never followed.
"""

from __future__ import annotations

import gzip
import hashlib
import hmac
import json
import os
import re
import secrets
import shutil
import tempfile
import unicodedata
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from lm_eval_elude.core import jsonio, manifest
from lm_eval_elude.core.records import DataError
from lm_eval_elude.results.runs import Run
from lm_eval_elude.results.samples import Sample

SCHEMA_VERSION = 1
FILE_NAME, RESULTS, ATTACKS, SAMPLES = "submission.json", "results.json", "attacks.jsonl", "samples"
ROLES = ("submission", "original", "retrained")  # the last two are what others are compared with, and not ranked
# Of what a task says of its run (configs, metadata, elude), what belongs to the task and not to the run.
OF_TASK = ("fingerprint", "n", "aggregates", "mia_reason")
_FILES = re.compile(rf"results\.json|optout\.json|attacks\.jsonl|{SAMPLES}/elude_[a-z_]{{1,60}}\.jsonl\.gz")
_MAX_BYTES = {FILE_NAME: 1 << 20, RESULTS: 1 << 26, manifest.FILE_NAME: 1 << 26, ATTACKS: 1 << 28}
_MAX_PACKED = 1 << 30  # of one file of samples
_MAX_UNPACKED = 1 << 32
_MAX_ROW = 1 << 24
_MAX_TEXT = 300  # characters of a name


@dataclass(frozen=True)
class Submission:
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
        redacted: whether prompts and answers are withheld.
        files: SHA-256 of every other file of the folder.
    """

    model: str
    base_model: str
    method: str
    role: str
    submitter: str
    hardware: str
    trained_on: str
    scored: dict[str, Any]
    fingerprints: dict[str, str]
    files: dict[str, str]
    revision: str = ""
    weights: dict[str, str] | None = None
    cost: float | None = None
    redacted: bool = False
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

    def samples(self, task: str) -> list[Sample]:
        return [withheld_sample(row) for row in self.rows(task)] if self.redacted else super().samples(task)

    @cached_property
    def redacted(self) -> bool:
        return bool(read(self.folder).redacted)


def finished(path: Path) -> Run:
    """The run at a path, a submission's or lm-eval's own."""
    return Packed(path) if (path / FILE_NAME).is_file() else Run(path)


# ---- reading
def read(folder: Path) -> Submission:
    """``submission.json`` of a folder, its fields checked.

    Raises:
        DataError: it is missing, wrong, or a text in it has characters that no name has.
    """
    table = jsonio.load(folder / FILE_NAME, max_bytes=_MAX_BYTES[FILE_NAME])
    if isinstance(table, dict) and (version := table.get("schema_version")) != SCHEMA_VERSION:
        raise DataError(f"{FILE_NAME}: schema_version {shown(version)}, expected {SCHEMA_VERSION}")
    _check_texts(table, FILE_NAME)
    found = jsonio.build(Submission, table, FILE_NAME)
    for field in ("model", "base_model", "method", "submitter"):
        if not getattr(found, field).strip():
            raise DataError(f"{FILE_NAME}: field {field!r} is empty")
    if found.role not in ROLES:
        raise DataError(f"{FILE_NAME}: field 'role' is {shown(found.role)}, expected one of {', '.join(ROLES)}")
    if found.cost is not None and found.cost < 0:
        raise DataError(f"{FILE_NAME}: field 'cost' is below 0")
    return found


def check_files(folder: Path, said: Mapping[str, str]) -> None:
    """That a folder holds the files that its submission says, by SHA-256, and nothing else.

    Raises:
        DataError: a link, a file of another name, size or content, or one that is missing.
    """
    names = listing(folder)
    if odd := [name for name in said if not _FILES.fullmatch(name)]:
        raise DataError(f"{FILE_NAME}: {shown(odd[0])} is no file of a submission")
    if lacking := sorted(set(said) - set(names)):
        raise DataError(f"{lacking[0]} is missing")
    if extra := sorted(set(names) - set(said) - {FILE_NAME}):
        raise DataError(f"{extra[0]} is not in {FILE_NAME}")
    for name, digest in said.items():
        if sha256(folder / name) != digest:
            raise DataError(f"{name} is not the file that was submitted (SHA-256 differs)")


def listing(folder: Path) -> list[str]:
    """Names of a submission's files, ``samples/`` included, in name order.

    Raises:
        DataError: a link, anything but files, a name that no submission has, too many or too large files.
    """
    names = []
    for place in ("", f"{SAMPLES}/"):
        if place and not (folder / place).is_dir():
            continue
        with os.scandir(folder / place) as found:
            for entry in islice(found, 200):
                name = f"{place}{entry.name}"
                if entry.is_symlink():
                    raise DataError(f"{shown(name)} is a link")
                if name == SAMPLES and entry.is_dir():
                    continue
                if not entry.is_file() or not (name == FILE_NAME or _FILES.fullmatch(name)):
                    raise DataError(f"{shown(name)} is no file of a submission")
                if entry.stat().st_size > (most := _MAX_BYTES.get(name, _MAX_PACKED)):
                    raise DataError(f"{name}: longer than {most:,} bytes")
                names.append(name)
            if next(found, None):
                raise DataError(f"{place or 'the folder'} has too many files")
    return sorted(names)


def packed_rows(path: Path, most: int = 1 << 20) -> Iterator[tuple[str, Any]]:
    """The rows of a packed file of samples, each with how to call it in an error; no more than ``most``.

    Raises:
        DataError: not gzip, cut off, not UTF-8 or JSON, or beyond the bounds.
    """
    unpacked = number = 0
    try:
        with gzip.open(path, "rb") as file:
            while line := file.readline(_MAX_ROW + 1):
                number += 1
                unpacked += len(line)
                where = f"{path.name}, row {number}"
                if number > most:
                    raise DataError(f"{path.name}: more than the {most} rows that there should be")
                if len(line) > _MAX_ROW or unpacked > _MAX_UNPACKED:
                    raise DataError(f"{where}: longer than {_MAX_ROW:,} bytes, or the file than {_MAX_UNPACKED:,}")
                yield where, jsonio.loads(line.decode("utf-8"), where, nan=True)
    except UnicodeDecodeError:
        raise DataError(f"{path.name}, row {number}: not UTF-8") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path.name}: not a whole gzip file ({shown(str(error))})") from None


def digest(folder: Path) -> str:
    """What names a submission: the SHA-256 of ``submission.json``, which holds those of all other files."""
    return sha256(folder / FILE_NAME)


def sha256(path: Path) -> str:
    """Of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def shown(value: Any) -> str:
    """A submitter's value in a message: one line of printable characters, not long."""
    text = ascii(value) if isinstance(value, str) else ascii(value)[:200]
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_texts(value: Any, where: str) -> None:
    if isinstance(value, str):
        # Controls, marks of direction and other characters that are not seen.
        if odd := next((c for c in value if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029"), None):
            raise DataError(f"{where}: a text has the character U+{ord(odd):04X}, which is not seen: {shown(value)}")
        if len(value) > _MAX_TEXT:
            raise DataError(f"{where}: a text has {len(value):,} characters, {_MAX_TEXT} at most: {shown(value)}")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_texts(key, where)
            _check_texts(item, where)
    elif isinstance(value, list):
        for item in value:
            _check_texts(item, where)


# ---- packing
@dataclass(frozen=True)
class About:
    """What a results file does not say of a submission; "" is taken from the checkpoint's manifest where it says it."""

    model: str = ""
    base_model: str = ""
    method: str = ""
    role: str = "submission"
    submitter: str = ""
    hardware: str = ""
    trained_on: str = ""
    cost: float | None = None


def pack(run: Run, folder: Path, about: About, key: bytes = b"") -> Submission:
    """Write a submission into an empty folder.

    Args:
        run: the finished run.
        folder: it is filled.
        about: what only the submitter knows.
        key: with it texts are withheld: each is replaced by its HMAC-SHA256, sums and counts stay.

    Raises:
        DataError: the run lacks what a submission needs.
    """
    (folder / SAMPLES).mkdir()
    scored = {name: value for name, value in run.settings(run.tasks[0]).items() if name not in OF_TASK}
    found = checkpoint_manifest(scored)
    hide = Withheld(key, scored) if key else None
    for task in run.tasks:
        rows = run.rows(task)
        if hide:
            rows = [hide.row(row, sample) for row, sample in zip(rows, run.samples(task), strict=True)]
        _write_packed(folder / SAMPLES / f"{task}.jsonl.gz", rows)
    if hide:
        (folder / RESULTS).write_text(json.dumps(hide.texts(hide.results(run.results)), indent=2), encoding="utf-8")
        scored = hide.texts(scored)
    else:
        shutil.copyfile(run.path, folder / RESULTS)
        if found:
            shutil.copyfile(found[0], folder / manifest.FILE_NAME)
        if scored["attack_file"]:
            shutil.copyfile(scored["attack_file"], folder / ATTACKS)
    own = found[1] if found else None
    identity = (scored["checkpoint"] or [{}])[0]
    base = str((own.base_model if own else {}).get("name") or "")
    known = {
        "model": Path(identity.get("name", "")).name if identity.get("weights") else identity.get("name", ""),
        "base_model": base if base.count("/") == 1 else Path(base).name,
        "method": own.method if own else "",
        "trained_on": ", ".join(n for n in own.data_fingerprints if n.endswith("-train")) if own else "",
    }
    fields = {name: value or known.get(name, value) for name, value in asdict(about).items()}
    if lacking := [name for name in ("model", "base_model", "method", "submitter") if not fields[name]]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in lacking)
        raise DataError(f"{run.path}: neither it nor a manifest says this of the model; give {flags}")
    files = {name: sha256(folder / name) for name in listing(folder)}
    fingerprints = {task: run.settings(task)["fingerprint"] for task in run.tasks}
    submission = Submission(
        **fields, scored=scored, fingerprints=fingerprints, files=files, redacted=bool(key),
        revision=identity.get("revision", ""), weights=identity.get("weights") or None,
    )  # fmt: skip
    text = json.dumps(asdict(submission), indent=2, ensure_ascii=False) + "\n"
    manifest.write_atomically(folder / FILE_NAME, text)
    return read(folder)


def checkpoint_manifest(scored: Mapping[str, Any]) -> tuple[Path, manifest.Manifest] | None:
    """The manifest of the scored checkpoint, where it lies as it was when it was scored."""
    for identity in scored["checkpoint"]:
        path = Path(identity["name"]) / manifest.FILE_NAME
        if path.is_file() and sha256(path) == identity.get("manifest"):
            found = manifest.read_manifest(path.parent)
            return (path, found) if found else None
    return None


def new_key() -> bytes:
    """A key for withheld texts; who has it can show later what they were."""
    return secrets.token_hex(32).encode()


def write_key(out: Path, key: bytes) -> Path:
    """Keep a key beside the folder that was made with it, for its owner's eyes."""
    file = out.with_name(f"{out.name}.key")
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as handle:
        handle.write(key)
    return file


class Withheld:
    """Texts replaced by keyed hashes, the same text by the same hash, so that records stay told apart."""

    def __init__(self, key: bytes, scored: Mapping[str, Any]) -> None:
        self.key = key
        self.names = {name: f"target-{self.hash(name)[:12]}" for name in scored["targets"]}
        places = {str(scored[name]) for name in ("dataset", "attack_file", "reference")}
        places |= {identity["name"] for identity in scored["checkpoint"]}
        self.places = {p for p in places if p and p not in ("hub", "mini")}

    def hash(self, text: str) -> str:
        """Keyed hash of a text (hexadecimal); a short or common text cannot be found by trying without the key."""
        return hmac.new(self.key, text.encode(), hashlib.sha256).hexdigest()

    def row(self, row: Mapping[str, Any], sample: Sample) -> dict[str, Any]:
        """A logged row without texts, with what was measured of them."""
        doc = row["doc"]
        kept = {
            "id": doc["id"],
            "entity": self.names.get(doc["entity"], ""),
            "record": self.hash(sample.record),
            "answer_scores": doc["answer_scores"],
            "document": self.document(doc),
            "generated": self.hash(str(doc.get("generated", ""))),
        }
        stated = {name: value for name, value in sample.values.items() if name != "reference"}
        return {"doc": kept, "stated": stated}

    def document(self, doc: Mapping[str, Any]) -> str:
        """Keyed hash of a document's columns, but for what was measured."""
        own = {name: value for name, value in doc.items() if name not in MEASURED}
        return self.hash(json.dumps(own, sort_keys=True, ensure_ascii=False))

    def results(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Of a results file what numbers are compared with."""
        kept = {name: results[name] for name in ("results", "groups", "n-samples", "versions") if name in results}
        configs = {t: {"metadata": {"elude": c["metadata"]["elude"]}} for t, c in results["configs"].items() if t}
        return kept | {"configs": configs, "config": {"limit": results["config"]["limit"]}}

    def texts(self, value: Any) -> Any:
        """Names of targets and places replaced wherever they stand."""
        if isinstance(value, dict):
            return {self.texts(key): self.texts(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.texts(item) for item in value]
        return "withheld" if value in self.places else self.names.get(value, value) if isinstance(value, str) else value


# Columns of a logged document that were measured, and do not come from the data.
MEASURED = (
    "answer_scores", "generated", "truth_ratio_raw", "member_loss", "non_member_loss", "prompt_tokens", "reference",
    "reference_prompt_tokens",
)  # fmt: skip


def withheld_sample(row: Mapping[str, Any]) -> Sample:
    """The sample of a row whose texts are withheld: what was stated of it."""
    doc = row["doc"]
    return Sample(doc["entity"], doc["record"], doc["id"], row["stated"])


def _write_packed(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")


def staging(out: Path) -> Path:
    """A new empty folder beside ``out``, which is made by renaming it once it is right.

    Raises:
        DataError: there is something at ``out`` already.
    """
    if out.exists() or out.is_symlink():
        raise DataError(f"--out {out}: exists already; name a folder that does not")
    out.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
