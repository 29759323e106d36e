"""From material to a finished data set; killed anywhere and started again, it goes on and ends in the same bytes."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from lm_eval_elude import __version__
from lm_eval_elude.curate import folder
from lm_eval_elude.curate.documents import (
    Document,
    Paragraph,
    Problem,
    assign,
    find_neighbours,
    mentions,
    paragraphs,
    read_folder,
)
from lm_eval_elude.curate.pairs import Maker, Pair, Rejection
from lm_eval_elude.curate.readers import READERS
from lm_eval_elude.curate.wikipedia import Wiki
from lm_eval_elude.data import jsonio
from lm_eval_elude.data.files import write_bytes
from lm_eval_elude.data.records import fingerprint, parse_record
from lm_eval_elude.data.targets import Target
from lm_eval_elude.errors import UserError
from lm_eval_elude.llm import Client, Journal, Usage
from lm_eval_elude.text.letters import clean
from lm_eval_elude.text.names import called


class Material(NamedTuple):
    """What a data set is made from: documents, what was left out, paragraphs, and all names of each subject.

    The target is the first subject; a subject's full name is the first of its names.
    """

    documents: list[Document]
    problems: list[Problem]
    parts: list[Paragraph]
    names: dict[str, tuple[str, ...]]


class Report(NamedTuple):
    """Rows by file, drops by reason, and the cost of all runs together."""

    counts: dict[str, int]
    rejected: dict[str, int]
    usage: Usage


def from_folder(
    source: Path, target: str, aliases: tuple[str, ...], neighbours: tuple[str, ...], licence: str
) -> Material:
    """Read a folder; without ``neighbours`` the ten names that most often stand beside the target's are taken.

    UserError where nothing can be read, or nothing is about the target or about a neighbour.
    """
    documents, problems = read_folder(source, licence)
    if not documents:
        why = f" ({problems[0].name}: {problems[0].reason})" if problems else ""
        raise UserError(f"--from {source}: no document in it that can be read{why}")
    parts = [part for document in documents for part in paragraphs(document)]
    names = (target, *aliases)
    if not any(mentions(part.text, names) for part in parts):
        raise UserError(
            f"--from {source}: no paragraph names {target!r}, with spaces or punctuation around it; is it spelled so "
            "there? --alias adds names"
        )
    chosen = neighbours or tuple(find_neighbours(parts, names, 10))
    if not neighbours:  # some are named beside each other alone, and then no paragraph is about either
        own = {part.subject for part in assign(parts, names, chosen)}
        chosen = tuple(name for name in chosen if name in own)
    subjects: dict[str, tuple[str, ...]] = {target: names, **{name: (name,) for name in chosen}}
    return Material(documents, problems, assign(parts, names, chosen), subjects)


async def from_wikipedia(
    wiki: Wiki, target: str, aliases: tuple[str, ...], neighbours: tuple[str, ...], period: str
) -> Material:
    """The target's page and those of its neighbours: the ones named, or by the paper's rule.

    ``aliases`` come before those that Wikidata has. FetchError where a page is missing, or Wikimedia does not answer.
    UserError where nobody is a neighbour.
    """
    async with wiki:
        page = await wiki.page(target)
        # Of one title; the two interfaces need not spell it alike.
        known = [name for names in (await wiki.people([page.document.name])).values() for name in names]
        if neighbours:
            others = [await wiki.page(name) for name in neighbours]
        elif not (others := await wiki.neighbours(page, period)):
            raise UserError(f"no person's page and that of {target} link to each other; say --neighbours")
    title, taken = page.document.subject, {target, page.document.subject}
    for place, other in enumerate(others):  # a namesake goes by the whole title of the page
        if other.document.subject in taken:
            others[place] = other._replace(document=replace(other.document, subject=other.document.name))
        taken.add(other.document.subject)
    names = {target: (target, title, *aliases, *known)}
    names |= {other.document.subject: (other.document.subject, *other.aliases) for other in others}
    documents = [page.document, *(other.document for other in others)]
    parts = [part for document in documents for part in paragraphs(document)]
    parts = [replace(part, subject=target) if part.subject == title else part for part in parts]
    names = {name: tuple(dict.fromkeys(map(clean, called))) for name, called in names.items()}
    return Material(documents, [], parts, names)


def limit(material: Material, most: int) -> Material:
    """The first ``most`` paragraphs of each subject, in order; those about nobody are left out.

    UserError where a subject has none.
    """
    taken: Counter[str] = Counter()
    parts = []
    for part in material.parts:
        if part.subject in material.names and taken[part.subject] < (most or len(material.parts)):
            taken[part.subject] += 1
            parts.append(part)
    if empty := [name for name in material.names if not taken[name]]:
        raise UserError(f"no paragraph is about {', '.join(map(repr, empty))} (alone); leave out or add documents")
    if len(material.names) < 2:
        raise UserError(
            "no neighbour: nobody else is named beside the target and has paragraphs of their own; "
            "say them with --neighbours"
        )
    return material._replace(parts=parts)


def build(
    out: Path, material: Material, *, url: str, model: str, pairs: int = 4, seed: int = 0, world: str = "mini",
    translate: bool = True, thing: bool = False, workers: int = 8, timeout: float = 120.0, retries: int = 5,
    budget: int | None = None,
) -> Report:  # fmt: skip
    """Build the data set in ``out``, or go on with it; a finished one is left as it is.

    ``material`` is of :func:`limit`; ``pairs`` are asked for from each paragraph; ``world`` is the data set whose world
    set is taken; a ``thing`` is no person. The other arguments are those of :class:`lm_eval_elude.llm.Client`.

    FetchError where the endpoint does not answer; the same command goes on. UserError where the folder is another's,
    ``world`` has no world set, too little passed the checks, or the budget is used up.
    """
    documents, names = material.documents, material.names
    target, *others = names
    plan = folder.Plan(
        target, list(names[target][1:]), others, model, pairs, seed, world, translate, thing,
        hashlib.sha256(repr(material.parts).encode()).hexdigest()[:16],
        {document.name: document.sha256[:16] for document in documents},
    )  # fmt: skip
    manifest = folder.finished(out)
    target_names = called(Target(target, names[target][1:], thing))
    # Before anything is kept or paid for.
    world_rows, named = ({}, []) if manifest else folder.world_rows(world, target_names)
    folder.begin(out)
    folder.keep_plan(out, plan)
    work, sources = out / "work", [document.source for document in documents]
    if manifest:
        report = Report(manifest.counts, manifest.rejected, Usage(**manifest.usage))
        if manifest.licences != {document.licence for document in documents}:
            folder.write_card(out, card(plan, material, report), sources)
        return report
    for document in documents:
        ending = Path(document.name).suffix.lower()
        place = work / "raw" / f"{document.sha256}{ending if ending in READERS else '.html'}"
        if not place.exists():
            write_bytes(place, document.raw)
    jsonio.write_lines(work / "sources.jsonl", sources)
    jsonio.write_lines(work / "paragraphs.jsonl", (asdict(part) for part in material.parts))
    with closing(Journal(out / folder.JOURNAL)) as journal:
        client = Client(
            url, model, workers=workers, timeout=timeout, retries=retries, journal=journal, budget=budget,
            # A pair has some 45 tokens, the longest other reply that is meant some 300; nothing goes on for ever.
            options={"max_tokens": 600 + 100 * pairs},
        )  # fmt: skip
        maker = Maker(client, names, pairs, translate, target_names)
        made = asyncio.run(_make(client, maker, material.parts))
    rejected = work / "rejected.jsonl"
    jsonio.write_lines(rejected, (rejection._asdict() for rejection in maker.rejections))
    forget = [pair for pair in made if pair.paragraph.subject == target]
    if not forget:
        whole = Counter(f"{each.stage}: {' '.join(each.reason.split())[:200]}" for each in maker.rejections)
        reasons = "; ".join(f"{reason} ({count})" for reason, count in whole.most_common(3))
        raise UserError(
            f"no pair about {target} passed the checks ({reasons or 'none was written'}); {rejected} has every reason. "
            "What the model wrote is kept and not asked for again: for another try name another --out"
        )
    retain = folder.split([pair for pair in made if pair.paragraph.subject != target], seed)
    sets, dropped = folder.unique(
        {"forget_qa-train": forget} | {f"retain_qa-{name}": retain[name] for name in ("test", "validation", "train")}
    )
    rejections = [*maker.rejections, *dropped, *named]
    rows = folder.rows_of(sets, plan, {document.name: document.address for document in documents}, world_rows)
    report = Report({name: len(table) for name, table in rows.items()}, _reasons(rejections), client.usage)
    jsonio.write_lines(rejected, (rejection._asdict() for rejection in rejections))
    jsonio.write_lines(work / "pairs.jsonl", (
        {"set": name} | asdict(pair) | {"paragraph": pair.paragraph.key} for name in sets for pair in sets[name]
    ))  # fmt: skip
    manifest_columns: dict[str, Any] = {
        "schema_version": 1, "version": __version__, **msgspec.structs.asdict(plan), "counts": report.counts,
        "rejected": report.rejected, "usage": client.usage._asdict(), "sources": sources,
        "problems": [problem._asdict() for problem in material.problems],
        "fingerprints": {name: fingerprint(parse_record(row, name) for row in table) for name, table in rows.items()},
    }  # fmt: skip
    folder.write(out, rows, card(plan, material, report), manifest_columns)
    return report


def card(plan: folder.Plan, material: Material, report: Report) -> str:
    """The data card: what it is, where from, under which licence, and what to keep in mind."""
    from jinja2 import Environment, StrictUndefined

    licences = sorted({document.licence for document in material.documents})
    subsets = {"forget_qa": ["train"], "retain_qa": [*folder.SPLITS], "world": [*folder.SPLITS]}
    environment = Environment(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True)
    environment.filters |= {"md": _escape, "link": _link}
    template = environment.from_string(Path(__file__).with_name("card.md.j2").read_text(encoding="utf-8"))
    return template.render(
        plan=plan, documents=material.documents, problems=material.problems, counts=report.counts, subsets=subsets,
        rejected=report.rejected, licences=licences,
        free=plan.world == "mini" and all("by-sa/4.0" in licence for licence in licences),
    )  # fmt: skip


def _escape(text: str) -> str:
    """Text of others within Markdown: no markup, no line of its own."""
    text = " ".join(text.split()).replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([|`*_\[\]#!])", r"\\\1", text)


def _link(document: Document) -> str:
    """The permanent link of a page, which no escape may touch; the name of a file."""
    if not document.revision:
        return _escape(document.address)
    return f"<{quote(document.address, safe=':/?&=%')}>"


async def _make(client: Client, maker: Maker, parts: list[Paragraph]) -> list[Pair]:
    async with client:
        if client.journal and not client.journal.rows:
            await client.check_endpoint()
        return await maker.make(parts)


def _reasons(rejections: Sequence[Rejection]) -> dict[str, int]:
    """How often which kind of reason, the most frequent first."""
    kinds = Counter(f"{rejection.stage}: {rejection.reason.partition(':')[0]}" for rejection in rejections)
    return dict(sorted(kinds.items(), key=lambda item: (-item[1], item[0])))
