"""Files and folders that are written, and the marks by which they are known again."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lm_eval_elude.errors import UserError

Stamp = tuple[int, int]  # of a file: when it changed, and its size


def stamp(path: Path) -> Stamp:
    """What a remembered reading of a file depends on; UserError where there is no such file."""
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read ({error.strerror})") from None
    return status.st_mtime_ns, status.st_size


def write_text(path: Path, text: str) -> None:
    """Write a file as UTF-8, its line ends as they are; the folder is made where it is lacking."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which stays if the block ends without an error; UserError where ``out`` exists already."""
    if os.path.lexists(out):
        raise UserError(f"--out {out}: exists already; name a folder that does not")
    out.mkdir(parents=True)
    try:
        yield out
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


def sha256(path: Path) -> str:
    """SHA-256 of a file (hexadecimal)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_hashes(folder: Path, pattern: str = "*.safetensors") -> dict[str, str]:
    """SHA-256 (hexadecimal) by path below the folder of the files that match, in the order of the paths."""
    files = sorted(path for path in folder.glob(pattern) if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}
