"""What several commands share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import click

dataset = click.option(
    "--dataset",
    default="hub",
    show_default=True,
    help="hub, hub@REVISION, mini, or a folder or file in the ELUDe schema.",
)


@contextmanager
def quiet() -> Iterator[None]:
    """What the builders say of their data is not said: a verifier's own lines are what counts."""
    log = logging.getLogger("lm_eval.elude")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
