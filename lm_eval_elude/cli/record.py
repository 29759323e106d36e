"""``elude record``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("results", type=click.Path(exists=True, path_type=Path))
@click.option("--out", default="record", show_default=True, type=click.Path(path_type=Path), help="A new folder.")
@click.option("--hash-targets", is_flag=True, help="Targets as keyed hashes; the key is written beside the folder.")
@click.option(
    "--sign", "key", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A private elliptic-curve key (PEM); needs the extra [sign].",
)  # fmt: skip
def record(checkpoint: Path, results: Path, out: Path, hash_targets: bool, key: Path | None) -> None:
    """Write a record of how CHECKPOINT was tested: an in-toto Statement and a page to print.

    RESULTS is of `lm_eval --tasks elude --log_samples` on that checkpoint.
    """
    import os
    import shutil

    from lm_eval_elude.board import record as board
    from lm_eval_elude.board import submission as packed
    from lm_eval_elude.results.runs import Run

    staged = packed.staging(out)
    try:
        secret = packed.new_key() if hash_targets else b""
        statement = board.record(checkpoint, Run(results), secret)
        board.write(statement, staged)
        os.chmod(staged, 0o755)
        os.rename(staged, out)
        staged = out
        signature = board.sign(out, key) if key else None
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    if secret:
        packed.write_key(out, secret)
    for test in statement["predicate"]["tests"]:
        click.echo(f"{test['result'].lower():7} {test['name']}: {test['value']:.3f}, up to {test['upperLimit95']:.3f}")
    if signature:
        click.echo(f"{signature}: signs every file of {out}")
    click.echo(f"{out}: {statement['predicate']['result'].lower()}")
