from __future__ import annotations

from pathlib import Path

import click

from lm_eval_elude.cli import options
from lm_eval_elude.errors import printable


@click.command()
@click.argument("dataset", required=False)
@click.option("--sample", default=50, show_default=True, type=click.IntRange(1), help="Rows of each set to be judged.")
@click.option("--seed", default=0, show_default=True, help="Of the sample.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path),
    help="The page for judging [default: audit.html, within the folder of a data set that `build` made].",
)  # fmt: skip
@click.option("--findings", "most", default=20, show_default=True, type=click.IntRange(0), help="Findings to print.")
@click.option("--merge", is_flag=True, help="Instead: put together what judges exported: --merge a.json b.json.")
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def audit(
    dataset: str | None, sample: int, seed: int, out: Path | None, most: int, merge: bool, files: tuple[Path, ...]
) -> None:
    """Check a data set by rule, and write a page on which a person judges a sample of it.

    DATASET is hub, mini, or a folder in the ELUDe schema.
    """
    from collections import Counter

    from lm_eval_elude.curate import audit as auditing
    from lm_eval_elude.data.dataset import targets_of
    from lm_eval_elude.data.files import write_text

    if not dataset:
        raise click.UsageError("a data set is expected, or --merge and files")
    if merge:
        if idle := [flag for flag in options.typed() if flag != "--merge"]:
            raise click.UsageError(f"{', '.join(idle)}: does nothing with --merge; leave it out")
        judged = auditing.merge([Path(dataset), *files])
        click.echo(f"{'set':8}{'criterion':12}{'share':>8}{'95 % interval':>18}{'items':>7}{'alpha':>8}{'paper':>8}")
        for row in judged:
            paper = auditing.PAPER[row.subset][auditing.CRITERIA.index(row.criterion)]
            alpha = f"{row.alpha:8.2f}" if row.alpha is not None else f"{'-':>8}"
            interval = f"{row.low:.1%} to {row.high:.1%}"
            click.echo(
                f"{row.subset:8}{row.criterion:12}{row.share:8.1%}{interval:>18}{row.items:7}{alpha}{paper:8.1%}"
            )
        return
    if files:
        raise click.UsageError(f"unexpected: {', '.join(map(str, files))} (files are for --merge)")
    out = out or auditing.place_of_page(dataset)
    rows = auditing.rows_of(dataset)
    options.apart({"--out": out}, options.data_files(dataset))
    findings = auditing.findings(rows, targets_of(dataset)) + auditing.near_duplicates(rows)
    click.echo(f"{len(rows)} rows, {len(findings)} findings by rule")
    for reason, count in Counter(finding.reason.partition(":")[0] for finding in findings).most_common():
        click.echo(f"{count:6}  {printable(reason)}")
    for finding in findings[:most]:
        click.echo(f"  {printable(f'{finding.where}: {finding.reason} ({finding.question!r})')}")
    click.echo(f"{'':8}{'rows':>6}{'distinct answers':>18}{'distinct bigrams':>18}{'commonest opening':>19}")
    for subset in auditing.PAPER:
        if records := [row.record for row in rows if row.subset == subset]:
            d = auditing.diversity(records)
            click.echo(f"{subset:8}{len(records):6}{d.distinct:18.1%}{d.bigrams:18.1%}{d.openings:19.1%}")
    write_text(out, auditing.page(dataset, rows, sample, seed))
    click.echo(f"{out}: open it in a browser, judge the rows of each set, export, and elude audit --merge")
