from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("checkpoint")
@click.option("--reference", default="", help="The retrained model, attacked likewise  [default: the bundled one].")
@click.option("--original", default="", help="The model before unlearning, for the unlearning depth score.")
@click.option("--suite", default="smoke", show_default=True, type=click.Choice(["smoke", "standard"]))
@click.option("--target", "names", multiple=True, help="Whose facts (repeatable)  [default: as optout.json says].")
@click.option("--dataset", default="", help="hub, mini, rwku, or a folder  [default: as optout.json says].")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of halves and order.")
@click.option("--full", is_flag=True, help="Train all weights in float32 above a billion parameters, too.")
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="New, or to go on with.")
def stress(
    checkpoint: str, reference: str, original: str, suite: str, names: tuple[str, ...], dataset: str, seed: int,
    full: bool, out: Path,
) -> None:  # fmt: skip
    """Attack the weights of CHECKPOINT and of the retrained model: relearning, rounding, pruning.

    On RWKU's data (--dataset rwku, or a folder): relearning from half of the passages, also of the original model.

    Writes OUT/attacks.csv, a row for each record, point and model; what is there already is not done again.

    \b
    Example:
      elude stress runs/name-swap --reference runs/retrained --suite standard --out runs/name-swap/stress
    """
    from lm_eval_elude.data import bundled, rwku
    from lm_eval_elude.data.manifest import read_manifest
    from lm_eval_elude.errors import UserError
    from lm_eval_elude.stress.suite import PassageStress, Stress
    from lm_eval_elude.stress.table import most_probable, read
    from lm_eval_elude.tasks import elude
    from lm_eval_elude.tasks.rwku import resolve
    from lm_eval_elude.text.chat import check_place

    manifest = read_manifest(checkpoint)
    passages = rwku.is_rwku(dataset or (manifest.dataset if manifest else ""))
    if not (reference := reference or bundled.reference_of(manifest)) and not passages:
        raise UserError("--reference: give the retrained model; none is bundled for this checkpoint")
    models = {"checkpoint": checkpoint, "retrained": reference, "original": original}
    models = {role: bundled.path_of(model) for role, model in models.items() if model}
    for model in models.values():
        check_place(model)
    given = {"pretrained": models["checkpoint"], "target": list(names), "attack_seed": seed}
    given |= {"rwku_data" if passages else "dataset": dataset}
    given = {key: value for key, value in given.items() if value}
    if not passages:
        click.echo(Stress(models, elude.resolve(given), suite, full).run(out))
        return
    click.echo(table := PassageStress(models, resolve(given), suite, full).run(out))
    for role, before, most in most_probable(read(table)):
        click.echo(
            f"{role}: the blanks' answers have a probability of {before:.3f}, after relearning {most:.3f} at most"
        )
