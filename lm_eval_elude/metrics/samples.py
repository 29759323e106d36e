"""From a document as it is logged to its values, and from the samples of a task to its numbers.

A logged document holds the record's columns and what was measured:

    answer_scores   [sum of log-probabilities, tokens] of the answer, of the paraphrase and the wrong answers where the
                    record has them, and of a reverse query's ``named_answers``, in this order
    generated       the greedy answer; ``sampled`` a list of sampled ones
    greedy          of each token of the answer, whether it is the greedy choice (where the backend says so)
    token_scores    of a membership task: log-probabilities, expected values and deviations of the tokens of the answer
                    and of its paraphrase (where the backend says so)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lm_eval_elude.metrics import likelihood, membership, text
from lm_eval_elude.metrics.estimates import (
    Estimate,
    average,
    combine,
    complement,
    harmonic,
    harmonic_mean,
    mean_of,
)
from lm_eval_elude.metrics.likelihood import AnswerScore
from lm_eval_elude.metrics.membership import Scored, auc
from lm_eval_elude.metrics.table import SAMPLED
from lm_eval_elude.text.words import words

THREE = ("probability", "rougeL_recall", "truth_ratio")  # what forget quality and retain quality are made of
Doc = Mapping[str, Any]
Values = dict[str, Any]
Numbers = dict[str, Estimate]


class Sample(NamedTuple):
    """The values of one document.

    Attributes:
        target: the entity it counts for ("" where it counts for every target, as the world set does).
        record: the question of the record behind it, the same for all prompts and targets that share it.
        doc_id: its place in the task.
        values: by metric; those of membership attacks are pairs (member, paraphrase).
    """

    target: str
    record: str
    doc_id: int
    values: Mapping[str, Any]


# ---- values of a document
def answer_values(doc: Doc, *, forgotten: bool, choice: bool, mean: likelihood.TruthRatioMean = "geometric") -> Values:
    """The values of a question with its answers; what its record or the backend lacks is left out.

    ``forgotten`` and ``choice`` (the world set's probability) say how the set is measured, paper section 5.2.
    """
    scores = [AnswerScore(*pair) for pair in doc.get("answer_scores") or ()]
    named = len(doc.get("named_answers", ()))
    scores, names = scores[: len(scores) - named], scores[len(scores) - named :]
    values: Values = {}
    if scores:
        answer, *others = scores
        right, wrong = (others[0], others[1:]) if doc.get("paraphrased_answer") else (answer, others)
        values["probability"] = (
            likelihood.choice_probability(answer, wrong) if choice and wrong else likelihood.probability(answer)
        )
        if wrong:
            log_ratio = likelihood.log_truth_ratio(right, wrong, mean)
            values["truth_ratio"] = likelihood.truth_ratio(log_ratio, forgotten)
            values["log_truth_ratio"] = log_ratio
            values["mc_accuracy"] = likelihood.is_likeliest(right.mean, [w.mean for w in wrong])
            values["option_accuracy"] = likelihood.is_likeliest(right.log_prob, [w.log_prob for w in wrong])
    if names:
        values["name_mc_accuracy"] = likelihood.is_likeliest(names[0].log_prob, [n.log_prob for n in names[1:]])
    if (generated := doc.get("generated")) is not None:
        values["rougeL_recall"] = text.rouge_l_recall(doc["answer"], generated)
        values["repetition"] = float(text.is_repetition(generated))
        values["refusal"] = float(text.is_refusal(generated))
        if "names" in doc:
            values["name_rate"] = float(text.has_name(generated, doc["names"]))
    if greedy := doc.get("greedy"):
        values["extraction_strength"] = likelihood.extraction_strength(greedy)
        values["exact_memorization"] = likelihood.exact_memorization(greedy)
    if all(name in values for name in THREE):
        p, rouge, ratio = (values[name] for name in THREE)
        values["forget_quality" if forgotten else "set_quality"] = harmonic_mean(
            [1 - p, 1 - rouge, ratio] if forgotten else [p, rouge, ratio]
        )
    return values


def membership_values(doc: Doc) -> Values:
    """Pairs (member, paraphrase) of the scores that the membership attacks compare, higher for a likelier member."""
    values: Values = {"mia_auc": tuple(AnswerScore(*pair).mean for pair in doc["answer_scores"])}
    if tokens := doc.get("token_scores"):
        texts = (doc["answer"], doc["paraphrased_answer"])
        values["mia_zlib_auc"] = tuple(membership.zlib_ratio(t[0], a) for t, a in zip(tokens, texts, strict=True))
        values["mia_min_k_auc"] = tuple(membership.min_k(t[0]) for t in tokens)
        values["mia_min_k_plus_plus_auc"] = tuple(membership.min_k_plus_plus(*t) for t in tokens)
    return values | {"mia_accuracy": values["mia_auc"], "mia_auc_distance": values["mia_auc"]}


def leak_values(doc: Doc) -> Values:
    """Whether the sampled answers hold all tokens of the document's ``fact``, as the chance of a leak in k answers."""
    fact, sampled = doc["fact"], doc["sampled"]
    leaks = sum(words(answer).issuperset(fact) for answer in sampled)
    return {f"leak_at_{k}": text.leak_at(leaks, len(sampled), k) for k in (1, 8, 32, SAMPLED) if k <= len(sampled)}


# ---- numbers of a task
def by_target(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Samples by the target they count for, in the order in which the targets first stand."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.target, []).append(sample)
    return groups


def mean(samples: Sequence[Sample], name: str) -> Estimate:
    """The mean of the targets' means (each target weighs the same), as the paper's tables have it."""
    return average([mean_of((s.record, s.values[name]) for s in group) for group in by_target(samples).values()])


def forget_quality(samples: Sequence[Sample]) -> Estimate:
    """FQ (section 5.2): harmonic mean of 1 - probability, 1 - ROUGE-L recall and min(R, 1/R), each averaged first."""
    probability, rouge, truth_ratio = (mean(samples, name) for name in THREE)
    return harmonic([complement(probability), complement(rouge), truth_ratio])


def set_quality(*kept: Sequence[Sample]) -> Estimate:
    """Harmonic mean of probability, ROUGE-L recall and max(0, 1 - R) of kept sets; RQ (section 5.2) is that of two."""
    return harmonic([mean(samples, name) for samples in kept for name in THREE])


def _sides(samples: Sequence[Sample], name: str) -> tuple[list[Scored], list[Scored]]:
    """Members and paraphrases of a membership attack; a loss is clipped as SCRUB's attack does."""

    def clipped(value: float) -> float:
        return min(max(value, -100.0), 100.0) if name == "mia_auc" and not math.isinf(value) else value

    members, others = ([(s.record, clipped(s.values[name][side])) for s in samples] for side in (0, 1))
    return members, others


def _auc(samples: Sequence[Sample], name: str, seed: int) -> Estimate:
    return average([auc(*_sides(group, name)) for group in by_target(samples).values()])


def _accuracy(samples: Sequence[Sample], name: str, seed: int) -> Estimate:
    groups = by_target(samples).values()
    accuracies = [membership.attack_accuracy(*_sides(group, "mia_auc"), seed) for group in groups]
    return Estimate(sum(accuracies) / len(accuracies), {}, len(samples))


def _distance_from_half(samples: Sequence[Sample], name: str, seed: int) -> Estimate:
    parts = []
    for group in by_target(samples).values():
        area = auc(*_sides(group, "mia_auc"))
        parts.append(combine(abs(area.value - 0.5), [area], [math.copysign(1.0, area.value - 0.5)]))
    return average(parts)


# Numbers that are not the mean over targets of their samples' values.
_OF_SAMPLES: dict[str, Callable[[Sequence[Sample], str, int], Estimate]] = {
    "forget_quality": lambda samples, name, seed: forget_quality(samples),
    "set_quality": lambda samples, name, seed: set_quality(samples),
    "mia_accuracy": _accuracy,
    "mia_auc_distance": _distance_from_half,
    **dict.fromkeys(("mia_auc", "mia_zlib_auc", "mia_min_k_auc", "mia_min_k_plus_plus_auc"), _auc),
}


def numbers(samples: Sequence[Sample], metrics: Iterable[str], seed: int = 0) -> Numbers:
    """The numbers of a task by metric, as far as all samples have their values; ``seed`` is the membership attack's."""
    return {
        name: _OF_SAMPLES[name](samples, name, seed) if name in _OF_SAMPLES else mean(samples, name)
        for name in metrics
        if all(name in sample.values for sample in samples)
    }


def for_each_target(samples: Mapping[str, Sequence[Sample]]) -> dict[str, dict[str, list[Sample]]]:
    """The samples of several tasks by target; those that count for every target stand under each."""
    targets = list(dict.fromkeys(s.target for task in samples.values() for s in task if s.target))
    return {
        target: {task: [s for s in rows if s.target in (target, "")] for task, rows in samples.items()}
        for target in targets
    }
