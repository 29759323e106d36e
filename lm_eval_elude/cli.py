"""``elude``: where the bundled things lie, which targets there are, and attack prompts written by a language model."""

from __future__ import annotations

from pathlib import Path

import click

from lm_eval_elude import __version__

_PACKAGE = Path(__file__).resolve().parent
PLACES = {
    "tiny": _PACKAGE / "mini" / "tiny",
    "tiny-without-ronaldo": _PACKAGE / "mini" / "tiny-without-ronaldo",
    "mini": _PACKAGE / "mini" / "data",
}


class Refusals(click.Group):
    """A command group whose refusals (bad data, unknown names, files that cannot be written) are one line, exit code 2."""

    def invoke(self, context: click.Context) -> object:
        try:
            return super().invoke(context)
        except (ValueError, OSError) as error:
            raise click.UsageError(" ".join(str(error).split())) from None


@click.group(cls=Refusals, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="elude")
def main() -> None:
    """Tools around the ELUDe tasks of lm-evaluation-harness (score with `lm_eval --tasks elude`)."""


@main.command()
@click.argument("place", type=click.Choice([*PLACES, "tasks"]))
def path(place: str) -> None:
    """Print where a bundled model, the bundled data or the task folder lies.

    `elude path tasks` is for those who would rather pass --include_path than have the tasks found by themselves.
    """
    from lm_eval_elude._autoload import task_configs

    click.echo(task_configs() if place == "tasks" else PLACES[place])


@main.command()
@click.option("--dataset", default="hub", show_default=True, help="hub, mini, or a folder or file in the ELUDe schema.")
def targets(dataset: str) -> None:
    """List the targets of a data set: slug, display name, aliases."""
    from lm_eval_elude.core import dataset as data

    for target in data.resolve_targets(dataset, data.entities(dataset)):
        click.echo(f"{target.slug:20} {target.name:20} {', '.join(target.aliases)}")
