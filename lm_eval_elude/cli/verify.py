from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
def verify(folder: Path) -> int:
    """Compute every number of a run again from its logged samples; exit code 1 where one differs.

    \b
    Example:
      elude verify results/ORG__MODEL
    """
    from lm_eval_elude.tasks.runs import Run

    run = Run(folder)
    wrong = run.mismatches()
    for line in wrong:
        click.echo(line)
    click.echo(f"{run.path}: {len(wrong)} differ" if wrong else f"{run.path}: all numbers follow from the samples")
    return int(bool(wrong))
