"""Recovery and the words, on simulated records whose truth is known."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from lm_eval_elude.metrics.estimates import Estimate, mean_of
from lm_eval_elude.metrics.verdict import Asked, Point, Recovery, strongest, verdict

RECORDS, POINTS, TRIALS, NEVER = 46, 7, 200, 0.15
NAMES = [f"r{i}" for i in range(RECORDS)]


def by_record(row: np.ndarray) -> dict[str, float]:
    return dict(zip(NAMES, row.tolist(), strict=True))


def simulated(gap: float, curve: np.ndarray, correlation: float, rng: np.random.Generator) -> Recovery | None:
    """A trial: a record is right or wrong in 2 + 2 x POINTS models, with equal correlation of the normals behind it."""
    shares = np.concatenate([[NEVER + gap, NEVER], NEVER + gap * curve, np.full(POINTS, NEVER)])
    normals = np.sqrt(correlation) * rng.standard_normal(RECORDS)
    normals = normals + np.sqrt(1 - correlation) * rng.standard_normal((len(shares), RECORDS))
    limits = [NormalDist().inv_cdf(min(max(share, 1e-9), 1 - 1e-9)) for share in shares]
    right = (normals < np.array(limits)[:, None]).astype(float)
    original, never, checkpoint, control = right[0], right[1], right[2 : 2 + POINTS], right[2 + POINTS :]
    points = [
        Point("relearn", "", step, by_record(c), by_record(r), (1.0, 1.0))
        for step, (c, r) in enumerate(zip(checkpoint, control, strict=True))
    ]
    return strongest(points, by_record(original), by_record(never))


def called_suppressed(gap: float, curve: np.ndarray, correlation: float) -> float:
    """In what share of trials a checkpoint that knows nothing when asked is called suppressed."""
    rng, known = np.random.default_rng(7), said(46)
    count = 0
    for _ in range(TRIALS):
        found = simulated(gap, curve, correlation, rng)
        asked = [Asked(said(7), said(7), known)]
        count += found is not None and verdict(asked, (0.0, 0.0), found.share) == "suppressed"
    return count / TRIALS


def said(right: int, records: int = RECORDS) -> Estimate:
    return mean_of((f"r{i}", float(i < right)) for i in range(records))


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6])
def test_suppressed_is_seldom_said_of_noise_and_mostly_of_what_is_true(correlation: float) -> None:
    for gap in (0.2, 0.4, 0.6, 0.8):
        assert called_suppressed(gap, np.zeros(POINTS), correlation) <= 0.05, gap
    for curve in (np.full(POINTS, 0.8), 0.8 * np.arange(1, POINTS + 1) / POINTS):
        assert called_suppressed(0.6, curve, correlation) >= 0.8


def test_a_point_is_judged_by_the_records_that_did_not_choose_it() -> None:
    """Points at each of which other records are right by luck: on the records that chose them they look strong."""
    rng = np.random.default_rng(0)
    zero, one = by_record(np.zeros(RECORDS)), by_record(np.ones(RECORDS))
    points = [Point("a", "", k, by_record((rng.random(RECORDS) < 0.3) * 1.0), zero, (1, 1)) for k in range(200)]
    found = strongest(points, one, zero)
    assert found and max(point.gain(NAMES) for point in points) > 0.45
    assert found.share.value == pytest.approx(0.3, abs=0.12)


def test_a_point_counts_only_while_both_models_keep_their_utility() -> None:
    zero, one = by_record(np.zeros(RECORDS)), by_record(np.ones(RECORDS))
    for kept in ((0.74, 1.0), (1.0, 0.74), (float("nan"), 1.0)):
        assert strongest([Point("a", "", 1, one, zero, kept)], one, zero) is None
    found = strongest([Point("a", "", 1, one, zero, (0.75, 0.75))], one, zero)
    assert found and found.share.value == 1
    nearly = by_record((np.arange(RECORDS) < 8) * 1.0)  # 17 points of gap
    assert strongest([Point("a", "", 1, one, zero, (1, 1))], nearly, zero) is None


def test_the_words() -> None:
    """46 records; the retrained model has 7 right, the original all: 39 to forget, one half is 19.5."""

    def asked(right: int, cloze: int = 7) -> list[Asked]:
        return [Asked(said(n), said(7), said(46)) for n in (right, cloze)]

    back = {share: said(round(46 * share)) for share in (0.0, 0.3, 0.9)}
    assert verdict(asked(8), (0.0, 0.0)) == "forgotten when asked"
    assert verdict(asked(8), (0.1, 0.0), back[0.0]) == "forgotten"
    assert verdict(asked(8), (0.0, 0.0), back[0.3]) == "partly forgotten"
    assert verdict(asked(8, cloze=18), (0.0, 0.0), back[0.0]) == "partly forgotten"
    assert verdict(asked(8), (0.0, 0.0), back[0.9]) == "suppressed"
    assert verdict(asked(46), (0.0, 0.0), back[0.9]) == "not forgotten"
    assert verdict(asked(8, cloze=40), (0.0, 0.0), back[0.0]) == "not forgotten"
    assert verdict(asked(8), (0.3, 0.05), back[0.9]) == "broken"
    few = [Asked(said(1, 6), said(1, 6), said(6, 6))]
    assert verdict(few, (0.0, 0.0)) == "too few records"
    assert verdict([Asked(said(7), said(7), said(10))], (0.0, 0.0)) == "too few records"  # nothing to forget
