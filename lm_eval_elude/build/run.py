"""From material to a finished data set; killed anywhere and started again, it goes on and ends in the same bytes."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_elude import __version__
from lm_eval_elude.build import dataset
from lm_eval_elude.build.documents import (
    READERS,
    Document,
    Paragraph,
    Problem,
    assign,
    mentions,
    neighbours_beside,
    paragraphs,
    read_folder,
)
from lm_eval_elude.build.pairs import Estimate, Maker, Rejection, Subject, foresee
from lm_eval_elude.build.wikipedia import Page, Person, Wiki
from lm_eval_elude.core.records import DataError, fingerprint, parse_record
from lm_eval_elude.llm import Client, Journal, Usage


class Material(NamedTuple):
    """What a data set is made from: documents with their raw bytes, what was left out, and who is who."""

    documents: list[Document]
    raw: dict[str, bytes]
    problems: list[Problem]
    parts: list[Paragraph]
    subjects: dict[str, Subject]


class Report(NamedTuple):
    """Rows by file, drops by reason, and the cost of all runs together."""

    counts: dict[str, int]
    rejected: dict[str, int]
    usage: Usage


def from_folder(
    folder: Path, target: str, aliases: tuple[str, ...], neighbours: tuple[str, ...], licence: str
) -> Material:
    """Read a folder; without ``neighbours`` the ten names that most often stand beside the target's are taken.

    Raises:
        DataError: nothing can be read, or nothing is about the target or about a neighbour.
    """
    documents, problems, raw = read_folder(folder, licence)
    if not documents:
        why = f" ({problems[0].name}: {problems[0].reason})" if problems else ""
        raise DataError(f"--from {folder}: no document in it that can be read{why}")
    parts = [part for document in documents for part in paragraphs(document)]
    names = (target, *aliases)
    if not any(mentions(part.text, names) for part in parts):
        raise DataError(f"--from {folder}: no paragraph names {target!r}; is it spelled so there? --alias adds names")
    chosen = neighbours or tuple(neighbours_beside(parts, names, 10))
    subjects = {target: Subject(names, target)} | {name: Subject((name,), target) for name in chosen}
    return Material(documents, raw, problems, assign(parts, names, chosen), subjects)


def from_pages(target: str, aliases: tuple[str, ...], pages: Sequence[tuple[Person, Page]]) -> Material:
    """Material of Wikipedia pages, the target's first; ``aliases`` come before those that Wikidata has."""
    subjects: dict[str, Subject] = {}
    for number, (person, page) in enumerate(pages):
        name = page.document.subject if number else target
        more = (page.document.subject, *(aliases if not number else ()), *person.aliases)
        subjects[name] = Subject(tuple(dict.fromkeys((name, *more))), target)
    documents = [page.document for _, page in pages]
    parts = [part for document in documents for part in paragraphs(document)]
    own = documents[0].subject
    parts = [part._replace(subject=target) if part.subject == own else part for part in parts]
    return Material(documents, {page.document.name: page.raw for _, page in pages}, [], parts, subjects)


async def read_wikipedia(
    wiki: Wiki, target: str, neighbours: tuple[str, ...], period: str
) -> list[tuple[Person, Page]]:
    """The target's page and those of its neighbours: the ones named, or by the paper's rule.

    Raises:
        WikiError: a page is missing, or Wikimedia does not answer.
        DataError: nobody is a neighbour.
    """
    async with wiki:
        page = await wiki.page(target)
        known = await wiki.people([page.document.name])
        own = known[0] if known else Person(page.document.name, ())
        if neighbours:
            others = [(Person(name, ()), await wiki.page(name)) for name in neighbours]
        elif not (others := await wiki.neighbours(page, period)):
            raise DataError(f"no person's page and that of {target} link to each other; say --neighbours")
    return [(own, page), *others]


def limit(material: Material, most: int) -> Material:
    """The first ``most`` paragraphs of each subject, in order; those about nobody are left out.

    Raises:
        DataError: a subject has none.
    """
    had: Counter[str] = Counter()
    parts = []
    for part in material.parts:
        if part.subject in material.subjects and had[part.subject] < (most or len(material.parts)):
            had[part.subject] += 1
            parts.append(part)
    if empty := [name for name in material.subjects if not had[name]]:
        raise DataError(f"no paragraph is about {', '.join(map(repr, empty))} (alone); leave out or add documents")
    if len(material.subjects) < 2:
        raise DataError("no neighbour: nobody else is named beside the target and has paragraphs of their own; "
                        "say them with --neighbours")  # fmt: skip
    return material._replace(parts=parts)


def build(
    out: Path, material: Material, *, url: str, model: str, pairs: int = 4, seed: int = 0, world: str = "mini",
    translate: bool = True, thing: bool = False, workers: int = 8, timeout: float = 120.0, retries: int = 5,
    budget: int | None = None,
) -> Report:  # fmt: skip
    """Build a data set, or go on with it.

    Args:
        out: its folder.
        material: of :func:`limit`.
        url, model, workers, timeout, retries, budget: as of :class:`lm_eval_elude.llm.Client`.
        pairs: asked for from each paragraph.
        seed: of the splits.
        world: the data set whose world set is taken.
        translate: whether the target's questions are translated.
        thing: whether the target is no person.

    Raises:
        DataError: the folder is another's, or too little passed the checks.
        EndpointError: the endpoint does not answer, or the budget is used up; the same command goes on.
    """
    target, *others = material.subjects
    plan = {
        "target": target, "aliases": list(material.subjects[target].names[1:]), "neighbours": others, "model": model,
        "pairs": pairs, "seed": seed, "world": world, "translate": translate, "thing": thing,
        "paragraphs": hashlib.sha256(repr(material.parts).encode()).hexdigest()[:16],
        "documents": {document.name: document.sha256[:16] for document in material.documents},
    }  # fmt: skip
    dataset.open_folder(out, plan)
    work = out / "work"
    for document in material.documents:
        ending = Path(document.name).suffix.lower()
        place = work / "raw" / f"{document.sha256}{ending if ending in READERS else '.html'}"
        if not place.exists():
            place.write_bytes(material.raw[document.name])
    sources = [{k: v for k, v in asdict(document).items() if k != "text"} for document in material.documents]
    dataset.write_lines(work / "sources.jsonl", sources)
    dataset.write_lines(work / "paragraphs.jsonl", (part._asdict() for part in material.parts))
    journal = Journal(work / "journal.jsonl")
    try:
        client = Client(
            url, model, workers=workers, timeout=timeout, retries=retries, journal=journal, budget=budget,
            # A pair has some 45 tokens, the longest other reply that is meant some 300; nothing goes on for ever.
            options={"max_tokens": 600 + 100 * pairs},
        )  # fmt: skip
        maker = Maker(client, material.subjects, pairs, translate)
        made = asyncio.run(_make(client, maker, material.parts))
    finally:
        journal.close()
    forget = [pair for pair in made if pair.paragraph.subject == target]
    if not forget:
        raise DataError(f"no pair about {target} passed the checks ({_most(_kinds(maker.rejections))})")
    retain = dataset.split([pair for pair in made if pair.paragraph.subject != target], seed)
    sets, dropped = dataset.unique(
        {"forget_qa-train": forget} | {f"retain_qa-{name}": retain[name] for name in ("test", "validation", "train")}
    )
    rejections = [*maker.rejections, *dropped]
    addresses = {document.name: document.address for document in material.documents}
    rows = dataset.rows_of(sets, plan, addresses)
    counts = {name: len(table) for name, table in rows.items()}
    kinds = _kinds(rejections)
    dataset.write_lines(work / "rejected.jsonl", (rejection._asdict() for rejection in rejections))
    dataset.write_lines(work / "pairs.jsonl", (
        {"set": name} | asdict(pair) | {"paragraph": pair.paragraph.key} for name in sets for pair in sets[name]
    ))  # fmt: skip
    manifest: dict[str, Any] = {
        "schema_version": 1, "version": __version__, **plan, "counts": counts, "rejected": kinds,
        "usage": client.usage._asdict(), "sources": sources,
        "problems": [problem._asdict() for problem in material.problems],
        "fingerprints": {name: fingerprint(parse_record(row, name) for row in table) for name, table in rows.items()},
    }  # fmt: skip
    text = dataset.card(plan, material.documents, material.problems, counts, kinds)
    dataset.write(out, rows, text, manifest)
    return Report(counts, kinds, client.usage)


def cost(material: Material, pairs: int, translate: bool) -> Estimate:
    """What :func:`build` will ask for at most."""
    return foresee(material.parts, material.subjects, pairs, translate)


async def _make(client: Client, maker: Maker, parts: list[Paragraph]) -> list:
    async with client:
        if client.journal and not client.journal.rows:
            await client.knock()
        return await maker.make(parts)


def _kinds(rejections: list[Rejection]) -> dict[str, int]:
    """How often which kind of reason, the most frequent first."""
    kinds = Counter(f"{rejection.stage}: {rejection.reason.partition(':')[0]}" for rejection in rejections)
    return dict(sorted(kinds.items(), key=lambda item: (-item[1], item[0])))


def _most(kinds: dict[str, int]) -> str:
    return "; ".join(f"{kind} ({count})" for kind, count in [*kinds.items()][:3]) or "none was written"
