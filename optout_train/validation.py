"""What is measured after each epoch, with the tasks' own formulas, and when a run stops for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from torch import nn

from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.sets import COLLAPSE, SETS, Subset
from lm_eval_elude.errors import UserError
from lm_eval_elude.model.scorer import score_all
from lm_eval_elude.scoring import likelihood
from lm_eval_elude.scoring.likelihood import AnswerScore, RecordMeasures, measure
from optout_train.config import TrainConfig
from optout_train.data import EncodedRecords, TrainingData
from optout_train.sources import Source

# Of the forget facts; a model that knew fewer before training has a high forget quality for nothing.
KNOWN = 0.5


class Validation:
    """The sets that are measured: the forget set itself, and the validation splits of the other two.

    Early stopping needs those that are trained on, with paraphrases (UserError); any other that the data set lacks is
    left out with a line. The validation splits' fingerprints are added to the training data's.
    """

    def __init__(self, config: TrainConfig, data: TrainingData, source: Source, say: Callable[[str], object]) -> None:
        self.size, self.autocast = config.micro_batch_size or 2 * config.batch_size, config.autocast
        sets: dict[Subset, tuple[QARecord, ...]] = {"forget": source.load("forget", "train").records}
        for subset in source.subsets[1:]:
            try:
                selection = source.load(subset, "validation")
            except UserError as error:
                if config.patience and config.set_weights[subset]:
                    raise UserError(f"{error}; --patience 0 trains without early stopping") from None
                say(f"no validation on the {subset} set: {error}")
                continue
            sets[subset] = selection.records
            data.fingerprints[f"{subset}-validation"] = selection.fingerprint
        if source.remark:
            say(source.remark)
        self.sets: dict[Subset, EncodedRecords] = {}
        for name, records in sets.items():
            usable = tuple(record for record in records if record.can_be_scored)
            if len(usable) < len(records):
                say(f"validation on {len(usable)} of {len(records)} {name} records: the others lack paraphrases")
            if not usable and config.patience and config.set_weights[name]:
                raise UserError(
                    f"early stopping measures the {name} set, whose records lack paraphrases: give --patience 0"
                )
            if usable:
                self.sets[name] = EncodedRecords(f"{name} validation", usable, data.forget.renderer, data.forget.limit)

    def measure(self, scorer: nn.Module) -> dict[str, float]:
        """Probability and truth ratio of each set, forget and retain quality of these, and the score, in [0, 1].

        The qualities lack ROUGE (nothing is generated); the score is their harmonic mean. The model is in ``scorer``, a
        :class:`lm_eval_elude.model.scorer.Scorer` or its wrapper.
        """
        measures: dict[str, float] = {}
        for name, data in self.sets.items():
            samples = [
                data.encode(i, text)
                for i, record in enumerate(data.records)
                for text in (record.answer, record.paraphrased_answer, *record.perturbed_answer)
            ]
            each = len(samples) // len(data.records)
            sums, counts = score_all(scorer, samples, self.size, each, self.autocast)
            scores = [AnswerScore(*pair) for pair in zip(sums.tolist(), counts.tolist(), strict=True)]
            of_records = [scores[first : first + each] for first in range(0, len(scores), each)]
            by_target: dict[str, list[RecordMeasures]] = {}  # averaged over targets, as the tasks do
            for record, answers in zip(data.records, of_records, strict=True):
                entity = record.entity if SETS[name].of_target else ""
                by_target.setdefault(entity, []).append(measure(SETS[name], answers))
            for value_name in ("probability", "truth_ratio"):
                means = [fmean(getattr(value, value_name) for value in values) for values in by_target.values()]
                measures[f"{name}_{value_name}"] = fmean(means)
            if name == "forget":
                measures["forget_known"] = fmean(likelihood.knows(answers[1], answers[2:]) for answers in of_records)
        qualities = {}
        if "forget" in self.sets:
            forget = (1 - measures["forget_probability"], measures["forget_truth_ratio"])
            qualities["forget_quality"] = likelihood.harmonic_mean(forget)
        if keep := [value for name, value in measures.items() if not name.startswith("forget")]:
            qualities["retain_quality"] = likelihood.harmonic_mean(keep)
        return measures | qualities | {"score": likelihood.harmonic_mean(tuple(qualities.values()))}


def unknown(measures: Mapping[str, float]) -> str:
    """A warning where :meth:`Validation.measure` says before training that few facts are known, else ""."""
    if (share := measures.get("forget_known", 1.0)) >= KNOWN:
        return ""
    return (
        f"the model knows {share:.0%} of the facts to forget (their paraphrase above all wrong answers; 17% by luck), "
        f"below {KNOWN:.0%}: its forget quality says nothing; `elude known` says which"
    )


class StopDecision(NamedTuple):
    """The epoch whose weights are the best so far (0: none is good), and why to stop ("" to go on)."""

    best: int
    reason: str


def judge(epochs: Sequence[Mapping[str, float]], patience: int) -> StopDecision:
    """The rule of early stopping: ``patience`` bad epochs in a row.

    An epoch is bad where its score is below the epoch's before (the paper's rule, appendix A), or where the model has
    collapsed: the score is no number, or the retain quality is below :data:`COLLAPSE` of what it was before training.
    The best epoch is the latest of highest score among those that have not collapsed. ``epochs`` are the measures
    before training and after each epoch; ``patience`` is above 0.
    """
    scores = [m["score"] for m in epochs]
    keeps = [m.get("retain_quality", 1.0) for m in epochs]
    collapsed = [math.isnan(s) or keep < COLLAPSE * keeps[0] for s, keep in zip(scores, keeps, strict=True)]
    fell = [False, False, *(later < earlier for earlier, later in pairwise(scores[1:]))]
    bad, last = 0, len(epochs) - 1
    for epoch in range(1, len(epochs)):
        bad = bad + 1 if collapsed[epoch] or fell[epoch] else 0
    good = [epoch for epoch in range(1, len(epochs)) if not collapsed[epoch]]
    best = max(good, key=lambda epoch: (scores[epoch], epoch), default=0)
    reason = "validation score fell"
    if collapsed[last]:
        reason = f"collapse: retain quality {keeps[last]:.3f}, {keeps[0]:.3f} before training"
    return StopDecision(best, f"{reason} ({bad} bad epoch(s) in a row up to epoch {last})" if bad >= patience else "")
