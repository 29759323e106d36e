"""The one error for what a user gave: its message is a line that names the flag, file or row and says what to do."""

import sys
from collections.abc import Callable, Mapping


class UserError(ValueError):
    """What was given cannot be used. Every command ends with this line and exit code 2, without a traceback."""


def reason(error: BaseException) -> str:
    """What an exception of another library says, in one line of bounded length."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def printable(text: str) -> str:
    """A text in one line in which a terminal finds nothing to act on: the rest is escaped."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in " ".join(text.split()))


def end_in_one_line(run: Callable[[], object], advice: Mapping[str, str], interrupted: str) -> None:
    """Call a click command. Exit code 2 with one line for a class of error that ``advice`` names (and what to add)."""
    import click

    try:
        run()
        return
    except (KeyboardInterrupt, click.Abort):
        line, code = interrupted, 130
    except click.ClickException as error:
        line, code = f"Error: {error.format_message()}", 2
    except Exception as error:
        kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in advice), None)
        if kind is None:
            raise
        line, code = f"Error: {error}{advice[kind]}", 1 if kind == "OutOfMemoryError" else 2
    print(printable(line), file=sys.stderr)
    sys.exit(code)
