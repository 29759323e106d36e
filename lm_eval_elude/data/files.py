"""Atomic writing of files and folders, at the path that was asked for and with the permissions of the user."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lm_eval_elude.errors import UserError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from filelock import AcquireReturnProxy

Stamp = tuple[int, int]  # of a file: when it changed, and its size


def stamp(path: Path) -> Stamp:
    """What a remembered reading of a file depends on; UserError where there is no such file."""
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read ({error.strerror})") from None
    return status.st_mtime_ns, status.st_size


def weights_stamp(folder: Path) -> tuple[tuple[str, Stamp], ...]:
    """The stamps of a checkpoint's manifest and weights, by name; of none where it is no folder."""
    files = [*folder.glob("*.json"), *folder.glob("*.safetensors")] if os.path.isdir(folder) else []
    return tuple((path.name, stamp(path)) for path in sorted(files))


def write_text(path: Path, text: str) -> None:
    """As :func:`write_bytes`, of text as UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file: a regular one is replaced by a whole new one with its mode, a new one gets what the umask allows.

    A link stays a link. What is no regular file (a device, a FIFO) is written into. The folder is made where it lacks.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG | 0o666 & ~_umask()
    if not stat.S_ISREG(mode):  # /dev/stdout leads to a pipe, which has no path of its own
        with path.open("wb") as file:
            file.write(content)
        return
    path, name = Path(os.path.realpath(path)), ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, stat.S_IMODE(mode))
        os.replace(name, path)
    except BaseException as error:
        if name:
            Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:  # it names the new file, or none where the disk is full
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def name_without_temp_suffix(name: str) -> str:
    """The name or path of the file that was to be, for one that a kill left half-written; others as they are."""
    return re.sub(r"(^|/)\.(.+)\.[a-z0-9_]{8}$", r"\1\2", name)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill that stands at ``out``, on disk, once the block ends without an error, and nowhere otherwise.

    UserError where there is something at ``out`` already.
    """
    if os.path.lexists(out):
        raise UserError(f"--out {out}: exists already; name a folder that does not")
    out.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        yield staged
        for path in (*staged.rglob("*"), staged):
            if not path.is_symlink():  # some libraries write files that their owner alone can read
                os.chmod(path, (0o777 if path.is_dir() else 0o666) & ~_umask())
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        os.rename(staged, out)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def lock(path: Path, busy: str) -> AcquireReturnProxy:
    """A held lock on what lies at ``path``, for a ``with`` block; it ends with the process, and ``PATH.lock`` stays.

    UserError with the text ``busy``, at once, where another process holds it.
    """
    from filelock import FileLock, Timeout  # 20 ms that few commands need

    try:
        return FileLock(f"{path}.lock", blocking=False).acquire()
    except Timeout:
        raise UserError(busy) from None


def sha256(path: Path) -> str:
    """SHA-256 of a file (hexadecimal)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_hashes(folder: Path, pattern: str = "*.safetensors") -> dict[str, str]:
    """SHA-256 (hexadecimal) by path below the folder of the files that match, in the order of the paths."""
    files = sorted(path for path in folder.glob(pattern) if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
