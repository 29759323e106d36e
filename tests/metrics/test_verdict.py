"""The verdicts in a simulation: 46 records, seven points of attacks, answers of a record correlated."""

import numpy as np
import pytest
from scipy.stats import norm

from lm_eval_elude.metrics.estimates import Estimate, mean_of
from lm_eval_elude.metrics.verdict import Point, judge, point_recovery, recovery

RECORDS, POINTS, DRAWS = 46, 7, 300


def draw(rng, share, correlation, common):
    """0/1 answers to each record with that share of ones; ``correlation`` with the record's common latent value."""
    latent = np.sqrt(correlation) * common + np.sqrt(1 - correlation) * rng.standard_normal(RECORDS)
    limit = norm.ppf(share)
    return {str(i): float(v < limit) for i, v in enumerate(latent)}


def simulate(seed, gap, true_recovery, correlation):
    rng = np.random.default_rng(seed)
    of_original, of_retrained = (rng.standard_normal(RECORDS) for _ in range(2))
    low = 0.18
    original = draw(rng, min(low + gap, 0.98), correlation, of_original)
    retrained = draw(rng, low, correlation, of_retrained)
    share = low + true_recovery * (min(low + gap, 0.98) - low)
    points = [
        Point(
            "relearn", str(i), 5, draw(rng, share, correlation, of_original), draw(rng, low, correlation, of_retrained)
        )
        for i in range(POINTS)
    ]
    return points, original, retrained


def share_of(word, gap, true_recovery, correlation):
    words = []
    for seed in range(DRAWS):
        points, original, retrained = simulate(seed, gap, true_recovery, correlation)
        plain = mean_of(retrained.items())
        words.append(judge({"plain": (plain, plain)}, (0.0, 0.0), points, original, retrained).word)
    return words.count(word) / DRAWS


@pytest.mark.parametrize("correlation", [0, 0.3, 0.6])
@pytest.mark.parametrize("gap", [0.2, 0.4, 0.6, 0.8])
def test_noise_is_not_called_suppressed(gap, correlation):
    assert share_of("suppressed", gap, 0.0, correlation) <= 0.05


@pytest.mark.parametrize("correlation", [0, 0.3, 0.6])
def test_what_comes_back_is_called_suppressed(correlation):
    assert share_of("suppressed", 0.6, 0.8, correlation) >= 0.8


def test_without_a_gap_or_utility_there_is_no_recovery():
    points, original, retrained = simulate(0, 0.6, 0.8, 0)
    assert np.isnan(recovery(points, retrained, retrained).value)
    assert np.isnan(recovery([p._replace(keeps=False) for p in points], original, retrained).value)
    assert np.isnan(point_recovery(points[0]._replace(keeps=False), original, retrained).value)


def test_recovery_of_both_reference_points():
    points, original, retrained = simulate(0, 0.6, 0.8, 0)
    whole = points[0]._replace(checkpoint=original, retrained=retrained)
    none = points[0]._replace(checkpoint=retrained, retrained=retrained)
    assert recovery([whole], original, retrained).value == pytest.approx(1)
    assert recovery([none], original, retrained).value == pytest.approx(0)


def estimate(share, records=46):
    return mean_of((str(i), float(i < share * records)) for i in range(records))


@pytest.mark.parametrize(
    "ours, theirs, gibberish, word",
    [
        (0.2, 0.2, (0.0, 0.0), "forgotten when asked"),
        (0.8, 0.2, (0.0, 0.0), "not forgotten"),
        (0.8, 0.2, (0.5, 0.1), "broken"),
    ],
)
def test_words(ours, theirs, gibberish, word):
    assert judge({"plain": (estimate(ours), estimate(theirs))}, gibberish).word == word


def test_few_records_are_not_judged():
    few = Estimate(0.0, {str(i): 0.0 for i in range(19)}, 19)
    assert judge({"plain": (few, few)}, (0.0, 0.0)).word == "too few records"
