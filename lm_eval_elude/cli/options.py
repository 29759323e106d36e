"""What several commands share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import click

from lm_eval_elude.errors import printable

dataset = click.option(
    "--dataset",
    default="hub",
    show_default=True,
    help="hub, hub@REVISION, mini, or a folder or file in the ELUDe schema.",
)


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
