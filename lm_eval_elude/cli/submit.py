from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--model", required=True, metavar="ORG/MODEL", help="The checkpoint on the Hub.")
@click.option("--revision", required=True, help="Its commit, 40 digits.")
@click.option("--table", required=True, help="Name of the board's table.")
@click.option("--method", required=True, help="How it was unlearned.")
@click.option("--contact", required=True, help="Whom the maintainer may ask.")
@click.option("--paper", default="", metavar="URL")
@click.option("--code", default="", metavar="URL")
@click.option("--trained-on", default="", help="Data that the method saw.")
@click.option("--compute", default="", help="E.g. '2 hours on one H100'.")
@click.option(
    "--results", type=click.Path(exists=True, path_type=Path),
    help="Your own results of lm_eval, shown as self-reported until the maintainer has scored.",
)  # fmt: skip
def submit(out: Path, results: Path | None, **about: str) -> None:
    """Write OUT/ORG__MODEL.yaml, which a pull request adds to a board's submissions.

    \b
    Example:
      elude submit submissions --model me/llama-forgot --revision 0123456789abcdef0123456789abcdef01234567
        --table "Llama-3.1-8B, Ronaldo" --method name-swap --contact me@example.org
    """
    import msgspec

    from lm_eval_elude.errors import UserError
    from lm_eval_elude.leaderboard.board import Submission, write
    from lm_eval_elude.tasks.runs import Run

    own = {}
    if results:
        run = Run(results)
        if any(run.settings(task).get("sampled") for task in run.tasks):
            raise UserError(f"--results {results}: answers were sampled (--gen_kwargs); submit greedy ones")
        numbers = run.numbers
        places = {"mc_accuracy": "elude_forget", "mia_auc": "elude_mia", "retain_quality": "elude_quality"}
        own = {name: numbers[task][name].value for name, task in places.items() if name in numbers.get(task, {})}
        own = {{"retain_quality": "utility"}.get(name, name): value for name, value in own.items()}
    try:
        submitted = msgspec.convert({**about, "results": own}, Submission)
    except msgspec.ValidationError as error:
        raise UserError(f"elude submit: {error}") from None
    file = out / f"{submitted.slug}.yaml"
    if file.exists():
        raise UserError(f"{file} is there already; remove it, or name another folder")
    write(file, submitted)
    click.echo(f"written: {file}")
    click.echo("In a fork of the board's repository, with the file in submissions/:")
    click.echo(f"  git checkout -b {submitted.slug} && git add submissions/{file.name}")
    click.echo(f"  git commit -m 'Submit {submitted.model}' && git push -u origin HEAD && gh pr create --fill")
