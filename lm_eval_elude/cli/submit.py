"""``elude submit``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("results", type=click.Path(exists=True, path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The submission's folder, a new one.")
@click.option("--submitter", required=True, help="Who submits.")
@click.option("--model", default="", help="The model's name on the board [default: as the results file has it].")
@click.option("--base-model", default="", help="What it was made from [default: as its optout.json says].")
@click.option("--method", default="", help="How it was made [default: as its optout.json says].")
@click.option("--trained-on", default="", help="Data that the method saw [default: as its optout.json says].")
@click.option("--hardware", default="", help="What it was made on, e.g. '8 H100'.")
@click.option("--cost", type=click.FloatRange(0), help="Hours on one such device that making it took.")
@click.option(
    "--role", default="submission", type=click.Choice(["submission", "original", "retrained"]),
    help="original, retrained: a model that others are compared with.",
)  # fmt: skip
@click.option("--dataset", default="", help="The data set, if it lies elsewhere now.")
@click.option("--redact", is_flag=True, help="Withhold prompts and answers: keyed hashes, sums and counts stay.")
@click.option(
    "--hub", metavar="ORG/NAME", help="Open a pull request with card and results on this model's repository; HF_TOKEN."
)
@click.option(
    "--every-eval-ever", "exchange", type=click.Path(file_okay=False, path_type=Path),
    help="Also write the files of Every Eval Ever's schema below this folder.",
)  # fmt: skip
def submit(
    results: Path, out: Path, dataset: str, redact: bool, hub: str | None, exchange: Path | None, **about: object
) -> None:
    """Pack a finished run of all of ELUDe (`lm_eval --tasks elude --log_samples`) so that others can check it.

    RESULTS is lm-eval's results file or a folder with one.
    """
    import os
    import shutil

    from lm_eval_elude.board import publish
    from lm_eval_elude.board import submission as packed
    from lm_eval_elude.board.verify import verify
    from lm_eval_elude.core.records import DataError
    from lm_eval_elude.results.runs import Run

    if hub:
        publish.token(hub)
    run = Run(results)
    if (run.results.get("config") or {}).get("limit") is not None:
        raise DataError(f"{run.path}: was run with --limit; run lm_eval without it")
    staged = packed.staging(out)
    try:
        key = packed.new_key() if redact else b""
        packed.pack(run, staged, packed.About(**about), key)  # type: ignore[arg-type]
        source = dataset or str(run.settings(run.tasks[0])["dataset"])
        verdict = verify(staged, data="" if source.startswith("hub") else source, key=key)
        if verdict.findings:
            more = f" (and {len(verdict.findings) - 1} more)" if verdict.findings[1:] else ""
            raise DataError(f"{run.path}: cannot be submitted: {verdict.findings[0]}{more}")
        if exchange:
            click.echo(f"written: {publish.every_eval_ever(staged, exchange, verdict)}")
        if hub:
            own = packed.checkpoint_manifest(run.settings(run.tasks[0])) if not redact else None
            card = own and own[0].with_name(publish.CARD)
            click.echo(f"pull request: {publish.pull_request(hub, verdict, card if card and card.is_file() else None)}")
        os.chmod(staged, 0o755)
        os.rename(staged, out)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    if key:
        file = packed.write_key(out, key)
        click.echo(f"{file}: keep it to yourself; with it you can show later what was withheld")
    click.echo(f"{out}: level {verdict.level}; check it as others will: elude verify {out}")
