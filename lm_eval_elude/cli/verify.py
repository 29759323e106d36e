from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lm_eval_elude.cli.options import Finite, quiet, say, typed


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--board", "boards", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A board's folder: the submission must fit a table of its board.toml.",
)  # fmt: skip
@click.option("--dataset", "data", default="", help="The data set, where the submission's is a path elsewhere.")
@click.option("--tokenizer", default="", help="Of the base model, a folder or Hub id: for token counts and prompts.")
@click.option(
    "--reference", "reference_path", type=click.Path(exists=True, path_type=Path),
    help="Results, or submission, of the run's reference; without it distances to it are left out.",
)  # fmt: skip
@click.option("--rescore", "model", default="", help="Score a drawn part again with the model in this folder.")
@click.option("--original", default="", help="The model before unlearning, to ask again how odd the answers are.")
@click.option(
    "--stress", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of your own `elude stress` on the model of --rescore: were the attacks on its weights as bad?",
)  # fmt: skip
@click.option(
    "--records", default=50, show_default=True, type=click.IntRange(0),
    help="To score again, as many of each task; 0 for all.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0), help="Of the draw; who submits must not know it [default: a new one].")
@click.option("--backend", default="elude", show_default=True, type=click.Choice(["elude", "hf"]), help="That scores.")
@click.option(
    "--tolerance", type=Finite(0),
    help="Of an answer's mean log-probability when scored again, in nats a token [default: 0.02; in 16 bits 0.05].",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
@quiet()
def verify(
    folder: Path, boards: Path | None, data: str, tokenizer: str, reference_path: Path | None, model: str,
    seed: int | None, as_json: bool, **how: Any,
) -> int:  # fmt: skip
    """Check a submission without trust: files, documents, prompts, responses, every number.

    Prints a line for each finding; exit code 0 where there is none, else 1.
    """
    import json
    import secrets
    from datetime import UTC, datetime

    from lm_eval_elude.board import keeper
    from lm_eval_elude.board import submission as packed
    from lm_eval_elude.board import verify as board
    from lm_eval_elude.board.rescore import rescore
    from lm_eval_elude.data import bundled, jsonio
    from lm_eval_elude.data.dataset import load_records
    from lm_eval_elude.data.files import file_hashes
    from lm_eval_elude.errors import UserError
    from lm_eval_elude.scoring.settings import provenance
    from lm_eval_elude.text.chat import Renderer, load_tokenizer

    if not model and (flags := [flag for flag in typed() if flag.removeprefix("--") in ("seed", *how)]):
        raise UserError(
            f"{', '.join(flags)}: only for --rescore, which asks a model again; name its folder by --rescore"
        )
    if model and not tokenizer:
        raise UserError("--rescore needs --tokenizer: the base model's; a template that a submitter wrote is not used")
    tokenizer, how["original"] = bundled.path_of(tokenizer), bundled.path_of(how["original"])
    renderer = Renderer(load_tokenizer(tokenizer)) if tokenizer else None
    reference, misplaced = packed.finished(reference_path) if reference_path else None, []
    if reference:  # named by whoever verifies: one that cannot be read says nothing of the submission
        for task in reference.tasks:
            reference.rows(task)
    if boards:
        tables = keeper.read(boards)
        try:
            data = data or keeper.data(boards, keeper.place(tables, packed.read(folder), packed.digest(folder)))
        except UserError as error:
            misplaced = [str(error).replace(f"{folder}/", "")]
    elif not data and (elsewhere := packed.data_elsewhere(folder)):
        raise UserError(f"the data set {elsewhere!r} is not at hand: name yours by --dataset, or the board by --board")
    if data:  # likewise
        load_records(data, "forget", "train")
    verdict = board.verify(folder, data=data, renderer=renderer, reference=reference)
    if misplaced:
        verdict.findings = list(dict.fromkeys([*misplaced, *verdict.findings]))  # both read its first file
    again = None
    if model and not verdict.findings:
        drawn_by = secrets.randbits(48) if seed is None else seed
        # A later request's adapter belongs on the checkpoint of the one before, which is not the original.
        base = tokenizer if file_hashes(Path(tokenizer)) else how["original"] or tokenizer
        if how["original"]:
            from lm_eval_elude.tasks.reference import check_model

            check_model(how["original"], f"--original {how['original']!r} is not")
        again = rescore(folder, verdict, model, tokenizer, seed=drawn_by, base=base, **how)
    if as_json:
        fields = {name: getattr(verdict, name) for name in ("digest", "level", "findings", "remarks")} | {
            "model": verdict.submission.model if verdict.submission else "",
            "tokenizer": renderer.fingerprint if renderer else "",
            "versions": provenance({})["versions"],
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "rescored": again._asdict() if again else None,
        }
        click.echo(json.dumps(jsonio.finite(fields), indent=2))
        return int(bool(verdict.findings))
    for line in verdict.findings or verdict.remarks:
        say(line)
    if again:
        say(
            f"{again.records} of {again.total} documents scored again (seed {again.seed}): log-probabilities within "
            f"{again.gap:.2g} nats a token, {sum(again.ties.values())} of {again.texts} texts differ at near-ties"
        )
    say(f"{folder}: {verdict.level or f'refused, {len(verdict.findings)} findings'}")
    return int(bool(verdict.findings))
