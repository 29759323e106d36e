"""What log-probabilities of given answers say (paper section 5.2, with the choices that made its tables)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

TruthRatioMean = Literal["geometric", "arithmetic"]


class AnswerScore(NamedTuple):
    """Sum of an answer's token log-probabilities (nats) and the number of tokens."""

    log_prob: float
    tokens: int

    @property
    def mean(self) -> float:
        """Mean log-probability of a token; NaN for an answer without tokens."""
        return self.log_prob / self.tokens if self.tokens > 0 else math.nan


def probability(answer: AnswerScore) -> float:
    """Length-normalised probability P(a|q)^(1/|a|) = exp(mean log-probability of the answer's tokens), in [0, 1]."""
    return math.exp(min(0.0, answer.mean)) if not math.isnan(answer.mean) else math.nan


def choice_probability(answer: AnswerScore, wrong: Sequence[AnswerScore]) -> float:
    """The world set's probability: the answer's share among itself and the wrong answers, in [0, 1].

    Computed relative to the likeliest, so that a collapsed model's underflow does not turn it into 0 / 0.
    """
    means = [answer.mean, *(w.mean for w in wrong)]
    top = max(means)
    if math.isnan(top) or math.isinf(top):
        return math.nan
    weights = [math.exp(m - top) for m in means]
    return weights[0] / sum(weights)


def log_truth_ratio(paraphrase: AnswerScore, wrong: Sequence[AnswerScore], mean: TruthRatioMean = "geometric") -> float:
    """log R (nats per token): how likely the wrong answers are against the paraphrased right one.

    The paper's tables average the wrong answers' probabilities geometrically, its text arithmetically.
    """
    means = [w.mean for w in wrong]
    if mean == "geometric":
        numerator = sum(means) / len(means)
    else:
        top = max(means)
        shares = [math.exp(m - top) for m in means] if math.isfinite(top) else [1.0]
        numerator = top + math.log(sum(shares) / len(shares))
    return numerator - paraphrase.mean


def truth_ratio(log_ratio: float, forgotten: bool) -> float:
    """min(R, 1/R) on what is forgotten (1: right and wrong answers equally likely), max(0, 1 - R) on what is kept."""
    if forgotten:
        return math.exp(-abs(log_ratio))
    return log_ratio if math.isnan(log_ratio) else max(0.0, -math.expm1(min(log_ratio, 1.0)))


def is_likeliest(right: float, wrong: Sequence[float]) -> float:
    """Multiple choice: 1 where the right option scores above each wrong one, else 0; NaN where a score is NaN."""
    return math.nan if math.isnan(right + sum(wrong)) else float(all(right > other for other in wrong))


def exact_memorization(greedy: Sequence[bool]) -> float:
    """Share of an answer's tokens that are the greedy choice after the true tokens before them."""
    return sum(greedy) / len(greedy) if greedy else math.nan


def extraction_strength(greedy: Sequence[bool]) -> float:
    """1 - k / T for the smallest k from which on all of the T tokens are the greedy choice (Carlini et al. 2021)."""
    matching = next((i for i, same in enumerate(reversed(greedy)) if not same), len(greedy))
    return matching / len(greedy) if greedy else math.nan
