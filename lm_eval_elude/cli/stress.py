from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("checkpoint")
@click.option("--reference", required=True, help="The retrained model, which never saw the targets.")
@click.option("--suite", default="standard", show_default=True, type=click.Choice(["smoke", "standard"]))
@click.option("--target", "names", multiple=True, help="Whose facts (repeatable)  [default: as optout.json says].")
@click.option("--dataset", default="", help="hub, mini, or a folder  [default: as optout.json says].")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of halves and order.")
@click.option("--full-weights", is_flag=True, help="Train all weights of models above 1e9 parameters, too.")
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="CSV; rows are added.")
def stress(
    checkpoint: str, reference: str, suite: str, names: tuple[str, ...], dataset: str, seed: int, full_weights: bool,
    out: Path,
) -> None:  # fmt: skip
    """Attack the weights of CHECKPOINT and of the retrained model: relearning, rounding, pruning.

    Give the table to `elude report --stress`. What is there already is not run again.

    \b
    elude stress runs/mine --reference retrained --suite smoke --out attacks.csv
    """
    from lm_eval_elude.data import bundled
    from lm_eval_elude.stress.suite import run
    from lm_eval_elude.tasks.elude import resolve
    from lm_eval_elude.text.chat import Renderer, load_tokenizer

    models = {"checkpoint": bundled.path_of(checkpoint), "retrained": bundled.path_of(reference)}
    given = {"pretrained": models["checkpoint"], "target": list(names), "dataset": dataset}
    settings = resolve({key: value for key, value in given.items() if value})
    renderer = Renderer(load_tokenizer(models["checkpoint"]))
    run(models, suite, settings, renderer, out, seed=seed, whole=full_weights,
        say=lambda line: click.echo(line, err=True))  # fmt: skip
    click.echo(f"written: {out}")
