"""JSON files: those of others read within bounds and checked against a type, or one line that names the place.

Everything that comes from outside (data sets, manifests, attack files, replies) goes through here, so that the same is
refused everywhere: files without end, deep nesting, a key that stands twice, half characters.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from lm_eval_elude.data.files import write_text
from lm_eval_elude.errors import UserError, printable, reason

T = TypeVar("T")
MAX_BYTES = 1 << 30  # of a file: ten times the largest published one
MAX_DEPTH = 64  # lists and objects within each other: what reads the value later may recurse
# A string (an unfinished one reaches to the end, so that one pass is enough) or a bracket.
_TOKENS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
Text = Annotated[str, msgspec.Meta(pattern=r"\S")]  # a text that is not blank, for the types of check()
Link = Annotated[str, msgspec.Meta(pattern=r"^(https://\S+)?$")]  # an address that a page may link to, or nothing


def loads(text: str, where: str, *, nan: bool = False) -> Any:
    """The value of a JSON text; an error calls it ``where``, e.g. ``mine.jsonl, row 3``.

    With ``nan`` also ``NaN`` and ``Infinity`` are taken, which are no JSON but which Python writes. UserError where it
    is not JSON, or beyond the bounds of this module.
    """
    number = float if nan else _finite
    try:
        _bound_depth(text)
        value = json.loads(text, object_pairs_hook=_object, parse_float=number, parse_constant=number)
        (json.dumps(value, ensure_ascii=False) if _SURROGATE.search(text) else text).encode()
        return value
    except UnicodeEncodeError:
        raise UserError(f"{where}: a text has half a character (a lone surrogate)") from None
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({reason(error)})") from None


def check(value: Any, kind: Any, where: str) -> Any:
    """A value that was read as one of the type ``kind``: ``dict[str, int]``, a dataclass or a ``msgspec.Struct``.

    A list becomes a tuple where one is meant. Nothing else is converted: a number is no text, true is no number.
    UserError where the value is of another type, or has a field that the dataclass lacks; it names the field.
    """
    if is_dataclass(kind) and isinstance(value, dict):
        for name in value.keys() - {field.name for field in fields(kind)}:
            raise UserError(f"{where}: field {name[:40]!r} is not known")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem, _, place = printable(reason(error)).partition(" - at `$")
        problem = problem.replace(r" matching regex '\\S'", " that is not blank")
        problem = problem.replace(r" matching regex '^(https://\\S+)?$'", " that begins with https:// and has no space")
        problem = re.sub(r"^Object missing required field `(.*)`$", r"field '\1' is missing", problem)
        field = f"field {place.strip('.`')!r}: " if place else ""
        raise UserError(f"{where}: {field}{problem[0].lower()}{problem[1:]}") from None


def finite(value: Any) -> Any:
    """A value that JSON can hold: tuples are lists, and what is no finite number is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def write(path: Path, value: Any, indent: int = 1) -> None:
    """Write a value as a JSON file, whole or not at all."""
    write_text(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as a JSONL file, whole or not at all."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def load(path: Path, *, nan: bool = False, max_bytes: int = MAX_BYTES) -> Any:
    """The value of a JSON file; errors as of :func:`loads` and :func:`read_text`."""
    return loads(read_text(path, max_bytes=max_bytes), str(path), nan=nan)


def read(path: Path, kind: type[T], *, nan: bool = False, max_bytes: int = MAX_BYTES) -> T:
    """A JSON file as the type that it must have: :func:`load`, then :func:`check`."""
    value: T = check(load(path, nan=nan, max_bytes=max_bytes), kind, str(path))
    return value


def lines(path: Path, *, nan: bool = False, name: str = "") -> Iterator[tuple[str, Any]]:
    """The rows of a JSONL file as they are read, each with how an error calls it (with ``name`` for the file's).

    Blank lines are passed over. Errors as of :func:`loads` and :func:`read_text`.
    """
    size = 0
    with _reading(path), path.open("rb") as file:
        # Lines end at "\n" alone: a text may hold other line separators (U+2028).
        for number, content in enumerate(iter(lambda: file.readline(MAX_BYTES), b""), 1):
            size += len(content)
            if size > MAX_BYTES:
                raise UserError(f"{path}: longer than {MAX_BYTES:,} bytes")
            line = content.decode("utf-8-sig" if number == 1 else "utf-8")
            if line.strip():
                where = f"{name or path.name}, row {number}"
                yield where, loads(line, where, nan=nan)


def read_text(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """A file's text; UserError where it cannot be read, is longer than ``max_bytes`` or is not UTF-8."""
    with _reading(path), path.open("rb") as file:
        content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise UserError(f"{path}: longer than {max_bytes:,} bytes")
        return content.decode("utf-8-sig")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not readable as UTF-8 text ({error})") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{str(path)[:200]!r} cannot be read ({getattr(error, 'strerror', '') or error})") from None


def _bound_depth(text: str) -> None:
    """Refuse deep nesting before the parser, whose own limit is Python's stack (libraries raise it)."""
    depth = 0
    if text.count("[") + text.count("{") > MAX_DEPTH:
        for match in _TOKENS.finditer(text):
            depth += (match[0] in "[{") - (match[0] in "]}")
            if depth > MAX_DEPTH:
                raise ValueError(f"nested more than {MAX_DEPTH} deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice[:40]!r} stands twice")
    return table


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:40]} is no finite number")
    return value
