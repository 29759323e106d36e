"""A data set judged: mechanical checks on every row, diversity, and a page on which a person judges a sample of it.

The paper had a sample judged for relevance, diversity and factuality: 89, 90 and 99 % of the forget set and 96, 99.5
and 98.5 % of the retain set (:data:`PAPER`).
"""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from lm_eval_elude.curate.checks import pair_flaw, rewording_flaw
from lm_eval_elude.curate.documents import Paragraph
from lm_eval_elude.curate.duplicates import duplicates, question_key
from lm_eval_elude.curate.folder import AUDIT_MARK, AUDIT_PAGE, MANIFEST
from lm_eval_elude.data import jsonio
from lm_eval_elude.data.dataset import has, load_records
from lm_eval_elude.data.records import QARecord, fingerprint
from lm_eval_elude.data.rows import read_rows
from lm_eval_elude.data.targets import Target
from lm_eval_elude.errors import UserError
from lm_eval_elude.scoring.estimates import wilson
from lm_eval_elude.text.names import called
from lm_eval_elude.text.words import STOP, words

CRITERIA = ("relevance", "diversity", "factuality")
PAPER = {"forget": (0.89, 0.90, 0.99), "retain": (0.96, 0.995, 0.985)}


class Row(NamedTuple):
    """One record with its set and, where the data set was built here, its source paragraph."""

    subset: str
    split: str
    number: int
    record: QARecord
    paragraph: str = ""

    @property
    def where(self) -> str:
        return f"{self.subset}_qa-{self.split}, row {self.number}"


class Finding(NamedTuple):
    """What a rule has against a row."""

    where: str
    reason: str
    question: str


class Diversity(NamedTuple):
    """Of one set's questions and answers, as shares."""

    distinct: float  # different answers among all answers
    bigrams: float  # different pairs of words among all pairs of words in questions
    openings: float  # of the most frequent first two words of a question


def rows_of(source: str) -> list[Row]:
    """All forget and retain rows of a data set; paragraphs where `elude build` left them."""
    texts: dict[str, str] = {}
    if (file := Path(source) / "work" / "paragraphs.jsonl").is_file():
        for where, row in jsonio.lines(file):
            part = jsonio.check(row, Paragraph, where)
            texts[part.key] = part.text
    rows = []
    for subset, split in (("forget", "train"), *(("retain", part) for part in ("train", "validation", "test"))):
        if subset != "forget" and not has(source, subset, split):
            continue
        records = load_records(source, subset, split).records
        file = Path(source) / f"{subset}_qa-{split}.parquet"
        keys = [""] * len(records)
        if texts and file.is_file():
            keys = [str(row.get("paragraph")) for _, row in read_rows(file, columns=["paragraph"])]
        for number, (record, key) in enumerate(zip(records, keys, strict=True), 1):
            rows.append(Row(subset, split, number, record, texts.get(key, "")))
    return rows


def findings(rows: Sequence[Row], targets: Sequence[Target]) -> list[Finding]:
    """What the rules that a built pair has to pass have against rows, and questions that stand twice or in two sets."""
    by_name = {target.name: target for target in targets}
    flaws = []
    seen: dict[str, Row] = {}
    for row in rows:
        record, target = row.record, by_name.get(row.record.entity, Target(row.record.entity))
        subject = record.subject or (target.name if row.subset == "forget" else "")
        names, others = _names(record, target, subject), called(target)
        text = row.paragraph or f"{record.answer} {record.paraphrased_answer}"
        reasons = [pair_flaw(record.question, record.answer, text, subject or names[0], names, others)]
        if record.can_be_scored:
            reasons.append(
                rewording_flaw(
                    (record.question, record.answer), record.paraphrased_question or "?", record.paraphrased_answer,
                    record.perturbed_answer, text, names if record.paraphrased_question else ("?",),
                    others if row.subset == "retain" else (),
                )
            )  # fmt: skip
        other = seen.setdefault(f"{record.entity}/{question_key(record.question)}", row)
        if other is not row:
            reasons.append(f"a question that stands twice: also in {other.where}")
        flaws += [Finding(row.where, reason, record.question) for reason in reasons if reason]
    return flaws


def near_duplicates(rows: Sequence[Row]) -> list[Finding]:
    """Rows of one set and subject that ask for the same fact as an earlier one."""
    repeated = []
    for subset in PAPER:
        members = [row for row in rows if row.subset == subset]
        pairs = [(row.record.question, row.record.answer) for row in members]
        subjects = [f"{row.record.entity} {row.record.subject or row.record.source}" for row in members]
        for late, early in duplicates(pairs, subjects).items():
            reason = f"asks for the same as: {members[early].where}, {members[early].record.question!r}"
            repeated.append(Finding(members[late].where, reason, members[late].record.question))
    return repeated


def diversity(records: Sequence[QARecord]) -> Diversity:
    """How much the questions and answers of a set differ from each other."""
    tokens = [re.findall(r"\w+", record.question.casefold()) for record in records]
    pairs = [pair for each in tokens for pair in pairwise(each)]
    openings = Counter(tuple(each[:2]) for each in tokens)
    return Diversity(
        len({record.answer.casefold() for record in records}) / len(records),
        len(set(pairs)) / max(1, len(pairs)),
        max(openings.values()) / len(records),
    )


def page(source: str, rows: Sequence[Row], size: int, seed: int) -> str:
    """The page for judging a seeded sample of each set; everything is inside it, and it sends nothing anywhere."""
    sample = []
    for subset in PAPER:
        members = [row for row in rows if row.subset == subset]
        sample += random.Random(f"{seed}/{subset}").sample(members, min(size, len(members)))
    random.Random(seed).shuffle(sample)
    data = {
        "format": AUDIT_MARK, "dataset": Path(source).name, "fingerprint": fingerprint(row.record for row in rows),
        "seed": seed, "size": size, "criteria": CRITERIA,
        "items": [
            {
                "id": row.where, "set": row.subset, "about": row.record.subject or row.record.entity,
                "question": row.record.question, "answer": row.record.answer,
                "paragraph": row.paragraph, "source": row.record.source,
                "others": _alike(row, rows),
            }
            for row in sample
        ],
    }  # fmt: skip
    template = Path(__file__).with_name("audit.html").read_text(encoding="utf-8")
    # "<" cannot end the element it stands in.
    return template.replace("{{ data }}", json.dumps(data, ensure_ascii=False).replace("<", "\\u003c"))


class Judged(NamedTuple):
    """A criterion of a set: share of yes with its 95 % interval, items, Krippendorff's alpha (None for one judge)."""

    subset: str
    criterion: str
    share: float
    low: float
    high: float
    items: int
    alpha: float | None


def place_of_page(source: str) -> Path:
    """Where the page goes: into the folder (mode 0700) of a data set that was built here, which it holds texts of.

    UserError where something else has that name there.
    """
    place = Path(source) / AUDIT_PAGE if (Path(source) / MANIFEST).is_file() else Path(AUDIT_PAGE)
    if place.exists() and AUDIT_MARK.encode() not in place.read_bytes():
        raise UserError(f"{place}: not a page of `elude audit`; name another place with --out")
    return place


class _Judgement(msgspec.Struct):
    id: str
    set: Literal["forget", "retain"]
    judged: dict[str, bool]


class _Export(msgspec.Struct):
    """What the page exports."""

    format: Literal["elude-audit-1"]
    fingerprint: str
    seed: int
    size: int
    items: list[_Judgement]


def merge(paths: Sequence[Path]) -> list[Judged]:
    """What several persons judged, exported by the page.

    UserError where a file is none of the page's, or they are of different data or samples.
    """
    exports = [
        jsonio.check(jsonio.load(path), _Export, f"{path}: not what the page of `elude audit` exports")
        for path in paths
    ]
    for path, export in zip(paths, exports, strict=True):
        for name in ("fingerprint", "seed", "size"):
            if (value := getattr(export, name)) != (first := getattr(exports[0], name)):
                raise UserError(f"{path}: {name} is {value!r}, but {paths[0]} has {first!r}")
    sets: dict[str, str] = {}
    for path, export in zip(paths, exports, strict=True):
        for item in export.items:
            if sets.setdefault(item.id, item.set) != item.set:
                raise UserError(f"{path}: {item.id} is of set {item.set!r}, and of {sets[item.id]!r} elsewhere")
            if unknown := item.judged.keys() - {*CRITERIA}:
                raise UserError(f"{path}: {item.id} is judged by {min(unknown)!r}; criteria are {', '.join(CRITERIA)}")
        if len({item.id for item in export.items}) < len(export.items):
            raise UserError(f"{path}: an id stands twice in it; export it again")
    judges = [{item.id: item.judged for item in export.items} for export in exports]
    results = []
    for subset in PAPER:
        ids = sorted(item for item, where in sets.items() if where == subset)
        for criterion in CRITERIA:
            table = [[judge.get(item, {}).get(criterion) for item in ids] for judge in judges]
            given = [[value for value in column if value is not None] for column in zip(*table, strict=True)]
            means = [sum(values) / len(values) for values in given if values]
            if means:
                share = sum(means) / len(means)
                interval = wilson(share, math.sqrt(share * (1 - share) / len(means)), len(means))
                results.append(Judged(subset, criterion, share, *interval, len(means), alpha(table)))
    if not results:
        raise UserError(f"{', '.join(map(str, paths))}: nothing is judged yet")
    return results


def alpha(table: Sequence[Sequence[bool | None]]) -> float | None:
    """Krippendorff's alpha (nominal) of judges' rows over items' columns; None where nothing is judged twice."""
    import krippendorff
    import numpy as np

    data = np.array([[math.nan if value is None else float(value) for value in row] for row in table], dtype=float)
    twice = (~np.isnan(data)).sum(axis=0) >= 2
    if not twice.any():
        return None
    if len(np.unique(data[:, twice][~np.isnan(data[:, twice])])) < 2:
        return 1.0  # all agree on one value, where the formula is 0 / 0
    return float(krippendorff.alpha(reliability_data=data, level_of_measurement="nominal"))


def _names(record: QARecord, target: Target, subject: str) -> tuple[str, ...]:
    """What the subject is called; where nobody says who that is, every name in the question is taken for it."""
    if subject == target.name:
        return (target.name, *target.aliases, *(target.name.split() if not target.thing else ()))
    if subject:
        return (subject, *subject.split())
    capitalised = [
        word for word in re.findall(r"\w+(?:-\w+)*", record.question)[1:] if word[0].isupper() or word[0].isdigit()
    ]
    return tuple(capitalised) or (record.source or "?",)


def _alike(row: Row, rows: Sequence[Row]) -> list[str]:
    """The three questions of its set about the same that share most words with a row's, to judge diversity by."""
    asked = words(row.record.question) - STOP
    others = [
        other.record.question for other in rows
        if other.subset == row.subset and other.record.entity == row.record.entity and other is not row
        and other.record.subject == row.record.subject
    ]  # fmt: skip
    return sorted(others, key=lambda text: -len(asked & words(text)) / (len(asked | words(text)) or 1))[:3]
