from __future__ import annotations

from pathlib import Path

import click

from lm_eval_elude.cli.options import quiet, say

_FOLDER = click.Path(file_okay=False, path_type=Path)


class _Leaderboard(click.Group):
    """`init` and `table` are commands of their own; anything else is the folder to build from."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = args and (args[0] in self.commands or args[0] in ("-h", "--help"))
        return super().parse_args(ctx, args if known else ["build", *args])


@click.group(cls=_Leaderboard)
def leaderboard() -> None:
    """Build a static site from a folder of submissions: `elude leaderboard DIR --out SITE`; `init`, `table`."""


@leaderboard.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", required=True, type=_FOLDER, help="The site's folder; what is unchanged in it is kept.")
@quiet()
def build(folder: Path, out: Path) -> None:
    """Build or renew the site from FOLDER: board.toml, submissions, verdicts.

    A submission that does not verify, or fits no table, is left out with a line.
    """
    from lm_eval_elude.board import site

    done = site.build(folder, out)
    for name, finding in done.refused.items():
        say(f"left out: {name}: {finding}", err=True)
    say(f"{out / 'index.html'}: {done.rows} submissions, {done.formed} of them formed now")


@leaderboard.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--name", required=True, help="Of the table.")
@click.option("--tokenizer", required=True, help="Of the base model, a folder or Hub id.")
@click.option("--retrained", required=True, type=_FOLDER, help="Submission of the model that never knew the targets.")
@click.option("--original", type=_FOLDER, help="Submission of the model before unlearning.")
@click.option("--dataset", default="", help="hub, mini, or a path from FOLDER [default: as the submission has it].")
def table(folder: Path, name: str, tokenizer: str, retrained: Path, original: Path | None, dataset: str) -> None:
    """Write a table into FOLDER/board.toml: what its references have is what every row must have."""
    from lm_eval_elude.board import keeper
    from lm_eval_elude.data import bundled
    from lm_eval_elude.text.chat import Renderer, load_tokenizer

    fingerprint = Renderer(load_tokenizer(bundled.path_of(tokenizer))).fingerprint
    keeper.add(folder, name, dataset, fingerprint, retrained, original)
    say(f"written: {folder / keeper.FILE}: table {name}")


@leaderboard.command()
@click.argument("folder", type=_FOLDER)
def init(folder: Path) -> None:
    """Write a repository that is ready to take submissions by pull request: workflow, pages, folders."""
    from lm_eval_elude.board import site

    for file in site.start(folder):
        say(f"written: {file}")
