"""What several commands share."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from lm_eval_elude.errors import UserError, printable

dataset = click.option(
    "--dataset",
    default="hub",
    show_default=True,
    help="hub, hub@REVISION, mini, or a folder or file in the ELUDe schema.",
)


def typed() -> list[str]:
    """The flags that the user typed for this command."""
    context, by_hand = click.get_current_context(), click.core.ParameterSource.COMMANDLINE
    options = [option for option in context.command.params if isinstance(option, click.Option)]
    return [option.opts[0] for option in options if context.get_parameter_source(str(option.name)) is by_hand]


def endpoint(command: Callable[..., Any]) -> Callable[..., Any]:
    """The flags of a language model behind an endpoint."""
    for option in (
        click.option(
            "--timeout", default=120.0, show_default=True, type=Finite(0, min_open=True), help="Seconds a call."
        ),
        click.option("--workers", default=8, show_default=True, type=click.IntRange(1), help="Calls at once."),
        click.option("--llm-model", "model", required=True, help="Model to ask there; OPENAI_API_KEY has the key."),
        click.option(
            "--llm", "url", default="http://localhost:8000/v1", show_default=True, help="OpenAI-compatible endpoint."
        ),
    ):
        command = option(command)
    return command


def require(extra: str, *modules: str) -> None:
    """UserError where packages of an extra are not installed."""
    if lacking := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise UserError(f"{', '.join(lacking)} not installed; pip install 'lm-eval-elude[{extra}]'")


class Finite(click.FloatRange):
    """A range of numbers without NaN and infinity, which no comparison refuses."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number


def apart(outputs: Mapping[str, Path | None], read: Iterable[Path]) -> None:
    """Refuse an output, by its flag, that cannot be written, or that the command reads or writes by another flag."""
    taken = {os.path.realpath(path): "is read by this command" for path in read}
    for flag, path in outputs.items():
        place = os.path.realpath(path) if path else ""
        if place in taken:
            raise click.UsageError(f"{flag} {path}: {taken[place]}; name another file")
        if path:
            if not can_be_written(path):
                raise click.UsageError(f"{flag} {path}: cannot be written there; name another place")
            taken[place] = f"is written by {flag}"


def can_be_written(path: Path) -> bool:
    """Whether a file can be written there, in folders that may still have to be made."""
    if path.exists() and not path.is_file():  # a device or a pipe, which is written into
        return os.access(path, os.W_OK)
    folder = next(above for above in Path(os.path.realpath(path)).parents if above.exists())
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def data_files(dataset: str) -> list[Path]:
    """The files of a data set that is a folder or a file, with what a build keeps beside it."""
    from lm_eval_elude.data.manifest import full_path
    from lm_eval_elude.data.rows import ENDINGS

    root = Path(full_path(dataset))
    return [root, *(path for path in root.glob("*") if path.suffix.lower() in ENDINGS), *root.glob("work/*")]


def say(text: str, err: bool = False) -> None:
    """Print a line in which a terminal or a workflow log finds nothing to act on, whatever others named in it."""
    click.echo(printable(text), err=err)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the builders' lines about their data off the terminal: only a verifier's lines count there."""
    log = logging.getLogger("lm_eval.elude")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
