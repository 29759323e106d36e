"""What several commands share."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import click

from lm_eval_elude.errors import UserError, printable

dataset = click.option(
    "--dataset",
    default="hub",
    show_default=True,
    help="hub, hub@REVISION, mini, or a folder or file in the ELUDe schema.",
)


def endpoint(command: Callable[..., Any]) -> Callable[..., Any]:
    """The flags of a language model behind an endpoint."""
    for option in (
        click.option(
            "--timeout",
            default=120.0,
            show_default=True,
            type=click.FloatRange(0, min_open=True),
            help="Seconds a call.",
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


def say(text: str, err: bool = False) -> None:
    """Print a line in which a terminal or a workflow log finds nothing to act on, whatever others named in it."""
    click.echo(printable(text), err=err)
