"""``elude targets``."""

from __future__ import annotations

import click

from lm_eval_elude.cli import options


@click.command()
@options.dataset
def targets(dataset: str) -> None:
    """List the targets of a data set: slug, display name, aliases."""
    from lm_eval_elude.core import dataset as data

    for target in data.resolve_targets(dataset, data.entities(dataset)):
        click.echo(f"{target.slug:20} {target.name:20} {', '.join(target.aliases)}")
