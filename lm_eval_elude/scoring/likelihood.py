"""What an answer's log-probabilities say: probability, truth ratio, and the harmonic mean that FQ and RQ are.

The formulas are those of the paper's section 5.2 with the choices that made its tables (released evaluator):

    probability   P(a|q)^(1/|a|) = exp(mean log-probability of the answer text's tokens)
    world         P(a|q) / (P(a|q) + sum_i P(a_i|q)), each length-normalised, a_i the five perturbed answers
    truth ratio   R = geometric (or arithmetic) mean of the length-normalised P(a_i|q) over P(paraphrase|q)
                  reported as min(R, 1/R) on the forget set and max(0, 1 - R) on retain and world sets
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from lm_eval_elude.data.sets import SetSpec

TruthRatioMean = Literal["geometric", "arithmetic"]


class AnswerScore(NamedTuple):
    """Sum of an answer's token log-probabilities (nats) and the number of tokens."""

    log_prob: float
    tokens: int

    @property
    def mean(self) -> float:
        """Mean log-probability of a token; NaN for an answer without tokens."""
        return self.log_prob / self.tokens if self.tokens > 0 else math.nan

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood of a token (nats): what the membership attack looks at."""
        return -self.mean


def probability(answer: AnswerScore) -> float:
    """Length-normalised probability of an answer, in [0, 1]."""
    return math.exp(min(0.0, answer.mean)) if not math.isnan(answer.mean) else math.nan


def choice_probability(answer: AnswerScore, perturbed: Sequence[AnswerScore]) -> float:
    """The world set's probability: the answer's share among itself and the perturbed answers, in [0, 1].

    Computed relative to the likeliest, so that a collapsed model's underflow does not turn it into 0 / 0.
    """
    means = [answer.mean, *(p.mean for p in perturbed)]
    top = max(means)
    if math.isnan(top) or math.isinf(top):
        return math.nan
    weights = [math.exp(m - top) for m in means]
    return weights[0] / sum(weights)


def log_truth_ratio(paraphrase: AnswerScore, perturbed: Sequence[AnswerScore], mean: TruthRatioMean) -> float:
    """log R (nats per token): how likely the wrong answers are against the paraphrased right one; NaN where nothing
    can be said. The paper's tables average the wrong answers' probabilities geometrically, its text arithmetically."""
    means = [p.mean for p in perturbed]
    if mean == "geometric":
        numerator = sum(means) / len(means)
    else:
        top = max(means)
        shares = [math.exp(m - top) for m in means] if math.isfinite(top) else [1.0]
        numerator = top + math.log(sum(shares) / len(shares))
    return numerator - paraphrase.mean


def truth_ratio(paraphrase: AnswerScore, perturbed: Sequence[AnswerScore], mean: TruthRatioMean = "geometric") -> float:
    """R >= 0, below 1 where the model knows better; ``inf`` where only the paraphrase is impossible, or NaN."""
    exponent = log_truth_ratio(paraphrase, perturbed, mean)
    return math.exp(exponent) if exponent < 700 else (math.nan if math.isnan(exponent) else math.inf)


def knows(paraphrase: AnswerScore, perturbed: Sequence[AnswerScore]) -> bool:
    """Whether the paraphrased right answer is likelier, a token, than each wrong one (by luck one time in six)."""
    return all(paraphrase.mean > wrong.mean for wrong in perturbed)


def likeliest(right: AnswerScore, wrong: Sequence[AnswerScore]) -> float:
    """1 where a text is likelier, as a whole, than each of its alternatives, so that the model would choose it, else 0;
    NaN where one of them has no probability."""
    if any(math.isnan(score.log_prob) for score in (right, *wrong)):
        return math.nan
    return float(all(right.log_prob > other.log_prob for other in wrong))


def exact_memorization(greedy: Sequence[bool]) -> float:
    """Share of an answer's tokens that are the greedy choice after the true tokens before them."""
    return sum(greedy) / len(greedy) if greedy else math.nan


def extraction_strength(greedy: Sequence[bool]) -> float:
    """1 - k / T for the smallest k from which on all of the T tokens are the greedy choice (Carlini et al. 2021)."""
    matching = next((i for i, same in enumerate(reversed(greedy)) if not same), len(greedy))
    return matching / len(greedy) if greedy else math.nan


def forget_truth_ratio(ratio: float) -> float:
    """min(R, 1/R), in [0, 1]: 1 where right and wrong answers are equally likely."""
    return ratio if ratio <= 1 else 1 / ratio


def retain_truth_ratio(ratio: float) -> float:
    """max(0, 1 - R), in [0, 1]: 1 where wrong answers are impossible."""
    return ratio if math.isnan(ratio) else max(0.0, 1.0 - ratio)


def harmonic_mean(values: Sequence[float]) -> float:
    """Harmonic mean of values in [0, 1]; 0 where one of them is 0, NaN where one is NaN."""
    if any(math.isnan(v) for v in values):
        return math.nan
    return 0.0 if min(values) <= 0 else len(values) / sum(1 / v for v in values)


class RecordMeasures(NamedTuple):
    """Of one record: its probability, R, and the truth ratio that is reported, as its set defines them."""

    probability: float
    ratio: float
    truth_ratio: float


def measure(spec: SetSpec, scores: Sequence[AnswerScore], mean: TruthRatioMean = "geometric") -> RecordMeasures:
    """Measure one record by the scores of its answer, its paraphrased answer and its perturbed answers.

    The set decides between the forms of probability and truth ratio; ``mean`` is the truth ratio's.
    """
    answer, paraphrase, *perturbed = scores
    likely = choice_probability(answer, perturbed) if spec.choice else probability(answer)
    ratio = truth_ratio(paraphrase, perturbed, mean)
    reported = forget_truth_ratio if spec.forgotten else retain_truth_ratio
    return RecordMeasures(likely, ratio, reported(ratio))


def goodness(spec: SetSpec, probability: float, rouge: float, truth_ratio: float) -> tuple[float, float, float]:
    """The three measures as a harmonic mean takes them: the higher the better for this set."""
    return (1 - probability, 1 - rouge, truth_ratio) if spec.forgotten else (probability, rouge, truth_ratio)
