"""Pairs that ask for the same fact.

Question and answer are compared together (cosine of character n-grams), and near ones count as duplicates only where
the numbers and names of their answers agree: "when" and "where was he born" are as alike as two ways to ask either.
Measured on ELUDe-mini's forget records: no two of its 5,175 pairs of different facts are taken for duplicates, and 40 %
of its paraphrases, which share as few words as their authors could manage, are found.
"""

from __future__ import annotations

from collections.abc import Sequence

from lm_eval_elude.attacks.text import words
from lm_eval_elude.build.checks import facts

NEAR = 0.3  # cosine from which facts decide
CERTAIN = 0.6  # where neither answer has a number or a name


def similarities(texts: Sequence[str]) -> list[list[float]]:
    """Cosine similarity of every text with every other."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    rows = TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5), sublinear_tf=True).fit_transform(texts)
    return (rows @ rows.T).toarray().tolist()


def duplicates(pairs: Sequence[tuple[str, str]], subject: str) -> dict[int, int]:
    """Which (question, answer) of one subject to drop: index -> the earlier, kept one that says the same."""
    if len(pairs) < 2:
        return {}
    told = [facts(answer) - words(subject) for _, answer in pairs]
    alike = similarities([f"{question} {answer}" for question, answer in pairs])
    dropped: dict[int, int] = {}
    for late in range(len(pairs)):
        for early in range(late):
            one, other = told[late], told[early]
            agree = (one <= other or other <= one) if one and other else not (one or other)
            if early not in dropped and agree and alike[late][early] >= (NEAR if one else CERTAIN):
                dropped[late] = early
                break
    return dropped
