"""The rule of early stopping."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optout_train.validation import judge


def of(score: float, kept: float = 0.8) -> dict[str, float]:
    return {"score": score, "retain_quality": kept}


@pytest.mark.parametrize(
    ("scores", "patience", "best", "stops"),
    [
        ([0.1, 0.4], 1, 1, False),
        ([0.9, 0.4], 1, 1, False),  # before training nothing is forgotten: no epoch to compare with
        ([0.1, 0.4, 0.6, 0.5], 1, 2, True),
        ([0.1, 0.4, 0.6, 0.5], 2, 2, False),
        ([0.1, 0.4, 0.6, 0.5, 0.3], 2, 2, True),
        ([0.1, 0.4, 0.3, 0.5, 0.4], 2, 3, False),  # not in a row
        ([0.1, 0.4, 0.4], 1, 2, False),  # as good, and trained longer
    ],
)
def test_a_falling_score_stops(scores, patience, best, stops):
    verdict = judge([of(score) for score in scores], patience)
    assert verdict.best == best and bool(verdict.reason) == stops


def test_a_collapse_stops_however_high_the_score():
    verdict = judge([of(0.1), of(0.5), of(0.9, kept=0.39)], 1)
    assert verdict.best == 1
    assert (
        verdict.reason
        == "collapse: retain quality 0.390, 0.800 before training (1 bad epoch(s) in a row up to epoch 2)"
    )
    assert judge([of(0.1), of(0.9, kept=0.0)], 1).best == 0
    assert judge([of(0.1), of(math.nan)], 1).reason and not judge([of(0.1), of(math.nan)], 2).reason
    assert judge([of(0.1), of(0.9, kept=0.41)], 1) == (1, "")


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8), st.integers(1, 4))
def test_the_best_epoch_has_the_highest_score_and_more_patience_never_stops_sooner(scores, patience):
    measured = [of(score) for score in scores]
    verdict = judge(measured, patience)
    assert scores[verdict.best] == max(scores[1:])
    assert verdict.reason or not judge(measured, patience + 1).reason
