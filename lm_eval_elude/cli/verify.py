"""``elude verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lm_eval_elude.cli.options import quiet, say


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--dataset", "data", default="", help="The data set, where the submission's is a path elsewhere.")
@click.option("--tokenizer", default="", help="Of the model, a folder or Hub id: checks token counts and template.")
@click.option(
    "--reference", "known", type=click.Path(exists=True, path_type=Path),
    help="Results, or submission, of the run's reference; without it distances to it are left out.",
)  # fmt: skip
@click.option("--rescore", "model", default="", help="Score a random part again with this model, a folder or Hub id.")
@click.option("--records", default=50, show_default=True, type=click.IntRange(0), help="To score again; 0 for all.")
@click.option("--backend", default="elude", show_default=True, type=click.Choice(["elude", "hf"]), help="That scores.")
@click.option(
    "--tolerance", default=0.02, show_default=True, type=click.FloatRange(0),
    help="Of an answer's mean log-probability when scored again, in nats a token.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
@quiet()
def verify(
    folder: Path, data: str, tokenizer: str, known: Path | None, model: str, as_json: bool, **rescoring: Any
) -> int:
    """Check a submission without trust: files, documents, prompts, responses, every number.

    Prints a line for each finding; exit code 0 where there is none, else 1.
    """
    import json

    from lm_eval_elude.board import verify as board
    from lm_eval_elude.board.rescore import rescore
    from lm_eval_elude.board.submission import finished
    from lm_eval_elude.text.chat import Renderer, load_tokenizer

    renderer = Renderer(load_tokenizer(tokenizer or model)) if tokenizer or model else None
    reference = finished(known) if known else None
    verdict = board.verify(folder, data=data, renderer=renderer, reference=reference)
    again = rescore(folder, verdict, model, data=data, **rescoring) if model and not verdict.findings else None
    if as_json:
        fields = {name: getattr(verdict, name) for name in ("digest", "level", "findings", "remarks")}
        click.echo(json.dumps(fields | {"rescored": again._asdict() if again else None}, indent=2))
        return int(bool(verdict.findings))
    for line in verdict.findings or verdict.remarks:
        say(line)
    if again:
        say(
            f"{again.records} of {again.total} documents scored again: log-probabilities within {again.gap:.2g} "
            f"nats a token, {again.same_texts:.0%} of the texts the same"
        )
    say(f"{folder}: {verdict.level or f'refused, {len(verdict.findings)} findings'}")
    return int(bool(verdict.findings))
