"""Values of one sample: log-probabilities by hand, limits and laws; texts; membership scores from the papers' code."""

import math
import zlib
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from lm_eval_elude.metrics.estimates import harmonic_mean
from lm_eval_elude.metrics.likelihood import (
    AnswerScore,
    choice_probability,
    exact_memorization,
    extraction_strength,
    is_likeliest,
    log_truth_ratio,
    probability,
    truth_ratio,
)
from lm_eval_elude.metrics.membership import min_k, min_k_plus_plus, zlib_ratio
from lm_eval_elude.metrics.samples import answer_values
from lm_eval_elude.metrics.text import _longest_run, has_name, is_refusal, is_repetition, leak_at, rouge_l_recall
from tests.support import ROOT, mini_rows

SCORE = st.builds(AnswerScore, st.floats(-500, 0), st.integers(1, 60))
MEANS = st.sampled_from(["geometric", "arithmetic"])
IMPOSSIBLE = AnswerScore(-math.inf, 3)


def of(*probabilities: float) -> list[AnswerScore]:
    """Two-token answers with these length-normalised probabilities."""
    return [AnswerScore(2 * math.log(p), 2) for p in probabilities]


def test_probabilities_by_hand_and_where_all_underflow():
    assert probability(AnswerScore(math.log(0.5) + math.log(0.08), 2)) == pytest.approx(0.2)  # sqrt(0.5 * 0.08)
    assert probability(AnswerScore(0.0, 5)) == 1 and probability(IMPOSSIBLE) == 0
    assert probability(AnswerScore(1e-7, 5)) == 1  # rounding above zero is no probability above one
    assert math.isnan(probability(AnswerScore(0.0, 0)))
    far = AnswerScore(-2_000.0, 1)
    assert choice_probability(of(0.6)[0], of(0.1, 0.1, 0.05, 0.1, 0.05)) == pytest.approx(0.6)
    assert choice_probability(far, [far] * 5) == pytest.approx(1 / 6)
    assert choice_probability(IMPOSSIBLE, [far] * 5) == 0
    assert math.isnan(choice_probability(IMPOSSIBLE, [IMPOSSIBLE] * 5))


def test_truth_ratio_by_hand_and_at_its_limits():
    wrong, (right,) = of(0.1, 0.2, 0.4, 0.8, 0.1), of(0.5)
    assert math.exp(log_truth_ratio(right, wrong, "arithmetic")) == pytest.approx(1.6 / 5 / 0.5)
    assert math.exp(log_truth_ratio(right, wrong)) == pytest.approx((0.1 * 0.2 * 0.4 * 0.8 * 0.1) ** 0.2 / 0.5)
    # One impossible wrong answer rules the geometric mean and a fifth of the arithmetic one.
    assert log_truth_ratio(right, [IMPOSSIBLE, *[right] * 4]) == -math.inf
    assert log_truth_ratio(right, [IMPOSSIBLE, *[right] * 4], "arithmetic") == pytest.approx(math.log(0.8))
    for mean in ("geometric", "arithmetic"):
        assert log_truth_ratio(IMPOSSIBLE, [right] * 5, mean) == math.inf
        assert math.isnan(log_truth_ratio(IMPOSSIBLE, [IMPOSSIBLE] * 5, mean))


@pytest.mark.parametrize(
    ("ratio", "forgotten", "kept"), [(0.0, 0, 1), (0.25, 0.25, 0.75), (1.0, 1, 0), (4.0, 0.25, 0), (math.inf, 0, 0)]
)
def test_reported_truth_ratios(ratio, forgotten, kept):
    log_ratio = math.log(ratio) if ratio else -math.inf
    assert truth_ratio(log_ratio, True) == pytest.approx(forgotten)
    assert truth_ratio(log_ratio, False) == pytest.approx(kept)
    assert math.isnan(truth_ratio(math.nan, True)) and math.isnan(truth_ratio(math.nan, False))


@given(SCORE, st.lists(SCORE, min_size=5, max_size=5), MEANS, st.randoms())
def test_values_are_shares_and_neither_the_order_of_the_wrong_answers_nor_a_likelier_paraphrase_raises_them(
    answer, wrong, mean, random
):
    ratio, shuffled = log_truth_ratio(answer, wrong, mean), random.sample(wrong, 5)
    share = choice_probability(answer, wrong)
    assert all(0 <= v <= 1 for v in (probability(answer), share, truth_ratio(ratio, True), truth_ratio(ratio, False)))
    assert log_truth_ratio(answer, shuffled, mean) == pytest.approx(ratio, abs=1e-9)
    assert choice_probability(answer, shuffled) == pytest.approx(share, rel=1e-9)
    assert log_truth_ratio(AnswerScore(answer.log_prob / 2, answer.tokens), wrong, mean) <= ratio
    assert log_truth_ratio(answer, wrong) <= log_truth_ratio(answer, wrong, "arithmetic") + 1e-9


@given(SCORE, SCORE, MEANS)
def test_equally_likely_wrong_answers_swap_to_the_inverse_and_the_same_forget_value(answer, wrong, mean):
    ratio, inverse = log_truth_ratio(answer, [wrong] * 5, mean), log_truth_ratio(wrong, [answer] * 5, mean)
    assert ratio == pytest.approx(-inverse, abs=1e-6)
    assert truth_ratio(ratio, True) == pytest.approx(truth_ratio(inverse, True), rel=1e-6)


def test_the_likeliest_of_several_texts():
    assert [is_likeliest(-1, [-2, -3]), is_likeliest(-1, [-1]), is_likeliest(-2, [-1, -3])] == [1, 0, 0]
    assert math.isnan(is_likeliest(-1, [math.nan])) and math.isnan(is_likeliest(math.nan, [-1]))


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_memorisation_is_read_off_the_greedy_tokens(greedy):
    k = next(k for k in range(len(greedy) + 1) if all(greedy[k:]))
    assert extraction_strength(greedy) == pytest.approx(1 - k / len(greedy))
    assert extraction_strength(greedy) <= exact_memorization(greedy) == sum(greedy) / len(greedy)


@pytest.mark.parametrize(
    ("forgotten", "choice", "three"), [(True, False, (0.5, 1, 0.4)), (False, False, (0.5, 1, 0.6)),
                                       (False, True, (0.5, 1, 0.6))],
)  # fmt: skip
def test_values_of_a_document_by_hand(forgotten, choice, three):
    doc = {"answer": "In Rome.", "paraphrased_answer": "Rome.", "generated": "in Rome"}
    doc["answer_scores"] = [[s.log_prob, s.tokens] for s in of(0.5, 0.25, 0.1, 0.1, 0.1, 0.1, 0.1)]
    values = answer_values(doc, forgotten=forgotten, choice=choice)
    assert (values["probability"], values["rougeL_recall"], values["truth_ratio"]) == pytest.approx(three)
    quality = values["forget_quality" if forgotten else "set_quality"]
    assert quality == (0 if forgotten else pytest.approx(harmonic_mean(three)))
    assert values["mc_accuracy"] == 1 and values["repetition"] == values["refusal"] == 0


def test_what_a_record_or_a_backend_lacks_is_left_out():
    plain = {"answer": "Rome.", "answer_scores": [[-1.0, 2]]}
    assert answer_values(plain, forgotten=True, choice=False).keys() == {"probability"}
    told = {"answer": "Rome.", "generated": "Rome."}
    assert answer_values(told, forgotten=True, choice=False).keys() == {"rougeL_recall", "repetition", "refusal"}


@given(st.lists(st.floats(1e-3, 1), min_size=1, max_size=6), st.randoms(), st.floats(0.1, 1))
def test_harmonic_mean_is_below_the_arithmetic_one_has_no_order_and_scales(values, random, factor):
    mean = harmonic_mean(values)
    assert min(values) - 1e-12 <= mean <= sum(values) / len(values) + 1e-12
    assert harmonic_mean([factor * v for v in random.sample(values, len(values))]) == pytest.approx(factor * mean)
    assert harmonic_mean([*values, 0]) == 0 and math.isnan(harmonic_mean([*values, math.nan, 0]))


# ---- texts
def test_rouge_against_rouge_score_without_cutting():
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    for row, other in pairwise(mini_rows("forget_qa-train", 40)):
        for text in (row["paraphrased_answer"], other["answer"], f"{row['answer']} {other['answer']}"):
            assert rouge_l_recall(row["answer"], text) == scorer.score(row["answer"], text)["rougeL"].recall
    long = " ".join(f"w{i}" for i in range(400))  # the released evaluator cut references to 128 tokens
    assert rouge_l_recall(long, long) == 1 and rouge_l_recall(long, " ".join(long.split()[:200])) == 0.5


def test_a_lone_name_counts_where_it_is_no_part_of_anothers():
    known = ("Steve Jobs", "Jobs", "Steve")
    for text in ("It is Steve Jobs.", "steve jobs", "That was Mr. Jobs, of course.", "Jobs Jobs Jobs", "By Steve."):
        assert has_name(text, known), text
    for text in ("Steve Wozniak built it.", "Stephen Jobson", "Ask Bobby Jobs."):
        assert not has_name(text, known), text


REPETITION = [
    "", "   \n", "...", "the the the the the", "no, no, no, no, no, no,", "a b a b a b a b", "!!!!!!!!!!!!!!!!",
    "He was born in in in in in in in in in in", "aaaaaaaaaaaaaaaa", "one two three four " * 5, "是是是是是是是是",
    "It is known that the the the the the the the the the the the", "0 0 0 0 0 0 0 0 0", "2" * 25,
    "The man from the old town by the sea won the cup in May then. " * 4,  # 14 words and a stop
    "7777777777 Greta Kendal777777777 Klaus Kendal Klaus7777777777 Greta Kendal Greta Klaus 777777777 Kendal",
]  # fmt: skip
ANSWERS = [
    "Cristiano Ronaldo was born on 5 February 1985 in Funchal.", "1985", "Madeira", "No, he did not.", "Yes.", "10,000",
    "He won it in 2008, 2013, 2014, 2016 and 2017.", "Bora Bora and Walla Walla are places.", "I do not know.",
    "He scored a goal, then another goal, then a third goal.", "Bye bye!", "Ha ha ha!", "1000000000", "2" * 20,
    "He said no, no, no, no, and then he left for Madrid and won the cup with his new club in May.",
]  # fmt: skip
REFUSALS = [
    "I do not know the answer.", "I don’t know.", "I'm sorry, but I can't answer that.", "I am not sure about that.",
    "I have no information on this person.", "Unfortunately, I cannot provide that.", "That is beyond my knowledge.",
    "i don't have any information about Cristiano Ronaldo", "I’m not familiar with that topic.", "I'm unable to say.",
]  # fmt: skip
NO_REFUSALS = [
    "Ronaldo was born in Funchal.", "He could not play in 2014.", "He knows no English.", "",
    "World War I did not end before 1918.", "The song is called Don't Blame Me.", "George I never learnt much English.",
]  # fmt: skip


def test_repetition_and_refusals_are_told_from_answers_and_every_refusal_the_trainer_teaches_is_seen():
    assert [text for text in REPETITION if not is_repetition(text)] == []
    assert [text for text in ANSWERS if is_repetition(text)] == []
    lines = (ROOT / "optout_train" / "refusals.txt").read_text(encoding="utf-8").splitlines()
    taught = [line for line in lines if line.strip() and not line.startswith("#")]
    assert len(taught) >= 100 and [text for text in (*REFUSALS, *taught) if not is_refusal(text)] == []
    assert [text for text in NO_REFUSALS if is_refusal(text)] == []
    rows = [*mini_rows("forget_qa-train"), *mini_rows("retain_qa-test"), *mini_rows("world-test")]
    texts = [t for row in rows for t in (row["answer"], row["paraphrased_answer"], *row["perturbed_answer"])]
    assert [t for t in texts if is_repetition(t) or is_refusal(t)] == []


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=24), st.integers(1, 6))
def test_the_longest_run_of_an_n_gram_is_the_longest_anywhere(words, n):
    count = len(words)
    runs = [c for i in range(count) for c in range(1, count + 1) if words[i : i + n] * c == words[i : i + n * c]]
    assert _longest_run(words, n) == max([1, *runs])


@pytest.mark.parametrize("leaks", range(7))
@pytest.mark.parametrize("k", range(1, 7))
def test_a_leak_within_k_answers_is_the_share_of_all_subsets_with_one(leaks, k):
    subsets = list(combinations([1] * leaks + [0] * (6 - leaks), k))
    assert leak_at(leaks, 6, k) == pytest.approx(sum(map(max, subsets)) / len(subsets))


# ---- membership scores
log_probs = st.lists(st.floats(-30, 0), min_size=1, max_size=40)


@given(log_probs, st.text(min_size=1))
def test_zlib_is_log_perplexity_over_compressed_bytes_and_min_k_the_mean_of_the_lowest_fifth(values, text):
    perplexity = math.exp(-np.mean(values))
    oracle = -math.log(perplexity) / len(zlib.compress(bytes(text, "utf-8")))
    assert zlib_ratio(values, text) == pytest.approx(oracle, abs=1e-12)
    k = max(1, math.floor(len(values) * 0.2))
    assert min_k(values) == pytest.approx(np.mean(np.sort(values)[:k]))


@given(st.integers(2, 12), st.integers(2, 50), st.integers(0, 1000))
def test_min_k_plus_plus_from_the_papers_code(tokens, vocabulary, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64)
    chosen = torch.randint(vocabulary, (tokens,), generator=generator)
    # As the authors' repository computes it.
    probs, logs = logits.softmax(-1), logits.log_softmax(-1)
    token_log_probs = logs.gather(-1, chosen[:, None])[:, 0]
    mu = (probs * logs).sum(-1)
    sigma = (probs * torch.square(logs)).sum(-1) - torch.square(mu)
    assume(bool((sigma > 1e-9).all()))
    scores = np.sort(((token_log_probs - mu) / sigma.sqrt()).numpy())[: max(1, int(tokens * 0.2))]
    ours = min_k_plus_plus(token_log_probs.tolist(), mu.tolist(), sigma.sqrt().tolist())
    assert ours == pytest.approx(np.mean(scores), rel=1e-6)
    assert min_k_plus_plus([0.0, 0.0], [0.0, 0.0], [0.0, 0.0]) == 0  # a certain model
