"""JSON that others wrote, read within bounds: a value, or one line that names the place.

Everything that is read from outside (data, manifests, attack files) goes through here, so that the
same is refused everywhere: deep nesting, long numbers, a key that stands twice, half characters, files without end.
"""

from __future__ import annotations

import json
import math
import re
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lm_eval_elude.core.records import DataError, given

MAX_BYTES = 1 << 30  # of a file: ten times the largest published one
MAX_DEPTH = 64  # lists and tables within each other
MAX_DIGITS = 40  # of a whole number
# A string (an unfinished one reaches to the end, so that one pass is enough) or a bracket.
_TOKENS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # what may stand for half a character
T = TypeVar("T")


def loads(text: str, where: str, *, nan: bool = False) -> Any:
    """The value of a JSON text.

    Args:
        text: what was read.
        where: how to call it in an error, e.g. ``mine.jsonl, row 3``.
        nan: whether ``NaN`` and ``Infinity``, which are no JSON but which Python writes, are taken.

    Raises:
        DataError: it is not JSON or beyond the bounds of this module.
    """
    try:
        _check_depth(text)
        value = json.loads(
            text, object_pairs_hook=_table, parse_int=_whole, parse_float=float if nan else _finite,
            parse_constant=float if nan else _finite,
        )  # fmt: skip
        text.encode()
        if _HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("ascii", "backslashreplace").decode()
        raise DataError(f"{where}: a text has half a character (the lone surrogate {half})") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error})") from None
    return value


def finite(value: Any) -> Any:
    """A value that JSON can hold: tuples are lists, and what is no finite number is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def load(path: Path, *, nan: bool = False, max_bytes: int = MAX_BYTES) -> Any:
    """The value of a JSON file; DataErrors as of :func:`loads` and :func:`read_text`."""
    return loads(read_text(path, max_bytes=max_bytes), str(path), nan=nan)


def lines(path: Path, *, nan: bool = False, max_bytes: int = MAX_BYTES) -> Iterator[tuple[str, Any]]:
    """The rows of a JSONL file, each with how to call it in an error; blank lines are passed over. Errors as above."""
    # Not splitlines(): texts may hold other line separators (U+2028).
    for number, line in enumerate(read_text(path, max_bytes=max_bytes).split("\n"), 1):
        if line.strip():
            where = f"{path.name}, row {number}"
            yield where, loads(line, where, nan=nan)


def read_text(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """A file's text.

    Raises:
        DataError: it cannot be read, is longer than ``max_bytes`` or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise DataError(f"{path}: longer than {max_bytes:,} bytes")
        return content.decode("utf-8-sig")
    except DataError:
        raise
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not readable as UTF-8 text ({error})") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{str(path)[:200]!r} cannot be read ({getattr(error, 'strerror', '') or error})") from None


def build(kind: type[T], value: Any, where: str) -> T:
    """A dataclass from a table that was read, with every field's type checked as its annotation says.

    Raises:
        DataError: no table, a field that is missing, unknown or of another type.
    """
    if not isinstance(value, dict):
        raise DataError(f"{where}: a table is expected, got {given(value)}")
    hints = get_type_hints(kind)
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]  # type: ignore[arg-type]
    if lacking := [name for name in needed if name not in value]:
        raise DataError(f"{where}: field {lacking[0]!r} is missing")
    if unknown := [name for name in value if name not in hints]:
        raise DataError(f"{where}: field {unknown[0][:40]!r} is not known")
    return kind(**{name: check(item, hints[name], f"{where}: field {name!r}") for name, item in value.items()})


def check(value: Any, hint: Any, where: str) -> Any:
    """``value``, if it is what a type hint says (``list[str]``, ``dict[str, Any]``, ``int | None``).

    A list where a tuple is meant becomes one.

    Raises:
        DataError: it is not; what is expected and what was given is said.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin is Literal:
        if isinstance(value, str) and value in inner:
            return value
        raise DataError(f"{where} must be {' or '.join(map(repr, inner))}, got {given(value)}")
    if origin in (Union, types.UnionType):
        for choice in inner:
            if isinstance(value, get_origin(choice) or choice):
                return check(value, choice, where)
    elif origin in (list, tuple) and isinstance(value, list):
        return origin(check(item, inner[0], f"{where}[{i}]") for i, item in enumerate(value))
    elif origin is dict and isinstance(value, dict):
        return {key: check(item, inner[1], f"{where}[{key[:40]!r}]") for key, item in value.items()}
    elif origin is None and type(value) in ((int, float) if hint is float else (hint,)):  # a bool is no number
        return value
    expected = _WORDS.get(origin or hint) or " or ".join(_WORDS[get_origin(c) or c] for c in inner)
    raise DataError(f"{where} must be {expected}, got {given(value)}")


_WORDS = {
    str: "text", int: "a whole number", float: "a number", bool: "true or false", list: "a list", tuple: "a list",
    dict: "a table", type(None): "null",
}  # fmt: skip


def _check_depth(text: str) -> None:
    """Before the parser, whose own limit is Python's stack."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for match in _TOKENS.finditer(text):
        bracket = match[0]
        depth += (bracket in "[{") - (bracket in "]}")
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep at character {match.start()}")


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = (Counter(name for name, _ in pairs) - Counter(table.keys())).popitem()[0]
        raise ValueError(f"the key {twice[:40]!r} stands twice")
    return table


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a whole number of {len(digits)} digits, {MAX_DIGITS} at most")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:40]} is no finite number")
    return value
