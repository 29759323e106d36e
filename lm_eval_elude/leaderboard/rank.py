"""A row of a table: verdict, score, and the numbers beside it, all computed again from logged samples."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from lm_eval_elude.metrics.estimates import Estimate, combine, complement, harmonic
from lm_eval_elude.metrics.verdict import LEAST_GAP, WORDS, Word, verdict
from lm_eval_elude.report.verdicts import ASKED, formats, repetition
from lm_eval_elude.stress.table import FILE, summary
from lm_eval_elude.tasks.elude import ATTACK, CONTROL
from lm_eval_elude.tasks.runs import Run

ORDER = ("forgotten", "forgotten when asked", "partly forgotten", "suppressed", "broken", "not forgotten",
         "too few records")  # fmt: skip
assert {*ORDER} == {*WORDS}
REFUSAL = 0.5  # what a refusal counts as fluent: it is understood, and it shows that something was taken out


class Scored(NamedTuple):
    """A row's numbers; ``recovery`` is None where there is none."""

    verdict: Word
    score: Estimate
    mc_accuracy: Estimate
    utility: Estimate
    repetition: Estimate
    mia_auc: Estimate
    recovery: Estimate | None

    @property
    def key(self) -> tuple[int, float]:
        """What rows are ordered by: the verdict, then the score."""
        return ORDER.index(self.verdict), -self.score.value


def row(run: Run, original: Run, retrained: Run) -> Scored:
    """A checkpoint's row beside the two baselines of its table; ``attacks.csv`` lies beside its results."""
    file = Path(run.path).with_name(FILE)
    found = summary(file, original, retrained).recovery if file.is_file() else None
    recovery = found.share if found else None
    asked = [*formats(run, original, retrained).values()]
    repeated = repetition(run)
    attacks = tuple(task for task in run.samples if task.startswith(ATTACK) and task != CONTROL)
    known = [a.left for a in formats(run, original, retrained, ASKED + attacks).values() if a.gap >= LEAST_GAP]
    forgetting = complement(max(known, key=lambda left: left.value)) if known else Estimate(0.0, {}, 0)
    refusal = run.numbers["elude_forget"]["refusal"]
    fluency = combine(1 - repeated.value - REFUSAL * refusal.value, [repeated, refusal], [-1.0, -REFUSAL])
    utility, goal = (r.numbers["elude_quality"]["retain_quality"] for r in (run, retrained))
    parts = [forgetting, _over(utility, goal.value), fluency, *([complement(recovery)] if recovery else [])]
    return Scored(
        verdict(asked, (repeated.value, repetition(retrained).value), recovery),
        harmonic([_bounded(part) for part in parts]),
        run.numbers["elude_forget"]["mc_accuracy"], utility, repeated, run.numbers["elude_mia"]["mia_auc"], recovery,
    )  # fmt: skip


def _over(value: Estimate, goal: float) -> Estimate:
    return combine(value.value / goal, [value], [1 / goal]) if goal > 0 else Estimate(1.0, {}, value.n)


def _bounded(part: Estimate) -> Estimate:
    """A part of the score in [0, 1]: nothing is gained by going beyond the retrained model."""
    return part._replace(value=min(1.0, max(0.0, part.value)))
