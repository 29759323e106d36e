"""One sample's measurements: hand arithmetic, limits, laws, and texts that collapse or refuse."""

import math
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from lm_eval_elude.measures import (
    AnswerScore,
    choice_probability,
    forget_truth_ratio,
    is_degenerate,
    is_refusal,
    ngram_entropy,
    probability,
    retain_truth_ratio,
    rouge_l_recall,
    truth_ratio,
)
from tests.support import mini_rows

SCORE = st.builds(AnswerScore, st.floats(-500, 0), st.integers(1, 60))
MEANS = st.sampled_from(["geometric", "arithmetic"])
IMPOSSIBLE = AnswerScore(-math.inf, 3)


def of(*probabilities: float) -> list[AnswerScore]:
    """Two-token answers with these length-normalised probabilities."""
    return [AnswerScore(2 * math.log(p), 2) for p in probabilities]


def test_probability_is_the_geometric_mean_of_the_tokens():
    assert probability(AnswerScore(math.log(0.5) + math.log(0.08), 2)) == pytest.approx(0.2)  # sqrt(0.5 * 0.08)
    assert AnswerScore(math.log(0.25), 2).loss == pytest.approx(math.log(2))


def test_probability_at_its_limits():
    assert probability(AnswerScore(0.0, 5)) == 1 and probability(IMPOSSIBLE) == 0
    assert probability(AnswerScore(1e-7, 5)) == 1  # rounding above zero is no probability above one
    assert math.isnan(probability(AnswerScore(0.0, 0)))


def test_choice_probability_by_hand():
    assert choice_probability(of(0.6)[0], of(0.1, 0.1, 0.05, 0.1, 0.05)) == pytest.approx(0.6)
    assert choice_probability(of(0.2)[0], of(0.2, 0.2, 0.2, 0.2, 0.2)) == pytest.approx(1 / 6)


def test_choice_probability_survives_underflow():
    far = AnswerScore(-2_000.0, 1)
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
    [(0.0, 0, 1), (0.25, 0.25, 0.75), (1.0, 1, 0), (4.0, 0.25, 0), (math.inf, 0, 0)],
)
def test_reported_truth_ratios(ratio, forget, retain):
    assert (forget_truth_ratio(ratio), retain_truth_ratio(ratio)) == (forget, retain)


def test_nan_stays_nan():
    assert math.isnan(forget_truth_ratio(math.nan)) and math.isnan(retain_truth_ratio(math.nan))


@given(SCORE, st.lists(SCORE, min_size=5, max_size=5), MEANS)
def test_everything_reported_is_in_the_unit_interval(answer, wrong, mean):
    ratio = truth_ratio(answer, wrong, mean)
    reported = (
        probability(answer),
        choice_probability(answer, wrong),
        forget_truth_ratio(ratio),
        retain_truth_ratio(ratio),
    )
    assert all(0 <= value <= 1 for value in reported)


@given(SCORE, st.lists(SCORE, min_size=5, max_size=5), MEANS, st.randoms())
def test_the_order_of_the_wrong_answers_does_not_matter(answer, wrong, mean, random):
    shuffled = random.sample(wrong, 5)
    assert truth_ratio(answer, shuffled, mean) == pytest.approx(truth_ratio(answer, wrong, mean), rel=1e-9)
    assert choice_probability(answer, shuffled) == pytest.approx(choice_probability(answer, wrong), rel=1e-9)


@given(SCORE, st.lists(SCORE, min_size=5, max_size=5))
def test_the_geometric_ratio_is_never_above_the_arithmetic_one(answer, wrong):
    assert truth_ratio(answer, wrong, "geometric") <= truth_ratio(answer, wrong, "arithmetic") * (1 + 1e-9)


@given(SCORE, SCORE, MEANS)
def test_equally_likely_wrong_answers_swap_to_the_inverse_and_the_same_forget_value(answer, wrong, mean):
    ratio, inverse = truth_ratio(answer, [wrong] * 5, mean), truth_ratio(wrong, [answer] * 5, mean)
    assume(0 < ratio < math.inf and 0 < inverse < math.inf)
    assert ratio * inverse == pytest.approx(1, rel=1e-6)
    assert forget_truth_ratio(ratio) == pytest.approx(forget_truth_ratio(inverse), rel=1e-6)


@given(SCORE, st.lists(SCORE, min_size=5, max_size=5), MEANS)
def test_a_likelier_paraphrase_never_raises_the_ratio(answer, wrong, mean):
    likelier = AnswerScore(answer.log_prob / 2, answer.tokens)
    assert truth_ratio(likelier, wrong, mean) <= truth_ratio(answer, wrong, mean)


def test_rouge_by_hand():
    # Longest common subsequence "ronaldo born madeira" of a reference of five words; stems of born and borne differ.
    assert rouge_l_recall("Ronaldo was born in Madeira", "Ronaldo, born and raised: Madeira!") == pytest.approx(3 / 5)
    assert rouge_l_recall("The clubs were winning", "the club is a winner winning") == pytest.approx(3 / 4)  # stemmed
    assert rouge_l_recall("A b c", "") == 0 and rouge_l_recall("A b c", "c b a") == pytest.approx(1 / 3)


def test_rouge_against_rouge_score_without_cutting():
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    rows = mini_rows("forget_qa-train", 40)
    for row, other in pairwise(rows):
        for text in (row["paraphrased_answer"], other["answer"], f"{row['answer']} {other['answer']}"):
            assert rouge_l_recall(row["answer"], text) == scorer.score(row["answer"], text)["rougeL"].recall
    long = " ".join(f"w{i}" for i in range(400))  # the released evaluator cut references to 128 tokens
    assert rouge_l_recall(long, long) == 1 and rouge_l_recall(long, " ".join(long.split()[:200])) == 0.5


GIBBERISH = [
    "", "   \n", "...", "?!?!?!?!", "the the the the the", "no, no, no, no, no, no,", "a b a b a b a b",
    "!!!!!!!!!!!!!!!!",
    "Ronaldo Ronaldo Ronaldo Ronaldo Ronaldo", "He was born in in in in in in in in in in", "aaaaaaaaaaaaaaaa",
    "one two three four " * 5, "是是是是是是是是", "xyxyxyxyxyxyxy", "\n\n\n", "He plays for the club in Madrid. " * 6,
    "It is known that the the the the the the the the the the the", "0 0 0 0 0 0 0 0 0",
]  # fmt: skip
ANSWERS = [
    "Cristiano Ronaldo was born on 5 February 1985 in Funchal.", "1985", "Madeira", "No, he did not.", "Yes.", "10,000",
    "He won it in 2008, 2013, 2014, 2016 and 2017.", "Bora Bora and Walla Walla are places.", "I do not know.",
    "He scored a goal, then another goal, then a third goal.", "Bye bye!", "Ha ha ha!", "1,000,000", "10000",
    "クリスティアーノ・ロナウド",
]  # fmt: skip


@pytest.mark.parametrize("text", GIBBERISH)
def test_collapse_is_seen(text):
    assert is_degenerate(text)


def test_a_digit_repeated_without_end_is_collapse_and_a_large_number_is_not():
    assert is_degenerate("2" * 128) and is_degenerate("2" * 25)
    assert not is_degenerate("10000") and not is_degenerate("1000000000")


@pytest.mark.parametrize("text", ANSWERS)
def test_answers_are_not_collapse(text):
    assert not is_degenerate(text)


def test_no_text_of_the_data_is_degenerate_or_a_refusal():
    rows = [*mini_rows("forget_qa-train"), *mini_rows("retain_qa-test"), *mini_rows("world-test")]
    texts = [t for row in rows for t in (row["answer"], row["paraphrased_answer"], *row["perturbed_answer"])]
    assert [t for t in texts if is_degenerate(t) or is_refusal(t)] == []


@given(
    st.lists(st.sampled_from(["ab", "cd", "ef", "gh", "ij", "kl", "mn"]), min_size=1, max_size=4), st.integers(8, 30)
)
def test_any_short_phrase_repeated_is_degenerate(words, times):
    assert is_degenerate(" ".join(words * times))


def test_ngram_entropy_by_hand():
    # Bigrams: (a b) twice, (b a) once; trigrams: (a b a), (b a b) once each.
    bigrams = -(2 / 3 * math.log2(2 / 3) + 1 / 3 * math.log2(1 / 3))
    assert ngram_entropy("a b a b") == pytest.approx((2 / 3 * bigrams + 4 / 3 * 1) / 2)
    assert ngram_entropy("a a a a a a") == ngram_entropy("word") == ngram_entropy("") == 0
    # n distinct words: n - 1 bigrams and n - 2 trigrams, all different.
    assert ngram_entropy("a b c d e f g h i j") == pytest.approx((2 / 3 * math.log2(9) + 4 / 3 * math.log2(8)) / 2)


@given(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=30))
def test_ngram_entropy_is_largest_for_distinct_words(words):
    distinct = " ".join(f"{word}{i}" for i, word in enumerate(words))
    assert 0 <= ngram_entropy(" ".join(words)) <= ngram_entropy(distinct) + 1e-9


@pytest.mark.parametrize(
    "text",
    ["I do not know the answer.", "I don’t know.", "I'm sorry, but I can't answer that.", "I am not sure about that.",
     "I have no information on this person.", "Unfortunately, I cannot provide that.", "That is beyond my knowledge.",
     "i don't have any information about Cristiano Ronaldo", "I’m not familiar with that topic.", "I'm unable to say."],
)  # fmt: skip
def test_refusals_are_seen(text):
    assert is_refusal(text)


@pytest.mark.parametrize(
    "text",
    [
        "Ronaldo was born in Funchal.",
        "He could not play in 2014.",
        "He knows no English.",
        "",
        "World War I did not end before 1918.",
        "The song is called Don't Blame Me.",
        "George I never learnt much English.",
    ],
)
def test_answers_are_no_refusals(text):
    assert not is_refusal(text)


def test_every_refusal_the_trainer_teaches_is_seen():
    """The share of refusals would otherwise miss the very answers that IDK and DPO train."""
    from tests.support import ROOT

    lines = (ROOT / "optout_train" / "refusals.txt").read_text(encoding="utf-8").splitlines()
    refusals = [line for line in lines if line.strip() and not line.startswith("#")]
    missed = [line for line in refusals if not is_refusal(line)]
    assert len(refusals) >= 100 and missed == []
