"""``elude path``."""

from __future__ import annotations

from pathlib import Path

import click

from lm_eval_elude import task_folder

_MINI = Path(__file__).resolve().parents[1] / "mini"
PLACES = {"tiny": _MINI / "tiny", "tiny-without-ronaldo": _MINI / "tiny-without-ronaldo", "mini": _MINI / "data"}


@click.command()
@click.argument("place", type=click.Choice([*PLACES, "tasks"]))
def path(place: str) -> None:
    """Print where a bundled model, the bundled data or the task folder lies.

    `elude path tasks` is for those who would rather pass --include_path than have the tasks found by themselves.
    """
    click.echo(task_folder() if place == "tasks" else PLACES[place])
