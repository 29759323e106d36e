"""``elude verify``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--dataset", default="", help="The data set, where the submission's is a path on another machine.")
@click.option(
    "--tokenizer", default="", help="Of the model, a folder or Hub id: token counts and template are checked."
)
@click.option("--key", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Of withheld texts.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
def verify(folder: Path, dataset: str, tokenizer: str, key: Path | None, as_json: bool) -> int:
    """Check a submission without trust: files, documents, prompts, responses, every number.

    Prints a line for each finding; exit code 0 where there is none, else 1.
    """
    import json
    import logging

    from lm_eval_elude.board import verify as board
    from lm_eval_elude.core.chat import Renderer, load_tokenizer

    logging.getLogger("lm_eval.elude").setLevel(logging.ERROR)  # what the builders say of their data
    renderer = Renderer(load_tokenizer(tokenizer)) if tokenizer else None
    verdict = board.verify(folder, data=dataset, renderer=renderer, key=key.read_bytes() if key else b"")
    if as_json:
        fields = {name: getattr(verdict, name) for name in ("digest", "level", "findings", "remarks")}
        click.echo(json.dumps(fields, indent=2))
    else:
        for line in verdict.findings or verdict.remarks:
            click.echo(line)
        click.echo(f"{folder}: {verdict.level or f'refused, {len(verdict.findings)} findings'}")
    return int(bool(verdict.findings))
