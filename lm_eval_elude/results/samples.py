"""One logged document to its measurements: what tasks measure while they run and what is recomputed from a log later.

A logged document holds the record, ``answer_scores`` (sum of log-probabilities and number of tokens of the answer, the
paraphrase and the wrong answers, in this order) and, where something was generated, ``generated``. Where there is a
reference, ``reference`` holds the same of it, and with a model as reference ``divergence_scores``: of this model's
answer and of the reference's, first under this model, then under the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

from lm_eval_elude.core.likelihood import AnswerScore, TruthRatioMean, harmonic_mean
from lm_eval_elude.core.sets import SetSpec
from lm_eval_elude.metrics import membership, text

MEASURES = ("probability", "rougeL_recall", "truth_ratio")
# Of the generated answer itself, reported with every set: collapse must not pass for forgetting.
TEXT_MEASURES = ("degenerate", "ngram_entropy", "refusal")


class Sample(NamedTuple):
    """What one document contributes to the numbers.

    Attributes:
        target: the entity it counts for ("" in the world set).
        record: the question of the record behind it, the same for all prompts and targets that share it.
        doc_id: its place in the task.
        values: measurements by name; the membership attacks' are pairs (member, other).
    """

    target: str
    record: str
    doc_id: int
    values: Mapping[str, Any]


def answered(spec: SetSpec, doc: Mapping[str, Any], mean: TruthRatioMean = "geometric") -> Sample:
    """Measure one answered question of a set; ``quality`` is the harmonic mean of the sample's own three."""
    scores = [AnswerScore(*pair) for pair in doc["answer_scores"]]
    probability, ratio, truth_ratio = spec.measure(scores, mean)
    rouge = text.rouge_l_recall(doc["answer"], doc["generated"])
    values: dict[str, Any] = {
        "probability": probability,
        "rougeL_recall": rouge,
        "truth_ratio": truth_ratio,
        "quality": harmonic_mean(spec.goodness(probability, rouge, truth_ratio)),
        "degenerate": float(text.is_degenerate(doc["generated"])),
        "ngram_entropy": text.ngram_entropy(doc["generated"]),
        "refusal": float(text.is_refusal(doc["generated"])),
        "truth_ratio_raw": ratio,
    }
    if said := doc.get("reference"):
        known = "answer_scores" in said  # a released log may hold the truth ratio alone
        values["reference"] = answered(spec, {**doc, **said, "reference": None}, mean).values if known else dict(said)
        if pairs := said.get("divergence_scores"):
            own, other, own_there, other_there = (AnswerScore(*pair).mean for pair in pairs)
            values["reference_divergence"] = ((own - own_there) + (other_there - other)) / 2
    return _sample(doc, values)


def compared(doc: Mapping[str, Any], tokens: Sequence[Any] = ()) -> Sample:
    """Measure one record and its paraphrase for the membership attacks.

    Args:
        doc: the document, with the two losses' ``answer_scores``.
        tokens: of the answer and its paraphrase, and again under a reference model where there is one: token
            log-probabilities, whether each is the greedy choice, means and standard deviations of the model's
            distribution, as numbers or as the text that a log has; () where the backend gives none. The first
            ``prompt_tokens`` of each belong to the prompt, as the document says; ``reference_prompt_tokens`` of the
            reference model's.
    """
    member, other = (AnswerScore(*pair).loss for pair in doc["answer_scores"])
    values: dict[str, Any] = {"loss": (member, other)}
    if said := doc.get("reference"):
        values["reference"] = compared({**doc, **said, "reference": None}).values
    if tokens:
        numbers = ((log_probs, means, stds) for log_probs, _, means, stds in tokens)
        first = doc["prompt_tokens"]
        starts = chain((first, first), repeat(doc.get("reference_prompt_tokens", first)))
        sides = [
            tuple([float(v) for v in column[start:]] for column in side)
            for side, start in zip(numbers, starts, strict=False)
        ]
        own, texts = sides[:2], (doc["answer"], doc["paraphrased_answer"])
        values["mia_zlib_auc"] = tuple(membership.zlib_ratio(t[0], x) for t, x in zip(own, texts, strict=True))
        values["mia_min_k_auc"] = tuple(membership.min_k(t[0]) for t in own)
        values["mia_min_k_plus_plus_auc"] = tuple(membership.min_k_plus_plus(*t) for t in own)
        if sides[2:]:
            pairs = zip(own, sides[2:], strict=True)
            values["mia_reference_auc"] = tuple(membership.reference_gap(t[0], r[0]) for t, r in pairs)
    return _sample(doc, values)


def _sample(doc: Mapping[str, Any], values: Mapping[str, Any]) -> Sample:
    return Sample(doc.get("entity", ""), doc.get("plain_question") or doc["question"], doc["id"], values)
