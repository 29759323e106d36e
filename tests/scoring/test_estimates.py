"""Values and their errors: the paper's own rows, means by hand, errors against the bootstrap and by simulation."""

import json
import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ks_2samp
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedShuffleSplit

from lm_eval_elude.scoring import estimates
from lm_eval_elude.scoring.estimates import Estimate, Observation, average, difference, exact, harmonic
from lm_eval_elude.scoring.likelihood import harmonic_mean
from lm_eval_elude.scoring.membership import auc, membership_attack
from lm_eval_elude.scoring.metrics import (
    METRICS,
    THREE,
    forget_quality,
    known,
    ks_p_value,
    retain_quality,
    truth_first_p,
)
from lm_eval_elude.scoring.samples import Sample
from tests.support import GOLDEN

ROWS = json.loads((GOLDEN / "paper_rows.json").read_text())  # all 22 of its full-results table


def mean_over_targets(values: dict) -> Estimate:
    """Values by target, each of a record of its own."""
    return estimates.mean_over_targets(
        Observation(target, f"{target} {i}", value) for target, group in values.items() for i, value in enumerate(group)
    )


def three(table, record=lambda i: str(i), target: str = "a") -> list[Estimate]:
    """Means of a table's columns; ``record`` names the record of a row."""
    return [
        estimates.mean_over_targets(Observation(target, record(i), v) for i, v in enumerate(column))
        for column in np.asarray(table).T
    ]


def measured(table, record=str) -> list[Sample]:
    """Samples of one target whose three measures are the rows of a table."""
    rows = np.asarray(table, dtype=float).tolist()
    return [Sample("a", record(i), i, dict(zip(THREE, row, strict=True))) for i, row in enumerate(rows)]


def own(values, side: str) -> tuple[tuple[str, float], ...]:
    """Scores of records that stand on one side only."""
    return tuple((f"{side} {i}", float(v)) for i, v in enumerate(values))


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r['model'].split('-')[0]}-{r['method']}")
def test_the_papers_rows(row):
    """From the full-results table to the main table, in per cent, to 0.15 (rounding of the inputs)."""
    forget, retain, world = (measured([np.array(row[name]) / 100]) for name in ("forget", "retain", "world"))
    assert 100 * forget_quality(forget).value == pytest.approx(row["forget_quality"], abs=0.15)
    assert 100 * retain_quality(retain, world).value == pytest.approx(row["retain_quality"], abs=0.15)


def test_targets_weigh_the_same_whatever_their_number_of_samples():
    estimate = mean_over_targets({"a": [0.0, 1.0], "b": [0.2, 0.4, 0.6]})
    # Variances of the means: 0.5 / 2 and 0.04 / 3.
    assert estimate.value == pytest.approx((0.5 + 0.4) / 2) and estimate.n == 5
    assert estimate.stderr == pytest.approx(math.sqrt(0.25 + 0.04 / 3) / 2)


def test_a_missing_value_is_not_dropped_and_an_error_that_cannot_be_had_is_nan():
    assert math.isnan(mean_over_targets({"a": [0.1, math.nan], "b": [0.3, 0.4]}).value)
    assert math.isnan(average([mean_over_targets({"a": [0.1, 0.2]}), Estimate(math.nan, {}, 3)]).stderr)
    unknown = (
        mean_over_targets({"a": [0.1]}),
        exact(0.5),
        harmonic([mean_over_targets({"a": [0.0, 0.0]}), exact(0.5)]),
    )
    assert all(math.isnan(estimate.stderr) for estimate in unknown)


def bootstrap(tables: list[np.ndarray], formula, rounds: int = 3_000) -> float:
    """Standard deviation of a formula of the tables' means over resamples within each table."""
    rng = np.random.default_rng(0)
    resampled = ([t[rng.integers(len(t), size=len(t))].mean(axis=0) for t in tables] for _ in range(rounds))
    return float(np.std([formula(means) for means in resampled]))


def test_standard_errors_against_the_bootstrap():
    """Of two targets, whose three measures are correlated, and of two independent sets."""
    rng = np.random.default_rng(1)
    shared = rng.uniform(0.2, 0.5, size=(180, 1))
    samples = np.clip(shared + rng.uniform(0, 0.5, size=(180, 3)), 0, 1)
    tables = [samples[:60], samples[60:]]
    columns = [mean_over_targets({"a": tables[0][:, k], "b": tables[1][:, k]}) for k in range(3)]
    expected = bootstrap(tables, lambda means: harmonic_mean(np.mean(means, axis=0)))
    assert harmonic(columns).stderr == pytest.approx(expected, rel=0.06)
    assert columns[0].stderr == pytest.approx(bootstrap(tables, lambda means: np.mean(means, axis=0)[0]), rel=0.06)
    retain, world = rng.beta(2, 2, size=(80, 3)), rng.beta(4, 2, size=(50, 3))
    quality = retain_quality(measured(retain), measured(world, record=lambda i: f"world {i}"))
    expected = bootstrap([retain, world], lambda means: harmonic_mean([*means[0], *means[1]]))
    assert quality.stderr == pytest.approx(expected, rel=0.06) and quality.records == 130


def test_a_record_asked_again_is_no_new_draw():
    values = [0.1, 0.5, 0.6, 0.9]
    once = three(np.array([values]).T)[0]
    thrice = three(np.array([values * 3]).T, record=lambda i: str(i % 4))[0]
    assert thrice.stderr == pytest.approx(once.stderr) and (thrice.n, thrice.records) == (12, 4)
    assert average([once, once]).stderr == pytest.approx(once.stderr)  # two suites of the same records


def test_the_difference_of_two_runs_is_paired_by_record():
    before, after = np.array([0.1, 0.5, 0.6, 0.9]), np.array([0.2, 0.7, 0.6, 0.8])
    paired = difference(*(three(values[:, None])[0] for values in (after, before)))
    assert paired.value == pytest.approx(np.mean(after - before))
    assert paired.stderr == pytest.approx(np.std(after - before, ddof=1) / 2)


def covered(draw, truth: float, rounds: int = 1_500) -> float:
    """Share of 95 % intervals that hold the truth."""
    found = [draw(np.random.default_rng(seed)) for seed in range(rounds)]
    return sum(abs(e.value - truth) <= estimates.Z95 * e.stderr for e in found) / rounds


@pytest.mark.slow
def test_intervals_of_repeated_prompts_and_shared_rows_cover_the_truth():
    """Nine suites ask 46 records two or three times each; two targets share half of their neighbours."""

    def attacked(rng) -> Estimate:
        own = rng.normal(0.5, 0.1, 46)
        suites = []
        for _ in range(9):
            asked = rng.permutation(np.arange(100) % 46)
            table = np.clip(own[asked, None] + rng.normal(0, 0.05, (100, 3)), 0, 1)
            suites.append(measured(table, record=lambda i, asked=asked: str(asked[i])))
        return average([forget_quality(samples) for samples in suites])

    def shared(rng) -> Estimate:
        rows = rng.normal(0.6, 0.2, 90)
        pairs = [("a", i) for i in range(60)] + [("b", i) for i in range(30, 90)]
        return estimates.mean_over_targets(Observation(target, str(i), rows[i]) for target, i in pairs)

    assert 0.93 <= covered(attacked, 0.5, rounds=600) <= 0.97
    assert 0.93 <= covered(shared, 0.6) <= 0.97


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("asked", [1, 3], ids=["once", "thrice"])
def test_intervals_of_shares_cover_the_truth_at_the_ends_too(share, asked):
    """46 records, asked once or three times; a record is known in all of its wordings or in none."""
    rounds, hits = 500, 0
    for seed in range(rounds):
        known = np.random.default_rng(seed).random(46) < share
        low, high = mean_over_records(np.tile(known, asked).astype(float), 46).interval
        hits += low <= share <= high
        assert 0 <= low < high <= 1
    assert hits / rounds >= 0.91  # Wilson himself has 0.936 at 0.02


def mean_over_records(values, records: int) -> Estimate:
    return estimates.mean_over_targets(Observation("a", str(i % records), v) for i, v in enumerate(values))


def test_wilsons_interval_by_hand():
    """0 of 46: z^2 / (n + z^2), that is 7.7 per cent."""
    none, every = mean_over_records([0.0] * 46, 46), mean_over_records([1.0] * 46, 46)
    assert none.interval == pytest.approx((0, 3.8415 / 49.8415), abs=1e-5)
    assert every.interval == pytest.approx((1 - 3.8415 / 49.8415, 1), abs=1e-5)
    assert average([none, every]).binary and not mean_over_records([0.2, 1.0], 2).binary


def test_mcnemars_p_value_by_hand():
    """Eight records first here alone, one there alone: 2 (1 + 9) / 2^9."""
    pairs = [(1.0, 0.0)] * 8 + [(0.0, 1.0)] + [(1.0, 1.0)] * 5
    samples = [
        Sample("a", str(i), i, {"truth_first": here, "reference": {"truth_first": there}})
        for i, (here, there) in enumerate(pairs)
    ]
    assert truth_first_p(samples).value == pytest.approx(20 / 512) and truth_first_p(samples[9:]).value == 1
    assert known([samples], less=True).value == pytest.approx(7 / 14) and known([samples]).value == 13 / 14
    fewer = [sample._replace(values={"truth_first": float(i < 3)}) for i, sample in enumerate(samples)]
    assert known([fewer, samples]).value == known([samples, fewer]).value == 13 / 14  # the worst of several
    unknown = [sample._replace(values={"truth_first": math.nan}) for sample in samples]
    assert math.isnan(known([samples, unknown]).value)


def test_a_record_that_several_prompts_ask_about_is_one_draw():
    ratios = [(0.1 * i, 0.05 * i * i) for i in range(12)]
    samples = [
        Sample("a", str(i), 3 * i + k, {
            "truth_ratio_raw": here + shift, "truth_first": float(here > there),
            "reference": {"truth_ratio_raw": there - shift, "truth_first": float(here < there)},
        })
        for i, (here, there) in enumerate(ratios)
        for k, shift in enumerate((-0.5, 0.0, 0.5))
    ]  # fmt: skip
    p = ks_2samp(*zip(*ratios, strict=True)).pvalue
    assert ks_p_value(samples, {"attack_prompts": 3}).value == pytest.approx(p) and ks_p_value(samples).value < p
    assert truth_first_p(samples).value == pytest.approx(truth_first_p(samples[::3]).value)


LOSSES = st.lists(st.floats(0, 50), min_size=2, max_size=30)


@given(LOSSES, LOSSES)
def test_auc_against_scikit_learn(members, others):
    area = auc(own(members, "in"), own(others, "out"))
    labels = [1] * len(members) + [0] * len(others)
    assert area.value == pytest.approx(roc_auc_score(labels, [*members, *others]), abs=1e-9)
    low, high = area.interval
    assert 0 <= low <= area.value + 1e-12 and area.value - 1e-12 <= high <= 1


@pytest.mark.parametrize(("members", "others"), [([1.0], [0.0, 0.5]), ([math.nan, 1.0], [0.0, 0.5])])
def test_an_auc_error_that_cannot_be_had_is_nan(members, others):
    assert math.isnan(auc(own(members, "in"), own(others, "out")).stderr)


def test_auc_intervals_cover_the_truth_whether_sides_are_independent_or_of_the_same_records():
    """Normal scores one unit apart: the true AUC is Phi(1 / sqrt(variance of a difference of two))."""

    def independent(rng) -> Estimate:
        return auc(own(rng.normal(1, 1, 60), "in"), own(rng.normal(0, 1, 60), "out"))

    def paired(rng) -> Estimate:
        about = rng.normal(0, 1, 60)  # what a record's answer and paraphrase have in common
        sides = (about + shift + rng.normal(0, 1, 60) for shift in (1.0, 0.0))
        return auc(*([(str(i), float(v)) for i, v in enumerate(side)] for side in sides))

    assert 0.93 <= covered(independent, NormalDist().cdf(1 / math.sqrt(2))) <= 0.97
    assert 0.93 <= covered(paired, NormalDist().cdf(1 / 2)) <= 0.97


@pytest.mark.parametrize("shared", [False, True])
def test_sides_wholly_apart_leave_room_for_an_auc_that_may_give_that(shared):
    """Others score 0; members 1 with the AUC as probability, and else -1: no law of that AUC parts them more often."""
    rng, size = np.random.default_rng(0), 12
    members = [(f"m{i}" if shared else f"in {i}", 1.0) for i in range(size)]
    others = [(f"m{i}" if shared else f"out {i}", 0.0) for i in range(size)]
    low, high = auc(members, others).interval
    assert high == 1 and auc(others, members).interval == (0, pytest.approx(1 - low))
    assert low == pytest.approx(0.025 ** (1 / (size // 2 if shared else size)))
    wholly_apart = (rng.random((20_000, size)) < low).all(axis=1).mean()
    assert wholly_apart < 0.03 if not shared else wholly_apart < 0.003


def attack(members, others, seed: int = 0):
    return membership_attack(own(members, "in"), own(others, "out"), seed=seed)


@pytest.mark.parametrize(
    ("members", "others", "accuracy", "auc"),
    [
        ((0.3, 0.1), (2, 0.5), (0.97, 1), (0.99, 1)),  # memorised
        ((2, 0.5), (2, 0.5), (0.4, 0.6), (0.4, 0.6)),  # nothing to find
        ((6, 0.5), (3, 0.5), (0.97, 1), (0, 0.01)),  # over-unlearned
    ],
)
def test_the_attack_tells_memorised_and_over_unlearned_records_from_unseen_ones(members, others, accuracy, auc):
    """Losses are normal with these means and deviations."""
    rng = np.random.default_rng(5)
    sides = rng.normal(*members, 200), rng.normal(*others, 200)
    result, mirrored = attack(*sides), attack(*sides[::-1])
    assert accuracy[0] <= result.accuracy <= accuracy[1] and auc[0] <= result.auc.value <= auc[1]
    assert (result.auc.interval[0] < 0.5 < result.auc.interval[1]) == (members == others)
    assert result.auc.value == pytest.approx(1 - mirrored.auc.value) and (result.n, result.reason) == (200, "")


def test_the_accuracy_is_that_on_a_held_out_fifth_over_ten_stratified_splits():
    rng = np.random.default_rng(3)
    members, others = rng.normal(1.0, 1, 40), rng.normal(2.0, 1, 40)
    losses, labels = np.concatenate([members, others])[:, None], np.repeat([1, 0], 40)
    found = []
    for train, held_out in StratifiedShuffleSplit(10, test_size=0.2, random_state=7).split(losses, labels):
        model = LogisticRegression().fit(losses[train], labels[train])
        found.append(float(np.mean(model.predict(losses[held_out]) == labels[held_out])))
    result = attack(members, others, seed=7)
    assert (result.accuracy, result.accuracy_std) == pytest.approx((np.mean(found), np.std(found)))
    assert np.std(found) > 0


def test_an_auc_of_one_and_one_of_zero_do_not_cancel():
    """Targets a and b are told apart wholly, by losses on opposite sides; c nearly. Each alone is as it was."""
    losses = {"a": (0.0, 100.0), "b": (100.0, 0.0), "c": (0.0, 4.5)}
    samples = {
        target: [Sample(target, f"{target}{i}", i, {"loss": (i + here, i + there)}) for i in range(10)]
        for target, (here, there) in losses.items()
    }
    settings = {"seed": 0}
    far, area = METRICS["mia_auc_distance"], METRICS["mia_auc"]
    both = far.of_set([*samples["a"], *samples["b"]], settings)
    assert both.value == 0.5 and area.of_set([*samples["a"], *samples["b"]], settings).value == 0.5
    mixed, alone = far.of_set([*samples["b"], *samples["c"]], settings), area.of_set(samples["c"], settings)
    assert 0.5 < alone.value < 1 and mixed.value == pytest.approx((0.5 + alone.value - 0.5) / 2)
    parted = area.of_set(samples["b"], settings)
    assert mixed.stderr == pytest.approx(math.hypot(parted.stderr, alone.stderr) / 2) and alone.stderr > 0
    assert both.n == 20 and parted.stderr > 0


def test_losses_are_clipped_to_a_hundred():
    rng = np.random.default_rng(7)
    members, others = rng.normal(2, 0.5, 50), rng.normal(3, 0.5, 50)
    others[0] = 1e9
    clipped = others.copy()
    clipped[0] = 100
    assert attack(members, others) == attack(members, clipped)


def test_the_larger_side_is_subsampled_and_the_seed_fixes_it():
    rng = np.random.default_rng(8)
    members, others = rng.normal(2, 1, 40), rng.normal(2.4, 1, 90)
    first = attack(members, others, seed=1)
    assert first.n == 40 and first == attack(members, others, seed=1)
    assert first.auc.value != attack(members, others, seed=2).auc.value


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
    result = attack(members, others)
    assert said in result.reason
    values = (result.accuracy, result.accuracy_std, result.auc.value, result.auc.stderr, *result.auc.interval)
    assert all(map(math.isnan, values))


def test_where_there_are_too_few_samples_for_one_attack_no_other_is_certain():
    few = [
        Sample("a", str(i), i, {"loss": (1.0, 2.0), "mia_zlib_auc pair": (2.0, 1.0), "mia_zlib_auc": 1.0})
        for i in range(3)
    ]
    for metric in ("mia_auc", "mia_zlib_auc"):
        assert math.isnan(METRICS[metric].of_set(few, {"seed": 0}).value)
