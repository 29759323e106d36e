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


def duplicates(pairs: Sequence[tuple[str, str]], subject: str) -> dict[int, int]:
    """Which (question, answer) of one subject to drop: index -> the earlier, kept one that says the same."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    if len(pairs) < 2:
        return {}
    told = [facts(answer) - words(subject) for _, answer in pairs]
    texts = [f"{question} {answer}" for question, answer in pairs]
    rows = TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5), sublinear_tf=True).fit_transform(texts)
    dropped: dict[int, int] = {}
    for late in range(len(pairs)):
        if late % _BLOCK == 0:  # the cosines of all pairs with all others would take gigabytes
            alike = (rows[late : late + _BLOCK] @ rows[: late + _BLOCK].T).toarray()
        cosines = alike[late % _BLOCK, :late]
        for early in (cosines >= NEAR).nonzero()[0].tolist():
            one, other = told[late], told[early]
            agree = (one <= other or other <= one) if one and other else not (one or other)
            if early not in dropped and agree and cosines[early] >= (NEAR if one else CERTAIN):
                dropped[late] = early
                break
    return dropped
