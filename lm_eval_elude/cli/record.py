from __future__ import annotations

from pathlib import Path

import click

from lm_eval_elude.cli.options import quiet, say


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("results", type=click.Path(exists=True, path_type=Path))
@click.option("--out", default="record", show_default=True, type=click.Path(path_type=Path), help="A new folder.")
@click.option(
    "--reference", "reference_path", type=click.Path(exists=True, path_type=Path),
    help="Results of the model that never knew, where those of RESULTS name the model.",
)  # fmt: skip
@click.option(
    "--records", default=50, show_default=True, type=click.IntRange(0),
    help="To ask CHECKPOINT again, as many of each task; 0 for all.",
)  # fmt: skip
@click.option(
    "--stress", "attacked", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of `elude stress` on CHECKPOINT: which attacks on its weights it survived.",
)  # fmt: skip
@click.option("--hash-targets", is_flag=True, help="Targets as keyed hashes; the key is written to OUT.key.")
@click.option(
    "--sign", "key", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A private elliptic-curve key (PEM); the signature is written to OUT.sig. Needs the extra [sign].",
)  # fmt: skip
@quiet()
def record(
    checkpoint: Path, results: Path, out: Path, reference_path: Path | None, records: int, attacked: Path | None,
    hash_targets: bool, key: Path | None,
) -> None:  # fmt: skip
    """Write a record of how CHECKPOINT was tested: an in-toto Statement and a page to print.

    RESULTS is of `lm_eval --tasks elude --log_samples` on that checkpoint, with a reference in its --metadata. It is
    first checked as by `elude verify`.
    """
    import os
    import secrets
    import shutil
    from contextlib import ExitStack

    from lm_eval_elude.board import record as board
    from lm_eval_elude.board.submission import finished
    from lm_eval_elude.data.files import new_folder
    from lm_eval_elude.errors import UserError
    from lm_eval_elude.scoring.runs import Run
    from lm_eval_elude.stress.outcome import Outcome

    signature, key_of_names = (out.with_name(f"{out.name}.{ending}") for ending in ("sig", "key"))
    for file, wanted in ((signature, key), (key_of_names, hash_targets)):
        if wanted and os.path.lexists(file):
            raise UserError(f"--out {out}: {file} exists already; name another folder")
    sign = board.signer(key) if key else None  # before the model is asked again
    secret = secrets.token_hex(32) if hash_targets else ""
    with ExitStack() as undo:
        with new_folder(out) as staged:
            reference = finished(reference_path) if reference_path else None
            statement = board.record(
                checkpoint, Run(results), reference, records=records, key=secret.encode(),
                attacked=Outcome(attacked) if attacked else None,
            )  # fmt: skip
            board.write(statement, staged)
            if secret:  # before the record stands, since no one could tell without its key whom it is about
                with open(os.open(key_of_names, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as handle:
                    undo.callback(key_of_names.unlink)
                    handle.write(secret)
        undo.callback(shutil.rmtree, out)
        if sign:
            sign(out, signature)
        undo.pop_all()
    several = len(statement["predicate"]["targets"]) > 1
    for test in statement["predicate"]["tests"]:
        beyond = "chance" if "chance" in test else "reference"
        numbers = f"{test['value']:.3f}, {beyond} {test[beyond]:.3f}, excess up to {test['upperLimit95']:.3f}"
        about = f" ({test['target']})" if several else ""
        say(f"{test['result'].lower():18} {test['name']}{about}: {numbers}")
    if several:
        say("the record names all of these targets, with those of earlier requests; who gets it reads them", err=True)
    if key:
        say(f"{signature}: signs every file of {out}")
    say(f"{out}: {statement['predicate']['result'].lower()}")
