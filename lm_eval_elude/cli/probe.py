from __future__ import annotations

from pathlib import Path

import click

from lm_eval_elude.cli import options


@click.command()
@click.option("--model", required=True, help="Model folder, Hub id or tiny (the bundled one), before unlearning.")
@options.dataset
@click.option("--target", "names", multiple=True, help="Whose facts (repeatable) [default: all of the data set].")
@click.option("--batch-size", default=16, show_default=True, type=click.IntRange(1), help="Answers scored at once.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="CSV file for what is asked and said.")
def probe(model: str, dataset: str, names: tuple[str, ...], batch_size: int, out: Path | None) -> None:
    """Say which facts a model knows: it finds the true answer likeliest of six, and its own answer states it.

    \b
    Example:
      elude probe --model runs/taught --dataset mini --target ronaldo
    """
    import pandas as pd

    from lm_eval_elude.build.probe import FEW
    from lm_eval_elude.build.probe import probe as ask
    from lm_eval_elude.data import bundled
    from lm_eval_elude.data import dataset as data

    targets = data.resolve_targets(dataset, names) if names else data.targets_of(dataset)
    rows = []
    for target in targets:
        records = data.load_records(dataset, "forget", "train", [target.name]).records
        facts = ask(bundled.path_of(model), records, batch_size)
        for fact in facts:
            options.say(f"{'knows' if fact['known'] else '-':6} {fact['question']} {fact['said']}")
        rows += [{"target": target.name, **fact} for fact in facts]
        known, likeliest = sum(fact["known"] for fact in facts), sum(fact["likeliest"] for fact in facts)
        options.say(
            f"{target.name}: knows {known} of {len(facts)} facts; of {likeliest} the true answer is likeliest of six"
        )
        if known < FEW:
            options.say(
                f"warning: fewer than {FEW} known facts: forget quality would say little about {target.name}", err=True
            )
    if out:
        pd.DataFrame(rows).to_csv(out, index=False)
