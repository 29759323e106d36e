"""Probability, truth ratio and harmonic mean: hand arithmetic, limits and laws."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lm_eval_elude.data.sets import SETS
from lm_eval_elude.scoring.likelihood import (
    AnswerScore,
    choice_probability,
    forget_truth_ratio,
    harmonic_mean,
    likeliest,
    measure,
    probability,
    retain_truth_ratio,
    truth_ratio,
)

SCORE = st.builds(AnswerScore, st.floats(-500, 0), st.integers(1, 60))
MEANS = st.sampled_from(["geometric", "arithmetic"])
IMPOSSIBLE = AnswerScore(-math.inf, 3)


def of(*probabilities: float) -> list[AnswerScore]:
    """Two-token answers with these length-normalised probabilities."""
    return [AnswerScore(2 * math.log(p), 2) for p in probabilities]


def test_probability_is_the_geometric_mean_of_the_tokens():
    assert probability(AnswerScore(math.log(0.5) + math.log(0.08), 2)) == pytest.approx(0.2)  # sqrt(0.5 * 0.08)
    assert AnswerScore(math.log(0.25), 2).loss == pytest.approx(math.log(2))
    assert probability(AnswerScore(0.0, 5)) == 1 and probability(IMPOSSIBLE) == 0
    assert probability(AnswerScore(1e-7, 5)) == 1  # rounding above zero is no probability above one
    assert math.isnan(probability(AnswerScore(0.0, 0)))


def test_choice_probability_by_hand_and_where_all_underflow():
    far = AnswerScore(-2_000.0, 1)
    assert choice_probability(of(0.6)[0], of(0.1, 0.1, 0.05, 0.1, 0.05)) == pytest.approx(0.6)
    assert choice_probability(far, [far] * 5) == pytest.approx(1 / 6)
    assert choice_probability(IMPOSSIBLE, [far] * 5) == 0
    assert math.isnan(choice_probability(IMPOSSIBLE, [IMPOSSIBLE] * 5))


def test_truth_ratio_by_hand():
    wrong = of(0.1, 0.2, 0.4, 0.8, 0.1)
    assert truth_ratio(of(0.5)[0], wrong, "arithmetic") == pytest.approx(1.6 / 5 / 0.5)
    assert truth_ratio(of(0.5)[0], wrong) == pytest.approx((0.1 * 0.2 * 0.4 * 0.8 * 0.1) ** 0.2 / 0.5)


def test_truth_ratio_at_its_limits():
    some, far = of(0.5)[0], AnswerScore(-5_000.0, 2)
    for mean in ("geometric", "arithmetic"):
        assert truth_ratio(IMPOSSIBLE, [some] * 5, mean) == math.inf
        assert truth_ratio(some, [IMPOSSIBLE] * 5, mean) == 0
        assert math.isnan(truth_ratio(IMPOSSIBLE, [IMPOSSIBLE] * 5, mean))
        assert truth_ratio(far, [far] * 5, mean) == pytest.approx(1)
    # One impossible wrong answer rules the geometric mean and a fifth of the arithmetic one.
    assert truth_ratio(some, [IMPOSSIBLE, *[some] * 4], "geometric") == 0
    assert truth_ratio(some, [IMPOSSIBLE, *[some] * 4], "arithmetic") == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("ratio", "forget", "retain"),
    [(0.0, 0, 1), (0.25, 0.25, 0.75), (1.0, 1, 0), (4.0, 0.25, 0), (math.inf, 0, 0), (math.nan, math.nan, math.nan)],
)
def test_reported_truth_ratios(ratio, forget, retain):
    reported = (forget_truth_ratio(ratio), retain_truth_ratio(ratio))
    assert reported == pytest.approx((forget, retain), abs=0, nan_ok=True)


@given(SCORE, st.lists(SCORE, min_size=5, max_size=5), MEANS, st.randoms())
def test_values_are_shares_and_neither_the_order_of_the_wrong_answers_nor_a_likelier_paraphrase_raises_them(
    answer, wrong, mean, random
):
    ratio, shuffled, likelier = truth_ratio(answer, wrong, mean), random.sample(wrong, 5), answer.log_prob / 2
    values = [probability(answer), choice_probability(answer, wrong)]
    assert all(0 <= v <= 1 for v in (*values, forget_truth_ratio(ratio), retain_truth_ratio(ratio)))
    assert truth_ratio(answer, shuffled, mean) == pytest.approx(ratio, rel=1e-9)
    assert choice_probability(answer, shuffled) == pytest.approx(values[1], rel=1e-9)
    assert truth_ratio(AnswerScore(likelier, answer.tokens), wrong, mean) <= ratio
    assert truth_ratio(answer, wrong, "geometric") <= truth_ratio(answer, wrong, "arithmetic") * (1 + 1e-9)


@given(SCORE, SCORE, MEANS)
def test_equally_likely_wrong_answers_swap_to_the_inverse_and_the_same_forget_value(answer, wrong, mean):
    ratio, inverse = truth_ratio(answer, [wrong] * 5, mean), truth_ratio(wrong, [answer] * 5, mean)
    assume(0 < ratio < math.inf and 0 < inverse < math.inf)
    assert ratio * inverse == pytest.approx(1, rel=1e-6)
    assert forget_truth_ratio(ratio) == pytest.approx(forget_truth_ratio(inverse), rel=1e-6)


def test_harmonic_mean_by_hand():
    assert harmonic_mean([0.5, 0.25]) == pytest.approx(1 / 3) and harmonic_mean([0.2] * 6) == pytest.approx(0.2)
    assert harmonic_mean([1, 0, 1]) == 0 and math.isnan(harmonic_mean([1, math.nan, 0]))


@given(st.lists(st.floats(1e-3, 1), min_size=1, max_size=6), st.randoms(), st.floats(0.1, 1))
def test_harmonic_mean_is_below_the_arithmetic_one_has_no_order_and_scales(values, random, factor):
    mean = harmonic_mean(values)
    assert min(values) - 1e-12 <= mean <= sum(values) / len(values) + 1e-12
    assert harmonic_mean([factor * v for v in random.sample(values, len(values))]) == pytest.approx(factor * mean)


def test_the_likeliest_of_several_texts_and_of_texts_without_a_probability():
    right, wrong = AnswerScore(-3.0, 3), AnswerScore(-4.0, 9)
    assert likeliest(right, [wrong, wrong]) == 1 and likeliest(wrong, [right]) == likeliest(right, [right]) == 0
    unknown = AnswerScore(math.nan, 3)
    assert math.isnan(likeliest(right, [unknown])) and math.isnan(likeliest(unknown, [right]))


def test_measures_of_a_record_by_hand():
    scores = of(0.5, 0.25, 0.1, 0.1, 0.1, 0.1, 0.1)
    assert measure(SETS["forget"], scores) == pytest.approx((0.5, 0.4, 0.4))
    assert measure(SETS["retain"], scores) == pytest.approx((0.5, 0.4, 0.6))
    assert measure(SETS["world"], scores) == pytest.approx((0.5, 0.4, 0.6))
