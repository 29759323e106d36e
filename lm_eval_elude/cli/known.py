from __future__ import annotations

from pathlib import Path

import click

from lm_eval_elude.cli import options


@click.command()
@click.option("--model", required=True, help="Model folder, Hub id or tiny (the bundled one), before unlearning.")
@options.dataset
@click.option("--target", "names", multiple=True, help="Whose facts (repeatable) [default: all of the data set].")
@click.option("--share", default=0.5, show_default=True, type=options.Finite(0, 1), help="Warn below it.")
@click.option("--seed", default=0, show_default=True, help="Of the wrong persons.")
@click.option("--batch-size", default=16, show_default=True, type=click.IntRange(1), help="Answers scored at once.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON file for every fact's measures.")
def known(
    model: str, dataset: str, names: tuple[str, ...], share: float, seed: int, batch_size: int, out: Path | None
) -> None:
    """Say which facts a model knows, before they are unlearned: where it knows few, Forget Quality says nothing."""
    from lm_eval_elude.curate.known import Judge, report
    from lm_eval_elude.data import bundled, jsonio
    from lm_eval_elude.data import dataset as data
    from lm_eval_elude.errors import printable

    targets = data.resolve_targets(dataset, names) if names else data.targets_of(dataset)
    sets = [data.load_records(dataset, "forget", "train", [target.name]).records for target in targets]
    options.apart({"--out": out}, options.data_files(dataset))
    judge = Judge(bundled.path_of(model), batch_size)
    reports = []
    click.echo(f"{'':22}{'facts':>6}{'known':>8}{'above':>8}{'beyond':>8}{'stated':>8}{'prob.':>8}")
    for target, records in zip(targets, sets, strict=True):
        measured = report(model, dataset, target.name, judge.judge(records, target, seed))
        reports.append(measured)
        shares = "".join(f"{value:8.1%}" for value in measured["shares"].values())
        click.echo(f"{printable(target.name):22}{measured['n']:6}{shares}")
    click.echo("above: the paraphrase over all wrong answers; beyond: over wrong persons; known: both (by luck 4 %)")
    if out:
        jsonio.write(out, reports)
    for measured in reports:
        if measured["shares"]["known"] < share:
            click.echo(
                f"warning: of {printable(measured['target'])} the model knows {measured['shares']['known']:.0%} of the "
                f"facts, below {share:.0%}: its Forget Quality would be high before any unlearning and says nothing",
                err=True,
            )
