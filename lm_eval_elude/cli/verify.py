"""``elude verify``."""

from __future__ import annotations

from pathlib import Path

import click

from lm_eval_elude.cli.options import quiet


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--dataset", default="", help="The data set, where the submission's is a path on another machine.")
@click.option(
    "--tokenizer", default="", help="Of the model, a folder or Hub id: token counts and template are checked."
)
@click.option("--key", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Of withheld texts.")
@click.option(
    "--reference", type=click.Path(exists=True, path_type=Path),
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
    folder: Path, dataset: str, tokenizer: str, key: Path | None, reference: Path | None, model: str, records: int,
    backend: str, tolerance: float, as_json: bool,
) -> int:  # fmt: skip
    """Check a submission without trust: files, documents, prompts, responses, every number.

    Prints a line for each finding; exit code 0 where there is none, else 1.
    """
    import json

    from lm_eval_elude.board import verify as board
    from lm_eval_elude.board.submission import finished
    from lm_eval_elude.core.chat import Renderer, load_tokenizer

    tokenizer = tokenizer or model
    renderer = Renderer(load_tokenizer(tokenizer)) if tokenizer else None
    verdict = board.verify(folder, data=dataset, renderer=renderer, key=key.read_bytes() if key else b"",
                           reference=finished(reference) if reference else None)  # fmt: skip
    again = None
    if model and not verdict.findings:
        from lm_eval_elude.board.rescore import rescore

        again = rescore(
            folder, verdict, model, backend=backend, records=records, tolerance=tolerance, data=dataset
        )  # fmt: skip
    if as_json:
        fields = {name: getattr(verdict, name) for name in ("digest", "level", "findings", "remarks")}
        click.echo(json.dumps(fields | {"rescored": again._asdict() if again else None}, indent=2))
    else:
        for line in verdict.findings or verdict.remarks:
            click.echo(line)
        if again:
            click.echo(
                f"{again.records} of {again.total} documents scored again: log-probabilities within {again.gap:.2g} "
                f"nats a token, {again.same_texts:.0%} of the texts the same"
            )
        click.echo(f"{folder}: {verdict.level or f'refused, {len(verdict.findings)} findings'}")
    return int(bool(verdict.findings))
