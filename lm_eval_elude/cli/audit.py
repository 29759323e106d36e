from __future__ import annotations

from pathlib import Path

import click

from lm_eval_elude.cli import options
from lm_eval_elude.errors import UserError


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="DATASET | --merge FILES")
@click.option("--merge", is_flag=True, help="Take the files of several judges, filled in, together.")
@click.option("-n", "size", default=100, show_default=True, type=click.IntRange(1), help="Rows of each set to judge.")
@click.option("--seed", default=0, show_default=True, help="Which rows.")
@click.option("--out", default="audit.csv", show_default=True, type=click.Path(path_type=Path), help="CSV file.")
def audit(paths: tuple[str, ...], merge: bool, size: int, seed: int, out: Path) -> None:
    """Sample a data set for people to judge, or take their judgements together.

    \b
    Example:
      elude audit my-data --out judge-a.csv
      elude audit --merge judge-a.csv judge-b.csv
    """
    from lm_eval_elude.build import audit as auditing

    if not merge:
        if len(paths) > 1:
            raise UserError("one data set at a time; --merge takes several files")
        if out.exists():
            raise UserError(f"--out {out}: is there already; move it away or name another file")
        rows = auditing.sample(paths[0], size, seed)
        rows.to_csv(out, index=False)
        click.echo(f"{out}: {len(rows)} rows. Each judge fills in a copy: 1 or 0 in {', '.join(auditing.CRITERIA)}")
        return
    options.require("build", "krippendorff")
    table = auditing.merge([Path(path) for path in paths])
    click.echo(table.to_string(index=False, float_format="{:.3f}".format))
