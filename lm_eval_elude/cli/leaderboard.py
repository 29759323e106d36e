"""``elude leaderboard``."""

from __future__ import annotations

from pathlib import Path

import click

from lm_eval_elude.cli.options import quiet, say

_FOLDER = click.Path(file_okay=False, path_type=Path)


class _Leaderboard(click.Group):
    """`init` is a command of its own; anything else is the folder to build from."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = args and (args[0] in self.commands or args[0] in ("-h", "--help"))
        return super().parse_args(ctx, args if known else ["build", *args])


@click.group(cls=_Leaderboard)
def leaderboard() -> None:
    """Build a static site from a folder of submissions: `elude leaderboard DIR --out SITE`, or `init DIR`."""


@leaderboard.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", required=True, type=_FOLDER, help="The site's folder; what is unchanged in it is kept.")
@click.option("--dataset", default="", help="The data set of all submissions, where theirs is a path elsewhere.")
@click.option("--tokenizer", default="", help="Of the models, a folder or Hub id: token counts are checked.")
@quiet()
def build(folder: Path, out: Path, dataset: str, tokenizer: str) -> None:
    """Build or renew the site from the submissions in FOLDER; one that does not verify is left out, with a line."""
    from lm_eval_elude.board import site

    done = site.build(folder, out, data=dataset, tokenizer=tokenizer)
    for name, finding in done.refused.items():
        say(f"left out: {name}: {finding}", err=True)
    say(f"{out / 'index.html'}: {done.rows} submissions, {done.formed} of them formed now")


@leaderboard.command()
@click.argument("folder", type=_FOLDER)
def init(folder: Path) -> None:
    """Write a repository that is ready to take submissions by pull request: workflow, pages, folders."""
    from lm_eval_elude.board import site

    for file in site.start(folder):
        say(f"written: {file}")
