"""What a text is made of: its words, and those that tell an answer from its wrong ones."""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from lm_eval_elude.data.records import QARecord

ENGLISH: dict[str, Any] = tomllib.loads(Path(__file__).with_name("english.toml").read_text(encoding="utf-8"))
STOP = frozenset(ENGLISH["stop"].split())
APOSTROPHES = "'\u2019"
WORD = re.compile(rf"[^\W_]+(?:[.,{APOSTROPHES}][^\W_]+)*")  # an underscore is a mark of emphasis
_PIECE = re.compile(rf"{WORD.pattern}|[\W_]")


@lru_cache(maxsize=16384)
def words(text: str) -> frozenset[str]:
    """The words and numbers of a text, case, accents and possessive endings folded away."""
    folded = "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))
    return frozenset(re.sub(rf"[{APOSTROPHES}]s?$", "", word) for word in WORD.findall(folded))


def telling(answer: str, wrong: Sequence[str], question: str) -> frozenset[str]:
    """The words of an answer that neither the question nor all of its wrong versions have."""
    shared = frozenset.intersection(*map(words, wrong)) if wrong else frozenset()
    return words(answer) - shared - words(question) - STOP


@lru_cache(maxsize=4096)
def fact_tokens(record: QARecord) -> frozenset[str]:
    """Words that give the answer away: those of the paraphrase that not all its wrong versions share.

    Words of the question are no secret. Where nothing is left, every other word of the answers counts.
    """
    return telling(record.paraphrased_answer, record.perturbed_answer, record.question) or telling(
        f"{record.answer} {record.paraphrased_answer}", (), record.question
    )


def fact_in(record: QARecord) -> tuple[str, str, str]:
    """The paraphrase in three parts: what all its wrong versions begin with, the fact, and what they all end with.

    The fact is "" where a version has nothing of its own.
    """
    versions = [_PIECE.findall(text) for text in (record.paraphrased_answer, *record.perturbed_answer)]
    start = _shared(versions)
    end = _shared([version[start:][::-1] for version in versions])
    true, *wrong = ["".join(version[start : len(version) - end]) for version in versions]
    if not true.strip() or not all(wrong):
        return record.paraphrased_answer, "", ""
    lead, fact, trail = true.partition(true.strip())
    pieces = versions[0]
    return "".join(pieces[:start]) + lead, fact, trail + "".join(pieces[len(pieces) - end :])


def _shared(versions: Sequence[Sequence[str]]) -> int:
    """How many pieces all versions begin with."""
    columns = enumerate(zip(*versions, strict=False))
    return next((i for i, column in columns if len(set(column)) > 1), min(map(len, versions)))
