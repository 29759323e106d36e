from __future__ import annotations

from pathlib import Path

import click

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_NEW = click.Path(file_okay=False, path_type=Path)


@click.group()
def leaderboard() -> None:
    """A leaderboard in a git repository: you score what others name.

    \b
    Example:
      elude leaderboard init board --package lm-eval-elude==1.0.0
      elude leaderboard score board/submissions/ORG__MODEL.yaml
      elude leaderboard build board --out site
    """


@leaderboard.command()
@click.argument("folder", type=_NEW)
@click.option("--package", required=True, help="What the workflow installs: name==version, an address, or a path.")
def init(folder: Path, package: str) -> None:
    """Write a repository that takes submissions by pull request.

    \b
    Example:
      elude leaderboard init board --package lm-eval-elude==1.0.0
    """
    from lm_eval_elude.leaderboard.site import start

    for file in start(folder, package):
        click.echo(f"written: {file}")


@leaderboard.command()
@click.argument("folder", type=_FOLDER)
@click.option("--online", is_flag=True, help="Also ask the Hub whether the weights are there.")
def check(folder: Path, online: bool) -> None:
    """Check board.yml and every submission.

    \b
    Example:
      elude leaderboard check board --online
    """
    from lm_eval_elude.leaderboard import site

    click.echo(f"{len(site.check(folder, online))} submissions")


@leaderboard.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--hub", type=_FOLDER, help="A folder ORG/MODEL/COMMIT in place of the Hub.")
def score(file: Path, hub: Path | None) -> None:
    """Score the checkpoint that FILE, in BOARD/submissions, names: lm-eval's group elude, and attacks on its weights.

    Tokenizer, chat template and generation settings are those of the table's base model.

    \b
    Example:
      elude leaderboard score board/submissions/ORG__MODEL.yaml
    """
    from lm_eval_elude.leaderboard.board import submission
    from lm_eval_elude.leaderboard.score import score

    click.echo(f"written: {score(file.resolve().parents[1], submission(file), hub and hub.resolve())}")


@leaderboard.command()
@click.argument("folder", type=_FOLDER)
@click.option("--out", required=True, type=_NEW, help="The site's folder.")
def build(folder: Path, out: Path) -> None:
    """Build the site: index.html, board.csv, and a report for each row.

    \b
    Example:
      elude leaderboard build board --out site
    """
    from lm_eval_elude.leaderboard import site

    click.echo(f"{out / 'index.html'}: {site.build(folder, out)} ranked rows")
