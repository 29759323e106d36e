from __future__ import annotations

import click

from lm_eval_elude.cli import options
from lm_eval_elude.errors import printable


@click.command()
@options.dataset
def targets(dataset: str) -> None:
    """List the targets of a data set: slug, display name, aliases.

    \b
    Example:
      elude targets --dataset mini
    """
    from lm_eval_elude.data.dataset import targets_of

    for target in targets_of(dataset):
        click.echo(f"{target.slug:20} {printable(target.name):20} {printable(', '.join(target.aliases))}")
