"""The files of a board's repository: ``board.yml``, ``submissions/ORG__MODEL.yaml``, ``results/ORG__MODEL/``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from lm_eval_elude.errors import UserError

T = TypeVar("T")
FILE, SUBMISSIONS, RESULTS = "board.yml", "submissions", "results"
SCORED = "scored.yaml"  # of a results folder: which weights were scored, for which table

Repository = Annotated[str, msgspec.Meta(pattern=r"^[\w.-]+/[\w.-]+$")]  # ORG/MODEL
Revision = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{40}$")]  # a commit
Weights = Annotated[str, msgspec.Meta(pattern=r"^[\w.-]+/[\w.-]+@[0-9a-f]{40}$")]  # ORG/MODEL@COMMIT
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=500)]
Link = Annotated[str, msgspec.Meta(pattern=r"^(https://[^\s\"'<>]+)?$")]


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the rows of a table have in common; ``base_model`` gives tokenizer, template and generation settings."""

    name: Text
    base_model: Weights
    targets: tuple[Text, ...]
    dataset: Text
    original: Weights
    retrained: Weights
    suite: Literal["smoke", "standard"] = "standard"


class Board(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: Text
    tables: tuple[Table, ...]


class Submission(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a pull request adds. ``results`` are the submitter's own numbers, shown until the maintainer has scored."""

    model: Repository
    revision: Revision
    table: Text
    method: Text
    contact: Text
    paper: Link = ""
    code: Link = ""
    trained_on: str = ""
    compute: str = ""
    results: dict[str, float] = {}

    @property
    def weights(self) -> str:
        return f"{self.model}@{self.revision}"

    @property
    def slug(self) -> str:
        """The name of its file and folder."""
        return self.model.replace("/", "__")


class Scored(msgspec.Struct, frozen=True):
    """Which weights a results folder is of."""

    weights: Weights
    table: str


def read(file: Path, kind: type[T]) -> T:
    """A YAML file as one of the types above; UserError names the file and the field."""
    try:
        return msgspec.yaml.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        raise UserError(f"{file} is missing") from None
    except msgspec.DecodeError as error:
        raise UserError(f"{file}: {error}") from None


def write(file: Path, value: msgspec.Struct) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.yaml.encode(msgspec.to_builtins(value)))


def board(folder: Path) -> Board:
    return read(folder / FILE, Board)


def submission(file: Path) -> Submission:
    """A submission; UserError where its file has another name than its model."""
    found = read(file, Submission)
    if file.name != f"{found.slug}.yaml":
        raise UserError(f"{file}: the file of {found.model} is called {found.slug}.yaml")
    return found


def submissions(folder: Path) -> list[Submission]:
    """All submissions by file name; UserError where two name the same weights."""
    found = [submission(file) for file in sorted((folder / SUBMISSIONS).glob("*.yaml"))]
    weights = [each.weights for each in found]
    if twice := next((each for each in found if weights.count(each.weights) > 1), None):
        raise UserError(f"{SUBMISSIONS}/{twice.slug}.yaml: {twice.weights} is submitted twice")
    return found


def table_of(folder: Path, name: str) -> Table:
    """A table by name; UserError where the board has none of that name."""
    tables = {table.name: table for table in board(folder).tables}
    if name not in tables:
        raise UserError(f"{folder / FILE} has no table {name!r}, but {', '.join(map(repr, tables))}")
    return tables[name]


def results_of(folder: Path, slug: str, weights: str) -> Path | None:
    """The folder of the maintainer's results of these weights; None where there is none, or of other weights."""
    place = folder / RESULTS / slug
    if not (place / SCORED).is_file():
        return None
    return place if read(place / SCORED, Scored).weights == weights else None


def baseline_slug(table: Table, role: str) -> str:
    """The name of a baseline's folder of results; a submission's has two underscores between its parts, too."""
    weights = table.original if role == "original" else table.retrained
    return f"{role}__{weights.partition('@')[0].replace('/', '__')}"
