from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lm_eval_elude.cli.options import say


@click.command()
@click.argument("checkpoint")
@click.option("--suite", default="quick", show_default=True, type=click.Choice(["glance", "quick", "full"]))
@click.option("--reference", default="", help="The model that never knew  [default: the bundled one, where it fits].")
@click.option("--original", default="", help="The model before unlearning  [default: as optout.json says].")
@click.option("--target", "names", multiple=True, help="Whose facts (repeatable)  [default: as optout.json says].")
@click.option("--dataset", default="", help="hub, mini, or a folder  [default: as optout.json says].")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of halves, order and adapters.")
@click.option(
    "--reference-run", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="--out of a run on another checkpoint, from which the reference's numbers are copied.",
)  # fmt: skip
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="New, or to go on with.")
def stress(
    checkpoint: str, suite: Any, reference: str, original: str, names: tuple[str, ...], dataset: str, seed: int,
    reference_run: Path | None, out: Path,
) -> None:  # fmt: skip
    """Attack the weights of CHECKPOINT: relearning, quantisation, pruning, interpolation, the inner layers.

    The same is done to a model that never knew the targets, and only what goes beyond it counts. A command that was
    killed goes on where it was. See docs/stress.md.
    """
    from lm_eval_elude.data import bundled
    from lm_eval_elude.data.manifest import FILE_NAME, read_manifest
    from lm_eval_elude.errors import UserError
    from lm_eval_elude.report.frame import markdown
    from lm_eval_elude.report.weights import table
    from lm_eval_elude.scoring.settings import resolve_settings
    from lm_eval_elude.stress.outcome import Outcome
    from lm_eval_elude.stress.suite import Stress
    from lm_eval_elude.text.chat import check_place, load_tokenizer

    checkpoint, reference, original = map(bundled.path_of, (checkpoint, reference, original))
    check_place(checkpoint)
    given = {
        "pretrained": checkpoint, "target": list(names), "dataset": dataset, "reference": reference,
        "original": original,
    }  # fmt: skip
    settings = resolve_settings({key: value for key, value in given.items() if value})
    manifest = read_manifest(checkpoint)
    base = manifest.first_base if manifest else ""
    models = {"checkpoint": checkpoint, "reference": settings.reference, "original": settings.original or base}
    revision = manifest.first_revision if manifest else ""
    if revision and not original:
        raise UserError(
            f"--original is missing: {checkpoint} began from revision {revision} of {base}; name its folder"
        )
    if revision and manifest and not manifest.requests and (Path(checkpoint) / "adapter_config.json").is_file():
        raise UserError(f"{checkpoint} is an adapter of revision {revision} of {base}: merge it, and name the result")
    load_tokenizer(checkpoint)  # report a mistyped name first
    if not models["reference"]:
        raise UserError("--reference is missing: name a model that never knew the targets")
    if not models["original"]:
        raise UserError(
            f"--original is missing: {checkpoint} has no {FILE_NAME} that names the model before unlearning"
        )
    Stress(models, settings, suite, seed).run(out, lambda text: say(text, err=True), reference_run)
    click.echo(markdown(table({Path(checkpoint).name: Outcome(out)})))
