"""The rows of a data file of any columns: parquet, JSON or JSON lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lm_eval_elude.data import jsonio
from lm_eval_elude.errors import UserError, reason

ENDINGS = (".parquet", ".jsonl", ".json")


def find(folder: Path, stems: Sequence[str]) -> Path:
    """The file of a folder that has one of the stems; UserError where it has none."""
    files = (folder / f"{stem}{ending}" for stem in stems for ending in ENDINGS)
    if not (found := next(filter(Path.is_file, files), None)):
        raise UserError(f"{folder} has no {' or '.join(stems)} ({', '.join(ENDINGS)})")
    return found


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a ``.parquet``, ``.jsonl`` or ``.json`` file, each with how an error calls it ("a.jsonl, row 3").

    A ``.json`` file holds a list, or a row a line; a text in a list is a row's ``text``. ``columns`` are those to read
    of a parquet file, where it has them. UserError where the file cannot be read, or a row is no object.
    """
    ending = path.suffix.lower()
    if ending == ".parquet":
        rows: Any = _parquet_rows(path, columns)
    elif ending == ".json" and (text := jsonio.read_text(path)).lstrip().startswith("["):
        rows = jsonio.loads(text, str(path))
    elif ending in ENDINGS:
        rows = None
    else:
        raise UserError(f"{path}: unknown ending {ending!r}, expected one of {', '.join(ENDINGS)}")
    numbered = ((f"{path.name}, row {number}", row) for number, row in enumerate(rows, 1)) if rows is not None else None
    for where, row in numbered or jsonio.lines(path):
        row = {"text": row} if isinstance(row, str) else row
        if not isinstance(row, dict):
            raise UserError(f"{where}: an object is expected, got {row!r:.80}")
        yield where, row


def _parquet_rows(path: Path, columns: Sequence[str] | None) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(path).names
        rows: list[dict[str, Any]] = pq.read_table(
            path, columns=[name for name in names if columns is None or name in columns]
        ).to_pylist()
        return rows
    except Exception as error:  # what a file holds can fail in any of pyarrow's conversions
        raise UserError(f"{path}: not a readable parquet file ({reason(error)})") from None
