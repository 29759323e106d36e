"""Numbers and their errors: the paper's own rows, the bootstrap, coverage by simulation, SciPy and scikit-learn."""

import json
import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, ks_2samp
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedShuffleSplit

from lm_eval_elude.metrics.compare import distances, ks_p_value, mcnemar_p, privleak, recovery
from lm_eval_elude.metrics.estimates import Z95, Estimate, average, difference, harmonic, harmonic_mean, mean_of
from lm_eval_elude.metrics.membership import attack_accuracy, auc
from lm_eval_elude.metrics.samples import THREE, Sample, forget_quality, mean, numbers, set_quality
from tests.support import GOLDEN

ROWS = json.loads((GOLDEN / "paper_rows.json").read_text())  # all 22 of its full-results table


def measured(table, record=str) -> list[Sample]:
    """Samples of one target whose three values are the rows of a table; ``record`` names the record of a row."""
    rows = np.asarray(table, dtype=float).tolist()
    return [Sample("a", record(i), i, dict(zip(THREE, row, strict=True))) for i, row in enumerate(rows)]


def column(values, record=str) -> Estimate:
    return mean_of((record(i), float(v)) for i, v in enumerate(values))


def side(values, name: str) -> list[tuple[str, float]]:
    """Scores of records that stand on one side only."""
    return [(f"{name} {i}", float(v)) for i, v in enumerate(values)]


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r['model'].split('-')[0]}-{r['method']}")
def test_the_papers_rows(row):
    """From the full-results table to the main table, in per cent, to 0.15 (rounding of the inputs)."""
    forget, retain, world = (measured([np.array(row[name]) / 100]) for name in ("forget", "retain", "world"))
    assert 100 * forget_quality(forget).value == pytest.approx(row["forget_quality"], abs=0.15)
    assert 100 * set_quality(retain, world).value == pytest.approx(row["retain_quality"], abs=0.15)


def test_targets_weigh_the_same_whatever_their_number_of_samples():
    values = {"a": [0.0, 1.0], "b": [0.2, 0.4, 0.6]}
    samples = [Sample(t, f"{t}{i}", i, {"probability": v}) for t, vs in values.items() for i, v in enumerate(vs)]
    estimate = mean(samples, "probability")
    # Variances of the means: 0.5 / 2 and 0.04 / 3.
    assert estimate.value == pytest.approx((0.5 + 0.4) / 2) and estimate.n == 5
    assert estimate.stderr == pytest.approx(math.sqrt(0.25 + 0.04 / 3) / 2)


def test_a_missing_value_is_not_dropped_and_an_error_that_cannot_be_had_is_nan():
    assert math.isnan(column([0.1, math.nan]).value)
    assert math.isnan(average([column([0.1, 0.2]), Estimate(math.nan, {}, 3)]).stderr)
    assert math.isnan(column([0.1]).stderr) and math.isnan(harmonic([column([0.0, 0.0]), column([0.5, 0.6])]).stderr)


def bootstrap(tables: list[np.ndarray], formula, rounds: int = 2_000) -> float:
    """Standard deviation of a formula of the tables' means over resamples within each table."""
    rng = np.random.default_rng(0)
    resampled = ([t[rng.integers(len(t), size=len(t))].mean(axis=0) for t in tables] for _ in range(rounds))
    return float(np.std([formula(means) for means in resampled]))


def test_standard_errors_against_the_bootstrap():
    """Of one table whose columns are correlated, and of two independent sets."""
    rng = np.random.default_rng(1)
    table = np.clip(rng.uniform(0.2, 0.5, size=(90, 1)) + rng.uniform(0, 0.5, size=(90, 3)), 0, 1)
    expected = bootstrap([table], lambda means: harmonic_mean(means[0]))
    assert set_quality(measured(table)).stderr == pytest.approx(expected, rel=0.07)
    retain, world = rng.beta(2, 2, size=(80, 3)), rng.beta(4, 2, size=(50, 3))
    quality = set_quality(measured(retain), measured(world, record=lambda i: f"world {i}"))
    expected = bootstrap([retain, world], lambda means: harmonic_mean([*means[0], *means[1]]))
    assert quality.stderr == pytest.approx(expected, rel=0.07) and quality.records == 130


def test_a_record_asked_again_is_no_new_draw_and_two_runs_are_paired_by_record():
    values = np.array([0.1, 0.5, 0.6, 0.9])
    once, thrice = column(values), column([*values] * 3, record=lambda i: str(i % 4))
    assert thrice.stderr == pytest.approx(once.stderr) and (thrice.n, thrice.records) == (12, 4)
    assert average([once, once]).stderr == pytest.approx(once.stderr)  # two suites of the same records
    after = np.array([0.2, 0.7, 0.6, 0.8])
    paired = difference(column(after), once)
    assert paired.value == pytest.approx(np.mean(after - values))
    assert paired.stderr == pytest.approx(np.std(after - values, ddof=1) / 2)


def covered(draw, truth: float, rounds: int = 1_000) -> float:
    """Share of 95 % intervals that hold the truth."""
    found = [draw(np.random.default_rng(seed)) for seed in range(rounds)]
    return sum(abs(e.value - truth) <= Z95 * e.stderr for e in found) / rounds


@pytest.mark.slow
def test_intervals_of_repeated_prompts_cover_the_truth():
    """Nine suites ask 46 records two or three times each."""

    def attacked(rng) -> Estimate:
        own = rng.normal(0.5, 0.1, 46)
        suites = []
        for _ in range(9):
            asked = rng.permutation(np.arange(100) % 46)
            table = np.clip(own[asked, None] + rng.normal(0, 0.05, (100, 3)), 0, 1)
            suites.append(measured(table, record=lambda i, asked=asked: str(asked[i])))
        return average([forget_quality(samples) for samples in suites])

    assert 0.93 <= covered(attacked, 0.5, rounds=600) <= 0.97


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("asked", [1, 3], ids=["once", "thrice"])
def test_intervals_of_shares_cover_the_truth_at_the_ends_too(share, asked):
    """46 records, asked once or three times; a record is known in all of its wordings or in none."""
    rounds, hits = 500, 0
    for seed in range(rounds):
        known = np.random.default_rng(seed).random(46) < share
        low, high = column(np.tile(known, asked), record=lambda i: str(i % 46)).interval
        hits += low <= share <= high
        assert 0 <= low < high <= 1
    assert hits / rounds >= 0.91  # Wilson himself has 0.936 at 0.02


def test_wilsons_interval_by_hand():
    """0 of 46: z^2 / (n + z^2), that is 7.7 per cent."""
    none, every = column([0.0] * 46), column([1.0] * 46)
    assert none.interval == pytest.approx((0, 3.8415 / 49.8415), abs=1e-5)
    assert every.interval == pytest.approx((1 - 3.8415 / 49.8415, 1), abs=1e-5)
    assert average([none, every]).binary and not column([0.2, 1.0]).binary


# ---- two runs
def of_runs(pairs) -> tuple[list[Sample], list[Sample]]:
    return tuple(
        [Sample("a", str(i), i, {"mc_accuracy": pair[k], "log_truth_ratio": pair[k]}) for i, pair in enumerate(pairs)]
        for k in (0, 1)
    )


def test_mcnemars_p_value_by_hand():
    """Eight records right here alone, one there alone: 2 (1 + 9) / 2^9."""
    here, there = of_runs([(1.0, 0.0)] * 8 + [(0.0, 1.0)] + [(1.0, 1.0)] * 5)
    assert mcnemar_p(here, there) == mcnemar_p(there, here) == pytest.approx(20 / 512) == 2 * binom.cdf(1, 9, 0.5)
    assert mcnemar_p(here[9:], there[9:]) == 1
    assert math.isnan(mcnemar_p([here[0]._replace(values={"mc_accuracy": math.nan})], there[:1]))


def test_a_record_that_several_prompts_ask_about_is_one_draw_of_the_tests():
    ratios = [(0.1 * (i + 1), 0.05 * (i + 1) ** 2) for i in range(12)]
    sides = [
        [Sample("a", str(i), 3 * i + k, {"log_truth_ratio": math.log(pair[s] * (1 + change)), "mc_accuracy": float(s)})
         for i, pair in enumerate(ratios) for k, change in enumerate((-0.5, 0.0, 0.5))]
        for s in (0, 1)
    ]  # fmt: skip
    assert ks_p_value(*sides) == pytest.approx(ks_2samp(*zip(*ratios, strict=True)).pvalue)
    assert mcnemar_p(*sides) == pytest.approx(2 * 0.5**12)


def test_distances_are_zero_between_a_run_and_itself_and_other_questions_are_refused():
    rng = np.random.default_rng(0)
    here, there = measured(rng.random((20, 3))), measured(rng.random((20, 3)))
    assert all(gap.value == gap.stderr == 0 for gap in distances(here, here).values())
    gap = distances(here, there)["probability_gap"]
    assert gap.value == pytest.approx(mean(here, "probability").value - mean(there, "probability").value)
    assert distances(there, here)["probability_gap"].value == -gap.value
    with pytest.raises(ValueError, match="asked different questions"):
        distances(here, [sample._replace(record="else") for sample in there])


def test_recovery_and_privleak_by_hand_with_errors_of_the_bootstrap():
    rng = np.random.default_rng(3)
    table = rng.random((200, 4)) < np.array([0.6, 0.3, 0.9, 0.2])  # attacked, attacked retrained, original, retrained

    def share(m):
        return (m[0] - m[1]) / (m[2] - m[3])

    found = recovery(*(column(table[:, k]) for k in range(4)))
    assert found.value == pytest.approx(share(table.mean(axis=0)))
    assert found.stderr == pytest.approx(bootstrap([table.astype(float)], lambda m: share(m[0])), rel=0.07)
    leak = privleak(column([0.9, 0.7]), column([0.6, 0.4]))  # as if they were AUCs of .8 and .5
    assert leak.value == pytest.approx((0.2 - 0.5) / 0.5)


# ---- membership
LOSSES = st.lists(st.floats(0, 50), min_size=5, max_size=30)


@given(LOSSES, LOSSES)
def test_auc_against_scikit_learn(members, others):
    area = auc(side(members, "in"), side(others, "out"))
    labels = [1] * len(members) + [0] * len(others)
    assert area.value == pytest.approx(roc_auc_score(labels, [*members, *others]), abs=1e-9)
    assert auc(side(others, "out"), side(members, "in")).value == pytest.approx(1 - area.value)


def test_auc_intervals_cover_the_truth_whether_sides_are_independent_or_of_the_same_records():
    """Normal scores one unit apart: the true AUC is Phi(1 / sqrt(variance of a difference of two))."""

    def independent(rng) -> Estimate:
        return auc(side(rng.normal(1, 1, 60), "in"), side(rng.normal(0, 1, 60), "out"))

    def paired(rng) -> Estimate:
        about = rng.normal(0, 1, 60)  # what a record's answer and paraphrase have in common
        return auc(*(side(about + shift + rng.normal(0, 1, 60), "") for shift in (1.0, 0.0)))

    assert 0.93 <= covered(independent, NormalDist().cdf(1 / math.sqrt(2))) <= 0.97
    assert 0.93 <= covered(paired, NormalDist().cdf(1 / 2)) <= 0.97


@pytest.mark.parametrize(
    ("members", "others", "accuracy", "area"),
    [
        ((-0.3, 0.1), (-2, 0.5), (0.97, 1), (0.99, 1)),  # memorised
        ((-2, 0.5), (-2, 0.5), (0.4, 0.6), (0.4, 0.6)),  # nothing to find
        ((-6, 0.5), (-3, 0.5), (0.97, 1), (0, 0.01)),  # over-unlearned
    ],
)
def test_the_attack_tells_memorised_and_over_unlearned_records_from_unseen_ones(members, others, accuracy, area):
    """Log-probabilities are normal with these means and deviations."""
    rng = np.random.default_rng(5)
    sides = side(rng.normal(*members, 200), "in"), side(rng.normal(*others, 200), "out")
    assert accuracy[0] <= attack_accuracy(*sides, seed=0) <= accuracy[1]
    assert area[0] <= auc(*sides).value <= area[1]


def test_the_accuracy_is_that_on_a_held_out_fifth_over_ten_stratified_splits_of_clipped_losses():
    rng = np.random.default_rng(3)
    members, others = rng.normal(-1.0, 1, 40), rng.normal(-2.0, 1, 40)
    others[0] = -1e9
    losses, labels = -np.concatenate([members, others]).clip(-100, 100)[:, None], np.repeat([1, 0], 40)
    found = []
    for train, held_out in StratifiedShuffleSplit(10, test_size=0.2, random_state=7).split(losses, labels):
        model = LogisticRegression().fit(losses[train], labels[train])
        found.append(float(np.mean(model.predict(losses[held_out]) == labels[held_out])))
    assert attack_accuracy(side(members, "in"), side(others, "out"), seed=7) == pytest.approx(np.mean(found))
    assert np.std(found) > 0


@pytest.mark.parametrize(
    ("members", "others"),
    [([1.0] * 20, [1.0] * 20), ([-math.inf] + [1.0] * 19, [2.0] * 20), ([1.0, 2.0], [3.0, 4.0, 5.0, 6.0, 7.0])],
    ids=["equal", "infinite", "few"],
)
def test_what_cannot_be_attacked_is_nan(members, others):
    assert math.isnan(attack_accuracy(side(members, "in"), side(others, "out"), seed=0))


def test_an_auc_of_one_and_one_of_zero_do_not_cancel_in_the_distance():
    losses = {"a": (0.0, 100.0), "b": (100.0, 0.0)}
    samples = [
        Sample(target, f"{target}{i}", i, {"mia_auc": (-i - here, -i - there), "mia_auc_distance": 0})
        for target, (here, there) in losses.items() for i in range(10)
    ]  # fmt: skip
    found = numbers([s._replace(values=dict.fromkeys(s.values, s.values["mia_auc"])) for s in samples],
                    ("mia_auc", "mia_auc_distance"))  # fmt: skip
    assert found["mia_auc"].value == 0.5 and found["mia_auc_distance"].value == 0.5
