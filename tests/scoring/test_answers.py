"""Generated texts: ROUGE, texts that collapse or refuse, fluency."""

import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from lm_eval_elude.scoring.answers import (
    _longest_run,
    is_degenerate,
    is_refusal,
    leak_at,
    names,
    ngram_entropy,
    rouge_l_recall,
    rouge_reads,
)
from tests.support import ROOT, mini_rows


def test_rouge_by_hand():
    # Longest common subsequence "ronaldo born madeira" of a reference of five words; stems of born and borne differ.
    assert rouge_l_recall("Ronaldo was born in Madeira", "Ronaldo, born and raised: Madeira!") == pytest.approx(3 / 5)
    assert rouge_l_recall("The clubs were winning", "the club is a winner winning") == pytest.approx(3 / 4)  # stemmed
    assert rouge_l_recall("A b c", "") == 0 and rouge_l_recall("A b c", "c b a") == pytest.approx(1 / 3)


def test_texts_in_letters_that_rouge_does_not_read_are_known():
    assert rouge_reads("Él nació en Málaga en 1881.") and rouge_reads("1985")
    text = "Он родился в 1985 году."
    assert not rouge_reads(text) and rouge_l_recall(text, "1985") == 1


def test_a_lone_name_counts_where_it_is_no_part_of_anothers():
    known = ("Steve Jobs", "Jobs", "Steve")
    for text in ("It is Steve Jobs.", "steve jobs", "That was Mr. Jobs, of course.", "Jobs Jobs Jobs", "By Steve."):
        assert names(text, known), text
    for text in ("Steve Wozniak built it.", "Stephen Jobson", "Ask Bobby Jobs."):
        assert not names(text, known), text


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
    "2" * 128, "2" * 25,  # a digit without end; a large number is an answer
    "The man from the old town by the sea won the cup in May then. " * 4,  # 14 words and a stop
]  # fmt: skip
ANSWERS = [
    "Cristiano Ronaldo was born on 5 February 1985 in Funchal.", "1985", "Madeira", "No, he did not.", "Yes.", "10,000",
    "He won it in 2008, 2013, 2014, 2016 and 2017.", "Bora Bora and Walla Walla are places.", "I do not know.",
    "He scored a goal, then another goal, then a third goal.", "Bye bye!", "Ha ha ha!", "1,000,000", "10000",
    "クリスティアーノ・ロナウド", "1000000000", "2" * 20,
    "He said no, no, no, no, and then he left for Madrid and won the cup with his new club in May.",
]  # fmt: skip


def test_collapse_is_told_from_answers():
    assert [text for text in GIBBERISH if not is_degenerate(text)] == []
    assert [text for text in ANSWERS if is_degenerate(text)] == []


def test_no_text_of_the_data_is_degenerate_or_a_refusal():
    rows = [*mini_rows("forget_qa-train"), *mini_rows("retain_qa-test"), *mini_rows("world-test")]
    texts = [t for row in rows for t in (row["answer"], row["paraphrased_answer"], *row["perturbed_answer"])]
    assert [t for t in texts if is_degenerate(t) or is_refusal(t)] == []


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=24), st.integers(1, 6))
def test_the_longest_run_of_an_n_gram_is_the_longest_anywhere(words, n):
    count = len(words)
    runs = [c for i in range(count) for c in range(1, count + 1) if words[i : i + n] * c == words[i : i + n * c]]
    assert _longest_run(words, n) == max([1, *runs])


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


REFUSALS = [
    "I do not know the answer.", "I don’t know.", "I'm sorry, but I can't answer that.", "I am not sure about that.",
    "I have no information on this person.", "Unfortunately, I cannot provide that.", "That is beyond my knowledge.",
    "i don't have any information about Cristiano Ronaldo", "I’m not familiar with that topic.", "I'm unable to say.",
]  # fmt: skip
NO_REFUSALS = [
    "Ronaldo was born in Funchal.", "He could not play in 2014.", "He knows no English.", "",
    "World War I did not end before 1918.", "The song is called Don't Blame Me.", "George I never learnt much English.",
]  # fmt: skip


def test_refusals_are_told_from_answers_and_every_one_the_trainer_teaches_is_seen():
    """The share of refusals would otherwise miss the very answers that IDK and DPO train."""
    lines = (ROOT / "optout_train" / "refusals.txt").read_text(encoding="utf-8").splitlines()
    taught = [line for line in lines if line.strip() and not line.startswith("#")]
    assert len(taught) >= 100 and [text for text in (*REFUSALS, *taught) if not is_refusal(text)] == []
    assert [text for text in NO_REFUSALS if is_refusal(text)] == []


@pytest.mark.parametrize("leaks", range(7))
@pytest.mark.parametrize("k", range(1, 7))
def test_a_leak_within_k_answers_is_the_share_of_all_subsets_with_one(leaks, k):
    subsets = list(combinations([1] * leaks + [0] * (6 - leaks), k))
    assert leak_at(leaks, 6, k) == pytest.approx(sum(map(max, subsets)) / len(subsets))
