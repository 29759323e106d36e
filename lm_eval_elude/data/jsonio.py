"""JSON files, read and checked against a type: what is wrong is one line that names file, row and field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from lm_eval_elude.data.files import write_text
from lm_eval_elude.errors import UserError, reason

T = TypeVar("T")
Text = Annotated[str, msgspec.Meta(pattern=r"\S")]  # a text that is not blank


def loads(text: str, where: str) -> Any:
    """The value of a JSON text; UserError, which calls it ``where``, where it is none."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({reason(error)})") from None


def check(value: Any, kind: Any, where: str) -> Any:
    """A value as the type ``kind``, e.g. ``dict[str, int]``, a dataclass or a ``msgspec.Struct``.

    A list becomes a tuple where one is meant, nothing else is converted. UserError, which names the field, otherwise.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        problem = problem.replace(r" matching regex '\\S'", " that is not blank")
        problem = re.sub(r"^Object missing required field `(.*)`$", r"field '\1' is missing", problem)
        field = f"field {place.strip('.`')!r}: " if place else ""
        raise UserError(f"{where}: {field}{problem[0].lower()}{problem[1:]}") from None


def write(path: Path, value: Any, indent: int = 1) -> None:
    """Write a value as a JSON file."""
    write_text(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as a JSONL file."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def load(path: Path) -> Any:
    """The value of a JSON file."""
    return loads(read_text(path), str(path))


def read(path: Path, kind: type[T]) -> T:
    """A JSON file as the type that it must have."""
    value: T = check(load(path), kind, str(path))
    return value


def lines(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a JSONL file, each with how an error calls it; blank lines are passed over."""
    for number, line in enumerate(read_text(path).split("\n"), 1):  # a text may hold other line separators (U+2028)
        if line.strip():
            where = f"{path.name}, row {number}"
            yield where, loads(line, where)


def read_text(path: Path) -> str:
    """A file's text; UserError where it cannot be read or is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({reason(error)})") from None
