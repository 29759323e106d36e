from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lm_eval_elude.cli.options import Finite, say


@click.command()
@click.argument("results", type=click.Path(exists=True, path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The submission's folder, a new one.")
@click.option("--submitter", required=True, help="Who submits.")
@click.option("--model", default="", help="The model's name on the board [default: as the results file has it].")
@click.option("--base-model", default="", help="What it was made from [default: as its optout.json says].")
@click.option("--method", default="", help="How it was made [default: as its optout.json says].")
@click.option("--trained-on", default="", help="Data that the method saw [default: as its optout.json says].")
@click.option("--code", default="", metavar="URL", help="What the model was made with; https.")
@click.option("--paper", default="", metavar="URL", help="What describes the method; https.")
@click.option("--hardware", default="", help="What it was made on, e.g. '8 H100'.")
@click.option("--cost", type=Finite(0), help="Hours on one such device that making it took.")
@click.option(
    "--role", default="submission", type=click.Choice(["submission", "original", "retrained"]),
    help="original, retrained: a model that others are compared with.",
)  # fmt: skip
@click.option(
    "--stress", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of `elude stress` on the checkpoint: what attacks on its weights brought back.",
)  # fmt: skip
@click.option("--dataset", default="", help="The data set, if it lies elsewhere now.")
@click.option(
    "--hub", metavar="ORG/NAME", help="Open a pull request with card and results on this model's repository; HF_TOKEN."
)
@click.option(
    "--every-eval-ever", "exchange", type=click.Path(file_okay=False, path_type=Path),
    help="Also write the files of Every Eval Ever's schema below this folder.",
)  # fmt: skip
def submit(results: Path, out: Path, dataset: str, hub: str | None, exchange: Path | None, **about: Any) -> None:
    """Pack a finished run of all of ELUDe (`lm_eval --tasks elude --log_samples`) so that others can check it.

    RESULTS is lm-eval's results file or a folder with one.
    """
    import shlex

    from lm_eval_elude.board import publish
    from lm_eval_elude.board import submission as packed
    from lm_eval_elude.board.verify import verify
    from lm_eval_elude.data.dataset import HUB
    from lm_eval_elude.data.files import new_folder
    from lm_eval_elude.errors import UserError
    from lm_eval_elude.scoring.runs import Run

    if hub:
        publish.token(hub)
    run = Run(results)
    reference = packed.reference_of(run) if hub else None
    with new_folder(out) as staged:
        packed.pack(run, staged, **about)
        source = dataset or str(run.settings(run.tasks[0])["dataset"])
        verdict = verify(staged, data=source if HUB.revision(source) is None else "")
        if verdict.findings:
            more = f" (and {len(verdict.findings) - 1} more)" if verdict.findings[1:] else ""
            raise UserError(f"{run.path}: cannot be submitted: {verdict.findings[0]}{more}")
        # Before OUT is there: a command that is killed in between can be given again.
        written = publish.every_eval_ever(staged, exchange, verdict) if exchange else None
    words = ["elude", "verify", str(out), *(["--dataset", source] if packed.data_elsewhere(out) else [])]
    say(f"{out}: level {verdict.level}; check it as others will: {shlex.join(words)}")
    if written:
        say(f"written: {written}")
    if hub:
        folder = run.checkpoint
        card = folder / publish.CARD if folder else None
        try:
            address = publish.pull_request(hub, verdict, card if card and card.is_file() else None, reference)
        except UserError as error:
            raise UserError(f"{error}; {out} is written, only the pull request is missing") from None
        say(f"pull request: {address}")
