"""The one error for what a user gave: its message is a line that names the flag, file or row and says what to do."""

from __future__ import annotations

import io
import logging
import reprlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any


class UserError(ValueError):
    """What was given cannot be used. Every command ends with this line and exit code 2, without a traceback."""


def given(value: Any) -> str:
    """How an error calls a value of the wrong kind: its type, and the value itself where it is short."""
    shown = " ".join(reprlib.repr(value).split())
    return "nothing" if value is None else f"{type(value).__name__} {shown}"


def reason(error: BaseException) -> str:
    """What an exception of another library says, in one line of bounded length."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def printable(text: str) -> str:
    """A text in one line in which a terminal or a workflow log finds nothing to act on: the rest is escaped."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in " ".join(text.split()))


def end_in_one_line(run: Callable[[], object], advice: Mapping[str, str], interrupted: str) -> None:
    """Call what a command does; what cannot be used is one line and exit code 2, out of memory 1, Ctrl-C 130.

    ``advice`` is what follows the message of an error, by name of its class or of one above it: some of these lie
    behind an import of torch. Any other error keeps its traceback.
    """
    import click

    caught: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        caught.append(number)  # torch makes another error of one that comes while it reads a file
        signal.default_int_handler(number, frame)

    before = signal.getsignal(signal.SIGINT)
    is_ours = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    try:
        if is_ours:
            signal.signal(signal.SIGINT, interrupt)
        run()
        return
    except (KeyboardInterrupt, click.Abort):
        line, code = interrupted, 130
    except click.ClickException as error:
        line, code = f"Error: {error.format_message()}", 2
    except Exception as error:
        kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in advice), None)
        if caught:
            line, code = interrupted, 130
        elif kind is None:
            raise
        else:
            line, code = f"Error: {error}{advice[kind]}", 1 if kind == "OutOfMemoryError" else 2
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, before)
    click.echo(printable(line), err=True)
    sys.exit(code)


@contextmanager
def mute_harness(evaluator: Any) -> Iterator[None]:
    """Silence lm-eval's progress bars and git look-ups while one of our commands scores.

    lm-eval draws its bars wherever it runs; they are for a terminal. Outside a repository its look-up of the commit
    would print git's "fatal" for each model that is scored.
    """
    ask, here = evaluator.get_git_commit_hash, Path.cwd()
    if not any((folder / ".git").exists() for folder in (here, *here.parents)):
        evaluator.get_git_commit_hash = lambda: None
    try:
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
            yield
    finally:
        evaluator.get_git_commit_hash = ask


def mute_imports() -> None:
    """Keep the warnings that libraries print about themselves on import off the terminal."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
