"""``elude targets``."""

from __future__ import annotations

from pathlib import Path

import click

from lm_eval_elude.cli import options


@click.command()
@options.dataset
@click.option("--rank", type=click.Choice(["views"]), help="Instead: the people whose Wikipedia pages are read most.")
@click.option("--contact", help="With --rank: your mail or web address, which Wikimedia's rules ask for.")
@click.option("--period", default="2015-07:2023-12", show_default=True, help="With --rank: the months.")
@click.option("-n", "count", default=20, show_default=True, type=click.IntRange(1, 500), help="With --rank: how many.")
@click.option("--wiki", default="https://en.wikipedia.org", show_default=True, help="With --rank: which Wikipedia.")
@click.option(
    "--cache", type=click.Path(file_okay=False, path_type=Path), default="wikimedia-cache", show_default=True,
    help="With --rank: where answers are kept.",
)  # fmt: skip
def targets(
    dataset: str, rank: str | None, contact: str | None, period: str, count: int, wiki: str, cache: Path
) -> None:
    """List the targets of a data set: slug, display name, aliases; or rank people as the paper chose its targets."""
    from lm_eval_elude.core import dataset as data

    if rank:
        import asyncio

        from lm_eval_elude.build.wikipedia import Person, Wiki, months

        months(period)

        async def most_read() -> list[Person]:
            async with Wiki(cache, contact or "", wiki=wiki) as reader:
                return await reader.most_read(period, count)

        for place, person in enumerate(asyncio.run(most_read()), 1):
            click.echo(f"{place:4} {person.title:30} {person.views:14,}")
        return
    for target in data.resolve_targets(dataset, data.entities(dataset)):
        click.echo(f"{target.slug:20} {target.name:20} {', '.join(target.aliases)}")
