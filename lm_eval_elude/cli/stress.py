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

    On RWKU's data all models relearn half of its passages, and none needs a --reference.

    Writes OUT/attacks.csv, a row for each record, point and model; what is there already is not done again.

    \b
    Example:
      elude stress runs/name-swap --reference runs/retrained --suite standard --out runs/name-swap/stress
    """
    from lm_eval_elude.data import bundled
    from lm_eval_elude.data.files import new_folder
    from lm_eval_elude.data.manifest import read_manifest
    from lm_eval_elude.errors import UserError
    from lm_eval_elude.stress.suite import Stress, relearn_passages
    from lm_eval_elude.tasks import elude, rwku
    from lm_eval_elude.text.chat import check_place

    manifest = read_manifest(checkpoint)
    on_passages = rwku.is_rwku(dataset or (manifest.dataset if manifest else ""))
    if not (reference := reference or bundled.reference_of(manifest)) and not on_passages:
        raise UserError("--reference: give the retrained model; none is bundled for this checkpoint")
    models = {"checkpoint": checkpoint, "retrained": reference, "original": original}
    models = {role: bundled.path_of(model) for role, model in models.items() if model}
    for model in models.values():
        check_place(model)
    given = {"pretrained": models["checkpoint"], "target": list(names), "dataset": dataset, "attack_seed": seed}
    given = {key: value for key, value in given.items() if value}
    if not on_passages:
        click.echo(Stress(models, elude.resolve(given), suite, full).run(out))
        return
    given |= {"rwku_data": dataset} if dataset else {}
    with new_folder(out):
        for line in relearn_passages(models, rwku.resolve(given), suite, full, seed, out):
            click.echo(line)
