"""Samples to numbers: the paper's own rows, means by hand, errors against the bootstrap, the membership attack."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from lm_eval_elude.core.likelihood import harmonic_mean
from lm_eval_elude.metrics.estimates import block_diagonal, covariance_of_means, harmonic_stderr, mean_over_targets
from lm_eval_elude.metrics.membership import auc_interval, membership_attack
from lm_eval_elude.metrics.quality import forget_quality, retain_quality
from tests.support import GOLDEN

ROWS = json.loads((GOLDEN / "paper_rows.json").read_text())
UNIT = st.floats(0, 1)
POSITIVE = st.floats(1e-3, 1)


def test_forget_quality_at_its_limits():
    assert forget_quality(0, 0, 1) == 1 and forget_quality(1, 0, 1) == 0


def test_all_rows_of_the_paper_are_here():
    assert len(ROWS) == 22 and len({(r["model"], r["method"]) for r in ROWS}) == 22


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r['model'].split('-')[0]}-{r['method']}")
def test_the_papers_rows(row):
    """From the full-results table to the main table, in per cent, to 0.15 (rounding of the inputs)."""
    fq = forget_quality(*(v / 100 for v in row["forget"]))
    rq = retain_quality([v / 100 for v in row["retain"]], [v / 100 for v in row["world"]])
    assert 100 * fq == pytest.approx(row["forget_quality"], abs=0.15)
    assert 100 * rq == pytest.approx(row["retain_quality"], abs=0.15)


@given(UNIT, UNIT, UNIT, UNIT)
def test_forgetting_more_never_lowers_forget_quality(probability, rouge, ratio, less):
    assert forget_quality(min(probability, less), rouge, ratio) >= forget_quality(probability, rouge, ratio) - 1e-12


def test_targets_weigh_the_same_whatever_their_number_of_samples():
    estimate = mean_over_targets({"a": [0.0, 1.0], "b": [0.2, 0.4, 0.6]})
    # Variances of the means: 0.5 / 2 and 0.04 / 3.
    assert estimate.value == pytest.approx((0.5 + 0.4) / 2) and estimate.n == 5
    assert estimate.stderr == pytest.approx(math.sqrt(0.25 + 0.04 / 3) / 2)


def test_one_target_gives_the_plain_mean_and_its_standard_error():
    values = [0.1, 0.4, 0.7, 0.2]
    estimate = mean_over_targets({"a": values})
    assert estimate.value == pytest.approx(np.mean(values)) and estimate.stderr == pytest.approx(
        np.std(values, ddof=1) / 2
    )


def test_a_missing_value_is_not_dropped():
    estimate = mean_over_targets({"a": [0.1, math.nan], "b": [0.3, 0.4]})
    assert math.isnan(estimate.value) and math.isnan(mean_over_targets({"a": [0.1]}).stderr)


def bootstrap(samples: list[np.ndarray], formula, rounds: int = 3_000) -> float:
    """Standard deviation of ``formula(means over targets)`` over resamples within each target."""
    rng = np.random.default_rng(0)
    values = []
    for _ in range(rounds):
        means = [table[rng.integers(len(table), size=len(table))].mean(axis=0) for table in samples]
        values.append(formula(np.mean(means, axis=0)))
    return float(np.std(values))


def test_standard_errors_against_the_bootstrap():
    rng = np.random.default_rng(1)
    shared = rng.uniform(0.2, 0.5, size=(180, 1))  # the three measures of a sample are correlated
    samples = np.clip(shared + rng.uniform(0, 0.5, size=(180, 3)), 0, 1)
    tables = [samples[:60], samples[60:]]
    means = np.mean([t.mean(axis=0) for t in tables], axis=0)
    covariance = covariance_of_means({"a": tables[0].tolist(), "b": tables[1].tolist()})
    assert harmonic_stderr(means, covariance) == pytest.approx(bootstrap(tables, harmonic_mean), rel=0.06)
    by_target = {"a": tables[0][:, 0], "b": tables[1][:, 0]}
    assert mean_over_targets(by_target).stderr == pytest.approx(bootstrap(tables, lambda m: m[0]), rel=0.06)


def test_standard_error_of_two_independent_sets_against_the_bootstrap():
    rng = np.random.default_rng(2)
    retain, world = rng.beta(2, 2, size=(80, 3)), rng.beta(4, 2, size=(50, 3))
    covariance = block_diagonal(covariance_of_means({"a": retain.tolist()}), covariance_of_means({"": world.tolist()}))
    assert covariance.shape == (6, 6) and not covariance[:3, 3:].any()
    values = []
    for _ in range(3_000):
        halves = [t[rng.integers(len(t), size=len(t))].mean(axis=0) for t in (retain, world)]
        values.append(harmonic_mean([*halves[0], *halves[1]]))
    means = [*retain.mean(axis=0), *world.mean(axis=0)]
    assert harmonic_stderr(means, covariance) == pytest.approx(np.std(values), rel=0.06)


def test_standard_error_that_cannot_be_had_is_nan():
    assert math.isnan(harmonic_stderr([0.0, 0.5], np.eye(2)))
    assert np.isnan(covariance_of_means({"a": [[0.1, 0.2, 0.3]]})).all()


LOSSES = st.lists(st.floats(0, 50), min_size=2, max_size=30)


@given(LOSSES, LOSSES)
def test_auc_against_scikit_learn(members, others):
    auc, low, high = auc_interval(members, others)
    labels = [1] * len(members) + [0] * len(others)
    assert auc == pytest.approx(roc_auc_score(labels, [*members, *others]), abs=1e-9)
    assert 0 <= low <= auc <= high <= 1


@pytest.mark.parametrize(("members", "others"), [([1.0], [0.0, 0.5]), ([math.nan, 1.0], [0.0, 0.5])])
def test_an_auc_interval_that_cannot_be_had_is_nan(members, others):
    assert np.isnan(auc_interval(members, others)[1:]).all()


def test_auc_interval_covers_the_truth_and_not_too_often():
    """Normal scores one unit apart: the true AUC is Phi(1 / sqrt 2)."""
    rng = np.random.default_rng(3)
    truth = 0.5 * (1 + math.erf(0.5))
    inside = 0
    for _ in range(400):
        _, low, high = auc_interval(rng.normal(1, 1, 60), rng.normal(0, 1, 60))
        inside += low <= truth <= high
    assert 0.91 < inside / 400 < 0.99


def test_the_attack_tells_memorised_from_unseen():
    rng = np.random.default_rng(4)
    result = membership_attack(rng.normal(0.3, 0.1, 200), rng.normal(2, 0.5, 200))
    assert result.accuracy > 0.97 and result.auc > 0.99 and result.n == 200 and result.reason == ""


def test_the_attack_finds_nothing_where_there_is_nothing():
    rng = np.random.default_rng(5)
    result = membership_attack(rng.normal(2, 0.5, 200), rng.normal(2, 0.5, 200))
    assert result.auc_low < 0.5 < result.auc_high and abs(result.accuracy - 0.5) < 0.1


def test_over_unlearning_shows_as_an_auc_below_one_half():
    rng = np.random.default_rng(6)
    members, others = rng.normal(6, 0.5, 100), rng.normal(3, 0.5, 100)
    result, mirrored = membership_attack(members, others), membership_attack(others, members)
    assert result.auc < 0.01 and result.accuracy > 0.97
    assert result.auc == pytest.approx(1 - mirrored.auc)


def test_losses_are_clipped_to_a_hundred():
    rng = np.random.default_rng(7)
    members, others = rng.normal(2, 0.5, 50), rng.normal(3, 0.5, 50)
    others[0] = 1e9
    clipped = others.copy()
    clipped[0] = 100
    assert membership_attack(members, others) == membership_attack(members, clipped)


def test_the_larger_side_is_subsampled_and_the_seed_fixes_it():
    rng = np.random.default_rng(8)
    members, others = rng.normal(2, 1, 40), rng.normal(2.4, 1, 90)
    first = membership_attack(members, others, seed=1)
    assert first.n == 40 and first == membership_attack(members, others, seed=1)
    assert first.auc != membership_attack(members, others, seed=2).auc


@pytest.mark.parametrize(
    ("members", "others", "said"),
    [
        ([1.0] * 20, [1.0] * 20, "all losses are equal"),
        ([150.0 + i for i in range(20)], [300.0 + i for i in range(20)], "all losses are equal"),  # after clipping
        ([math.inf] + [1.0] * 19, [2.0] * 20, "1 losses are infinite or not a number"),
        ([math.nan] * 20, [2.0] * 20, "20 losses are infinite or not a number"),
        ([1.0, 2.0], [3.0, 4.0, 5.0, 6.0, 7.0], "only 2 samples on one side"),
        ([], [], "only 0 samples"),
    ],
)
def test_degenerate_losses_give_nan_and_a_reason(members, others, said):
    result = membership_attack(members, others)
    assert said in result.reason
    assert all(
        math.isnan(v) for v in (result.accuracy, result.accuracy_std, result.auc, result.auc_low, result.auc_high)
    )


@given(st.integers(5, 60), st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_accuracy_and_auc_are_always_fractions(n, seed):
    rng = np.random.default_rng(seed)
    result = membership_attack(rng.exponential(1, n), rng.exponential(1.5, n), seed=seed)
    assert all(0 <= v <= 1 for v in result[:5]) and result.auc_low <= result.auc <= result.auc_high
