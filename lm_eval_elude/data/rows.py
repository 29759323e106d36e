"""The rows of a data file of any columns: parquet, JSON or JSON lines."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from lm_eval_elude.data import jsonio
from lm_eval_elude.errors import UserError, given, reason

ENDINGS = (".parquet", ".jsonl", ".json")


def read_rows(
    path: Path, *, columns: Collection[str] | None = None, name: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a ``.parquet``, ``.jsonl`` or ``.json`` file as they are read, each with how an error calls it.

    A ``.json`` file holds a list, or a row a line. ``columns`` are those to read of a parquet file, where it has them;
    ``name`` stands for the file's own in errors. UserError where the file cannot be read, or a row is no object.
    """
    name = name or path.name
    ending = Path(name).suffix.lower()
    rows: Iterable[tuple[str, Any]]
    if ending not in ENDINGS:
        raise UserError(f"{path}: unknown ending {ending!r}, expected one of {', '.join(ENDINGS)}")
    if ending == ".parquet":
        rows = ((f"{name}, row {number}", row) for number, row in enumerate(_parquet_rows(path, columns), 1))
    elif ending == ".json" and (text := jsonio.read_text(path)).lstrip().startswith("["):
        table = jsonio.loads(text, str(path), nan=True)
        rows = ((f"{name}, row {number}", row) for number, row in enumerate(table, 1))
    else:
        rows = jsonio.lines(path, nan=True, name=name)
    for where, row in rows:
        if not isinstance(row, dict):
            raise UserError(f"{where}: an object is expected, got {given(row)}")
        yield where, row


def _parquet_rows(path: Path, columns: Collection[str] | None) -> Iterator[dict[str, Any]]:
    """Only the columns that are asked for are decoded: others may hold what pyarrow cannot turn into Python values."""
    import pyarrow.parquet as pq

    size = 0
    try:
        with pq.ParquetFile(path) as file:
            names = [column for column in file.schema_arrow.names if columns is None or column in columns]
            if len(set(names)) < len(names):
                raise UserError(f"{path}: a column stands twice")
            for batch in file.iter_batches(batch_size=128, columns=names):
                size += batch.nbytes
                if size > jsonio.MAX_BYTES:
                    raise UserError(f"{path}: longer than {jsonio.MAX_BYTES:,} bytes")
                yield from batch.to_pylist()
    except UserError:
        raise
    except Exception as error:  # what a file holds can fail in any of pyarrow's conversions
        raise UserError(f"{path}: not a readable parquet file ({reason(error)})") from None
