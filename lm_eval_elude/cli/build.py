from __future__ import annotations

import os
from pathlib import Path

import click

from lm_eval_elude.cli.options import Finite, say, timeout, typed
from lm_eval_elude.errors import printable


@click.command()
@click.argument("target")
@click.option("--from", "source", help="A folder of documents (TXT, MD, HTML, PDF, DOCX), or: wikipedia.")
@click.option("--contact", help="Your mail or web address, which Wikimedia's rules ask for.")
@click.option("--wiki", default="https://en.wikipedia.org", show_default=True, help="Which Wikipedia.")
@click.option("--period", help="Months whose views rank neighbours, e.g. 2023-01:2023-12 [default: the last twelve].")
@click.option("--out", type=click.Path(path_type=Path), help="The data set's folder [default: my-TARGET].")
@click.option("--llm", "url", help="OpenAI-compatible endpoint, e.g. http://localhost:8000/v1.")
@click.option("--llm-model", "model", help="Model to ask there; OPENAI_API_KEY has the key.")
@click.option("--neighbours", help="Whom to keep, with commas [default: found in the source].")
@click.option("--alias", "aliases", multiple=True, help="Another name of the target (repeatable).")
@click.option("--thing", is_flag=True, help="The target is no person (a product, a place): attacks ask for a thing.")
@click.option("--pairs", default=4, show_default=True, type=click.IntRange(1, 20), help="To ask for, a paragraph.")
@click.option(
    "--paragraphs", default=0, type=click.IntRange(0), help="At most so many for each subject [default: all]."
)
@click.option(
    "--world", default="mini", show_default=True, help="Data set whose world set is taken: hub, mini, a folder."
)
@click.option("--licence", default="not stated", show_default=True, help="Of the documents, for the data card.")
@click.option("--no-translations", is_flag=True, help="Leave out what the cross-lingual attack asks with.")
@click.option("--allow-remote", is_flag=True, help="Send your own documents to an endpoint on another machine.")
@click.option("--dry-run", is_flag=True, help="Say about how many calls and tokens it takes; keep nothing.")
@click.option(
    "--prices", type=(Finite(0), Finite(0)), help="Of a million tokens read and written, for --dry-run's cost."
)
@click.option("--token-budget", type=click.IntRange(1), help="Stop when so many are used; a larger one goes on.")
@click.option("--seed", default=0, show_default=True, help="Of the splits.")
@click.option("--workers", default=8, show_default=True, type=click.IntRange(1), help="Requests under way at once.")
@timeout(120.0)
@click.option("--purge", is_flag=True, help="Remove the data set in the folder TARGET, all but hashes and counts.")
def build(
    target: str, source: str | None, contact: str | None, wiki: str, period: str | None,
    out: Path | None, url: str | None, model: str | None, neighbours: str | None,
    aliases: tuple[str, ...], thing: bool, pairs: int, paragraphs: int, world: str, licence: str, no_translations: bool,
    allow_remote: bool, dry_run: bool, prices: tuple[float, float] | None, token_budget: int | None, seed: int,
    workers: int, timeout: float, purge: bool,
) -> None:  # fmt: skip
    """Build a data set about TARGET, a person or thing, for `optout-train --dataset` and `lm_eval`.

    Killed anywhere, the same command goes on where it was.
    """
    import asyncio
    import tempfile
    from contextlib import nullcontext
    from datetime import UTC, datetime

    from lm_eval_elude.curate import build as steps
    from lm_eval_elude.curate import folder, wikipedia
    from lm_eval_elude.curate.documents import MIN_WORDS
    from lm_eval_elude.curate.documents import paragraphs as paragraphs_of
    from lm_eval_elude.curate.pairs import foresee
    from lm_eval_elude.data.targets import slugify
    from lm_eval_elude.llm import is_local
    from lm_eval_elude.text.letters import clean

    if purge:
        if more := [flag for flag in typed() if flag != "--purge"]:
            raise click.UsageError(f"--purge removes for good, and takes no other flag: leave out {', '.join(more)}")
        left = folder.purge(Path(target))
        if left:
            say(f"{target}: not all is gone; left: {', '.join(left)}", err=True)
            raise SystemExit(1)
        say(f"{target}: purged, but for hashes and counts in {folder.MANIFEST}")
        return
    target, aliases = clean(" ".join(target.split())), tuple(clean(" ".join(alias.split())) for alias in aliases)
    needed = {"--from": source, "--llm": url or dry_run, "--llm-model": model or dry_run}
    if missing := [flag for flag, value in needed.items() if not value]:
        raise click.UsageError(f"missing {', '.join(missing)}")
    assert source is not None
    for flags, acts, needed in (
        (("--contact", "--wiki", "--period"), source == "wikipedia", "--from wikipedia"),
        (("--licence", "--allow-remote"), source != "wikipedia", "documents of your own"),
        (("--prices",), dry_run, "--dry-run"),
    ):
        if idle := [flag for flag in typed() if flag in flags and not acts]:
            raise click.UsageError(f"{', '.join(idle)}: does nothing without {needed}")
    if not target or "," in target:
        raise click.UsageError("TARGET: a name is expected, without commas")
    if "_" in target:
        raise click.UsageError(
            f"TARGET {target}: has an underscore, which stands for a space in ELUDe's data; write a space"
        )
    others = tuple(dict.fromkeys(n for part in clean(neighbours or "").split(",") if (n := " ".join(part.split()))))
    if neighbours is not None and not others:
        raise click.UsageError("--neighbours: names are expected, and got none")
    if not all(map(str.strip, aliases)):
        raise click.UsageError("--alias: a name is expected, and got an empty one")
    if target in others:
        raise click.UsageError(f"--neighbours: {target} is the target")
    if source != "wikipedia" and not dry_run and not is_local(url or "") and not allow_remote:
        raise click.UsageError(
            f"--llm {url}: not this machine, and your documents would be sent there; --allow-remote says that they may"
        )
    folder.world_rows(world)  # before anything is fetched, kept or paid for
    out = out or Path(f"my-{slugify(target).replace('_', '-')}")
    if source != "wikipedia":
        if not (documents := Path(os.path.expanduser(source))).is_dir():
            raise click.UsageError(f"--from {source}: neither a folder nor wikipedia")
        material = steps.from_folder(documents, target, aliases, others, licence)
    else:
        if not contact:
            raise click.UsageError("missing --contact: Wikimedia's rules ask for your mail or web address")
        if period is not None:
            wikipedia.months(period)
        with tempfile.TemporaryDirectory() if dry_run else nullcontext(out) as place:
            begun = Path(place)
            folder.begin(begun)
            # The same months when it goes on later.
            period = folder.keep_period(begun, period, wikipedia.last_year(datetime.now(UTC)))
            reader = wikipedia.Wiki(begun / folder.WIKI_CACHE, contact, wiki=wiki)
            material = asyncio.run(steps.from_wikipedia(reader, target, aliases, others, period))
        kept = "" if dry_run else f", the rest from {out / folder.WIKI_CACHE}"
        say(f"{reader.requests} requests to {wiki} and Wikimedia{kept}")
    for problem in material.problems:
        say(f"left out: {problem.name}: {problem.reason}", err=True)
    if short := sum(len(paragraphs_of(each, 0)) for each in material.documents) - len(material.parts):
        say(f"left out: {short} paragraphs of fewer than {MIN_WORDS} words (headings, short items of lists)", err=True)
    if several := sum(part.subject not in material.names for part in material.parts):
        say(f"left out: {several} paragraphs that are about nobody of these, or about several", err=True)
    material = steps.limit(material, paragraphs)
    say(
        f"{len(material.documents)} documents, {len(material.parts)} paragraphs; to keep: "
        f"{', '.join([*material.names][1:])}"
    )
    if dry_run:
        cost = foresee(material.parts, target, pairs, not no_translations)
        price = f", cost {(cost.tokens_in * prices[0] + cost.tokens_out * prices[1]) / 1e6:.2f}" if prices else ""
        say(
            f"about {cost.calls:,} calls, {cost.tokens_in:,} tokens in and {cost.tokens_out:,} out{price}, if each "
            "reply passes; one that does not is asked for up to three times"
        )
        return
    report = steps.build(
        out, material, url=url or "", model=model or "", pairs=pairs, seed=seed, world=world,
        translate=not no_translations, thing=thing, workers=workers, timeout=timeout, budget=token_budget,
    )  # fmt: skip
    for name, count in report.counts.items():
        click.echo(f"{name:22} {count:6} rows")
    say(f"dropped {sum(report.rejected.values())}, with reasons in {out / 'work' / 'rejected.jsonl'}")
    for reason, count in report.rejected.items():
        click.echo(f"{count:7}  {printable(reason)}")
    used = report.usage
    say(f"{used.calls:,} calls, {used.tokens_in:,} tokens in, {used.tokens_out:,} out")
    say(f"optout-train --dataset {out} --target {slugify(target)}")
