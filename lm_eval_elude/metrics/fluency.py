"""How well the original model can read an answer: ``fluency_gap``, and ``gibberish`` as an estimate.

Both rest on the mean log-probability of a token (nats) that the original model gives an answer, under an invented name
in the place of the target's, and gives the answers that it samples itself, at temperature 1, to the same questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lm_eval_elude.metrics.text import is_refusal, is_repetition

FLUENCY = ("fluency_gap", "gibberish")
# Share of its own sampled answers that the original model finds less likely than an answer must be to be gibberish;
# the best F1 on one half of the labelled answers, tests/golden/gibberish.jsonl.
QUANTILE = 0.2


class Reading(NamedTuple):
    """What the original model finds of one answer and of its ``own`` to the question: mean log-probabilities, nats."""

    log_prob: float
    own: Sequence[float]


def lowest(readings: Sequence[Reading]) -> float:
    """The :data:`QUANTILE` of the original model's own answers to all questions of a task."""
    own = sorted(value for reading in readings for value in reading.own)
    return own[int(QUANTILE * (len(own) - 1))]


def is_gibberish(answer: str, log_prob: float, lowest: float) -> bool:
    """Whether an answer repeats itself, or is no refusal and less likely than nearly all that the original model says.

    A refusal is passed over by its wording: a model that never refuses finds it as unlikely as noise.
    """
    return is_repetition(answer) or (log_prob < lowest and not is_refusal(answer))


def fluency_values(answer: str, reading: Reading, lowest: float) -> dict[str, Any]:
    """The values of one document."""
    gap = sum(reading.own) / len(reading.own) - reading.log_prob
    return {"fluency_gap": gap, "gibberish": float(is_gibberish(answer, reading.log_prob, lowest))}
