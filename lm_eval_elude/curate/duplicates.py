"""Pairs that ask for the same fact.

Question and answer are compared together (cosine of character n-grams), and near ones count as duplicates only where
the numbers and names of their answers agree: "when" and "where was he born" are as alike as two ways to ask either.
Measured on ELUDe-mini's forget records: no two of its 5,175 pairs of different facts are taken for duplicates, and 40 %
of its paraphrases, which share as few words as their authors could manage, are found.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lm_eval_elude.curate.checks import facts
from lm_eval_elude.text.words import words

NEAR = 0.3  # cosine from which facts decide
CERTAIN = 0.6  # where neither answer has a number or a name
_BLOCK = 512  # pairs that are compared with all earlier ones at once


def question_key(question: str) -> str:
    """What two questions share that differ in case, punctuation and spaces only."""
    return " ".join(re.findall(r"\w+", question.casefold()))


def duplicates(pairs: Sequence[tuple[str, str]], subjects: Sequence[str]) -> dict[int, int]:
    """Which (question, answer) to drop: index -> the earlier, kept one of the same subject that says the same."""
    dropped: dict[int, int] = {}
    for subject in dict.fromkeys(subjects):
        places = [place for place, name in enumerate(subjects) if name == subject]
        repeated = _repeated([pairs[place] for place in places], words(subject)) if len(places) > 1 else {}
        dropped |= {places[late]: places[early] for late, early in repeated.items()}
    return dropped


def _repeated(pairs: Sequence[tuple[str, str]], name: frozenset[str]) -> dict[int, int]:
    """:func:`duplicates` of one subject, whose name is no fact."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    answered = [facts(answer) - name for _, answer in pairs]
    texts = [f"{question} {answer}" for question, answer in pairs]
    rows = TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5), sublinear_tf=True).fit_transform(texts)
    dropped: dict[int, int] = {}
    for late in range(len(pairs)):
        if late % _BLOCK == 0:  # the cosines of all pairs with all others would take gigabytes
            alike = (rows[late : late + _BLOCK] @ rows[: late + _BLOCK].T).toarray()
        cosines = alike[late % _BLOCK, :late]
        for early in (cosines >= NEAR).nonzero()[0].tolist():
            here, there = answered[late], answered[early]
            agree = (here <= there or there <= here) if here and there else not (here or there)
            if early not in dropped and agree and cosines[early] >= (NEAR if here else CERTAIN):
                dropped[late] = early
                break
    return dropped
