"""What the keeper of a board says: the tables of ``board.toml``, and the verdicts on submissions scored again.

A submission stands in the one table whose every field it has. Which models a table compares with is said here by the
digest of their submissions, so that nobody else hands in a reference.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from lm_eval_elude.board import submission as packed
from lm_eval_elude.board.submission import Submission, shown
from lm_eval_elude.board.verify import LEVELS, Level
from lm_eval_elude.data import jsonio
from lm_eval_elude.data.dataset import load_records
from lm_eval_elude.data.files import write_text
from lm_eval_elude.data.manifest import full_path
from lm_eval_elude.errors import UserError

FILE, VERDICTS = "board.toml", "verdicts"


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of ``board.toml``: what must be the same for rows to be compared."""

    name: jsonio.Text
    dataset: jsonio.Text  # hub, mini, or a path from the board's folder
    base_models: tuple[jsonio.Text, ...]
    tokenizers: tuple[jsonio.Text, ...]  # fingerprints of tokenizer and template
    targets: tuple[jsonio.Text, ...]
    seed: int
    truth_ratio: Literal["geometric", "arithmetic"]
    fingerprints: dict[str, str]  # of the scored documents, by task: they say how many there are
    retrained: str = ""  # digest of the submission of the model that never knew the targets
    original: str = ""  # the same of the model before unlearning

    def role(self, digest: str) -> str:
        """What a submission is in this table."""
        return {self.retrained: "retrained", self.original: "original"}.get(digest, "submission")

    def differs(self, submission: Submission) -> list[str]:
        """What keeps a submission out of this table, a line each."""
        scored = submission.scored
        stated = {
            "base_models": (submission.base_model, self.base_models),
            "tokenizers": (scored.get("template"), self.tokenizers),
            "targets": (scored.get("targets"), [list(self.targets)]),
            "seed": (scored.get("seed"), [self.seed]),
            "truth_ratio": (scored.get("truth_ratio"), [self.truth_ratio]),
            "fingerprints": (submission.fingerprints, [self.fingerprints]),
        }
        return [
            f"{name}: {shown(value) if name != 'fingerprints' else 'other documents than the table has'}"
            for name, (value, allowed) in stated.items()
            if value not in allowed
        ]


def read(folder: Path) -> list[Table]:
    """The tables of a board; UserError where there is no ``board.toml``, or it is not one."""
    file = folder / FILE
    if not file.is_file():
        raise UserError(f"{file} is missing: it says what each table compares; `elude leaderboard table` writes it")
    tables = _tables(file, jsonio.read_text(file))
    if not tables:
        raise UserError(f"{file}: no [[tables]] in it; `elude leaderboard table` writes one")
    if len({table.name for table in tables}) < len(tables):
        raise UserError(f"{file}: a table's name stands twice")
    return tables


def _tables(file: Path, text: str) -> list[Table]:
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file}: not valid TOML ({error})") from None
    tables: list[Table] = jsonio.check(content, dict[str, list[Table]], str(file)).get("tables", [])
    return tables


def place(tables: list[Table], submission: Submission, digest: str) -> Table:
    """The table of a submission; UserError where it fits none, or calls itself a reference and the keeper does not."""
    differs = {table.name: table.differs(submission) for table in tables}
    nearest = min(tables, key=lambda table: len(differs[table.name]))
    if reasons := differs[nearest.name]:
        raise UserError(f"in no table of {FILE}; the nearest, {shown(nearest.name)}, has other {'; '.join(reasons)}")
    if submission.role != nearest.role(digest):
        raise UserError(
            f"role {submission.role}, but {FILE} has it as {nearest.role(digest)}: the keeper says what is a reference"
        )
    return nearest


def data(folder: Path, table: Table) -> str:
    """The data set of a table, from here."""
    return str(path) if (path := folder / table.dataset).exists() else table.dataset


def add(folder: Path, name: str, dataset: str, fingerprint: str, retrained: Path, original: Path | None) -> Table:
    """Write a table for what was submitted of its references at the end of ``board.toml``.

    ``fingerprint`` is of the base model's tokenizer and template. UserError where the references do not belong in one
    table, another table takes them already, the name is empty, or the data set cannot be read.
    """
    if not name.strip():
        raise UserError("--name is empty: name the table")
    if not (folder / dataset).exists() and full_path(dataset) != dataset:
        there = os.path.relpath(dataset, folder)
        raise UserError(f"--dataset {dataset}: is no path from the board's folder; give {there}")
    about, scored = (known := packed.read(retrained)), known.scored
    fields = {name: scored[name] for name in ("dataset", "targets", "seed", "truth_ratio") if name in scored} | {
        "name": name, "base_models": [about.base_model], "tokenizers": [fingerprint],
        "fingerprints": about.fingerprints, "retrained": packed.digest(retrained),
        "original": packed.digest(original) if original else "",
    }  # fmt: skip
    table = jsonio.check(fields | ({"dataset": dataset} if dataset else {}), Table, str(retrained / packed.FILE_NAME))
    for path in filter(None, (retrained, original)):
        place([table], packed.read(path), packed.digest(path))
    file = folder / FILE
    before = jsonio.read_text(file).rstrip() if file.is_file() else ""
    if any(other.name == name for other in _tables(file, before)):
        raise UserError(f"{file} has a table {name!r} already; name it otherwise, or take that one out")
    load_records(data(folder, table), "forget", "train")
    text = f"{before}\n\n{toml(table)}".lstrip()
    *others, _ = _tables(file, text)  # TOML has no place for some characters
    if twin := next((other.name for other in others if not other.differs(about)), ""):
        raise UserError(f"{file}: its table {twin!r} takes every submission that {name!r} would; take it out first")
    write_text(file, text)
    return table


def toml(table: Table) -> str:
    """A table as TOML: its texts, numbers and lists are written as JSON has them."""
    fields = msgspec.to_builtins(table)
    prints = [f"{json.dumps(task)} = {json.dumps(value)}" for task, value in fields.pop("fingerprints").items()]
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items()]
    return "\n".join(["[[tables]]", *lines, "[tables.fingerprints]", *prints, "", ""])


# ---- verdicts
class Asked(msgspec.Struct, frozen=True):
    """What of a verdict's ``rescored`` a board looks at."""

    oddness: int = 0  # documents of which the original was asked again
    stress: bool = False  # whether the attacks on the weights were run again


class KeeperVerdict(msgspec.Struct, frozen=True):
    """``verdicts/NAME.json``, as ``elude verify --rescore --json`` prints it."""

    digest: str  # of the submission
    level: Level | Literal[""]
    findings: list[str]
    tokenizer: str = ""  # fingerprint of what wrote and counted the prompts
    date: str = ""
    rescored: Asked | None = None

    @property
    def asked(self) -> int:
        """How much more than the model was asked again: the original, attacks on the weights."""
        return bool(self.rescored and self.rescored.oddness) + bool(self.rescored and self.rescored.stress)

    @property
    def grade(self) -> int:
        """The level as a number; that of a failed verdict is the highest."""
        return LEVELS.index(self.level) if self.level and not self.findings else len(LEVELS)


def verdicts(folder: Path) -> tuple[dict[str, KeeperVerdict], dict[str, str]]:
    """Verdicts by the submission's digest, and files that are none.

    Of several on a submission a failed one, or else the one for which most was asked, then the highest, then the last.
    """
    known, unreadable = [], {}
    for file in sorted((folder / VERDICTS).glob("*.json")):
        try:
            known.append(jsonio.read(file, KeeperVerdict))
        except UserError as error:
            unreadable[f"{VERDICTS}/{file.name}"] = str(error).replace(f"{folder}/", "")
    known.sort(key=lambda verdict: (verdict.grade == len(LEVELS), verdict.asked, verdict.grade, verdict.date))
    return {verdict.digest: verdict for verdict in known}, unreadable


def unranked(table: Table, verdict: KeeperVerdict | None, oddness: bool = False, attacks: bool = False) -> str:
    """Why a row has no rank, by the verdict on it; "" where that gives it one.

    ``oddness`` and ``attacks`` (on the weights) say that they count in this table.
    """
    if verdict and verdict.grade == len(LEVELS):
        return f"withdrawn: {verdict.findings[0] if verdict.findings else 'its verdict has no level'}"
    if verdict is None or verdict.level == LEVELS[0]:
        return "unverified: the keeper has not scored it again"
    if verdict.tokenizer not in table.tokenizers:
        return "unverified: it was scored again with another tokenizer than the table's"
    if oddness and not (verdict.rescored and verdict.rescored.oddness):
        return "unverified: the original was not asked again how odd its answers are (--original)"
    if attacks and not (verdict.rescored and verdict.rescored.stress):
        return "unverified: the attacks on its weights were not run again (--stress)"
    return ""
