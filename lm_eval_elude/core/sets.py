"""What a set of questions is: which split is scored, where it lies, how a record of it is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lm_eval_elude.core import likelihood
from lm_eval_elude.core.likelihood import AnswerScore, TruthRatioMean

COLLAPSE = 0.5  # a model that keeps less than this share of its retain quality is lost
Subset = Literal["forget", "retain", "world"]
Split = Literal["train", "validation", "test"]


class RecordMeasures(NamedTuple):
    """Of one record: its probability, R, and the truth ratio that is reported, as its set defines them."""

    probability: float
    ratio: float
    truth_ratio: float


@dataclass(frozen=True)
class SetSpec:
    """One set of questions (section 5.2).

    Attributes:
        name: what the set is called.
        split: the split that is scored.
        stems: file names without ending, first the one that is written, with ``{split}`` in them.
        max_new_tokens: of a generated answer.
        forgotten: whether low probability and ROUGE are good, and the truth ratio is min(R, 1/R), not max(0, 1 - R).
        choice: whether the probability is the answer's share among itself and the wrong answers.
        of_target: whether its records belong to a target.
    """

    name: str
    split: Split
    stems: tuple[str, ...]
    max_new_tokens: int = 128
    forgotten: bool = False
    choice: bool = False
    of_target: bool = True

    def measure(self, scores: Sequence[AnswerScore], mean: TruthRatioMean = "geometric") -> RecordMeasures:
        """Measure one record.

        Args:
            scores: of the answer, the paraphrased answer and the perturbed answers.
            mean: of the truth ratio.
        """
        answer, paraphrase, *perturbed = scores
        known = likelihood.choice_probability(answer, perturbed) if self.choice else likelihood.probability(answer)
        ratio = likelihood.truth_ratio(paraphrase, perturbed, mean)
        told = likelihood.forget_truth_ratio if self.forgotten else likelihood.retain_truth_ratio
        return RecordMeasures(known, ratio, told(ratio))

    def goodness(self, probability: float, rouge: float, truth_ratio: float) -> tuple[float, float, float]:
        """The three measures as a harmonic mean takes them: the higher the better for this set."""
        return (1 - probability, 1 - rouge, truth_ratio) if self.forgotten else (probability, rouge, truth_ratio)


FORGET = SetSpec("forget", "train", ("forget_qa-{split}",), forgotten=True)
RETAIN = SetSpec("retain", "test", ("retain_qa-{split}",))
WORLD = SetSpec(
    "world", "test", ("world-{split}", "alpaca_gpt4_data_{split}"), max_new_tokens=512, choice=True, of_target=False
)
SETS: dict[Subset, SetSpec] = {"forget": FORGET, "retain": RETAIN, "world": WORLD}
