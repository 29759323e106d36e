from __future__ import annotations

import click

from lm_eval_elude import task_folder
from lm_eval_elude.data import bundled

PLACES = {bundled.MODEL.name: bundled.MODEL, bundled.REFERENCE.name: bundled.REFERENCE, "mini": bundled.DATA}


@click.command()
@click.argument("place", type=click.Choice([*PLACES, "tasks"]))
def path(place: str) -> None:
    """Print where a bundled model, the bundled data or the task folder lies.

    `elude path tasks` is for those who would rather pass --include_path than have the tasks found by themselves.

    \b
    Example:
      lm_eval --include_path "$(elude path tasks)" --tasks elude_forget --model_args pretrained=MODEL
    """
    click.echo(task_folder() if place == "tasks" else PLACES[place])
