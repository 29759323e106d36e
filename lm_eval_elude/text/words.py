"""What a text is made of: its words, and those that tell an answer from its wrong ones."""

from __future__ import annotations

import re
import tomllib
import unicodedata
from functools import lru_cache
from pathlib import Path
from typing import Any

from lm_eval_elude.data.records import QARecord

ENGLISH: dict[str, Any] = tomllib.loads(Path(__file__).with_name("english.toml").read_text(encoding="utf-8"))
STOP = frozenset(ENGLISH["stop"].split())
APOSTROPHES = "'\u2019"
WORD = re.compile(rf"\w+(?:[.,{APOSTROPHES}]\w+)*")


@lru_cache(maxsize=16384)
def words(text: str) -> frozenset[str]:
    """The words and numbers of a text, case, accents and possessive endings folded away."""
    folded = "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))
    return frozenset(re.sub(rf"[{APOSTROPHES}]s?$", "", word) for word in WORD.findall(folded))


@lru_cache(maxsize=4096)
def telling_words(record: QARecord) -> frozenset[str]:
    """Words that give the answer away: those of the paraphrase that not all its wrong versions share.

    Words of the question are no secret. Where nothing is left, every other word of the answers counts.
    """
    known = STOP | words(record.question)
    shared = frozenset.intersection(*map(words, record.perturbed_answer))
    return (words(record.paraphrased_answer) - shared - known) or (
        (words(record.answer) | words(record.paraphrased_answer)) - known
    )
