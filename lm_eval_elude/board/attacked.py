"""The attacks on the weights that came with a submission: checked against its run, and against the keeper's own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval_elude.board.contradictions import difference
from lm_eval_elude.board.submission import STRESS, Packed
from lm_eval_elude.errors import UserError
from lm_eval_elude.scoring.benchmark import MEASURED, as_row
from lm_eval_elude.scoring.benchmarks import BENCHMARKS, task_report
from lm_eval_elude.scoring.estimates import Estimate, average
from lm_eval_elude.scoring.settings import Settings
from lm_eval_elude.stress.outcome import CHECKPOINT, ORIGINAL, REFERENCE, START, TASK, Outcome

AGAIN = 0.1  # by which the recovery of a second run may be higher: devices round, and training makes more of it
_REPEATED = ("targets", "truth_ratio", "fingerprint")  # settings that are those of the run


def strongest(outcome: Outcome) -> tuple[str, Estimate]:
    """The attack that brought back most, and its recovery: the mean of those of both metrics.

    Raises:
        UserError: no attack has a point that counts.
    """
    worst = outcome.strongest
    if worst is None:
        raise UserError(f"{STRESS}: no attack has a point that counts")
    return worst.attack, average([*worst.recovery.values()])


def check(run: Packed, docs: Sequence[Mapping[str, Any]], settings: Settings) -> Outcome:
    """The attacks of a submission, if what is in the files agrees with its run and with the table of attacks.

    What a point keeps of the retain quality, and that no other point was worse, only another run can say.

    Args:
        docs: the documents of the forget set, as they must be.
        settings: of the run, with the data set that is at hand: what it cannot teach is no attack of its suite.

    Raises:
        UserError: it does not; the message says where.
    """
    from lm_eval_elude.stress.weights import WEIGHT_ATTACKS, lacking  # with torch, which a board does without

    outcome, scored = Outcome(run.folder / STRESS), run.settings(TASK)
    outcome.must_be_of(CHECKPOINT, run, STRESS)
    if odd := [name for name in _REPEATED if outcome.summary.get(name) != scored[name]]:
        raise UserError(f"{STRESS}: {', '.join(odd)} differ from those of the run")
    suite = outcome.summary.get("suite")
    if suite not in ("quick", "full"):
        raise UserError(f"{STRESS}: made by --suite {suite!r}; a submission's is quick or full")
    stated = {name: (row.get("original"), row.get("inside")) for name, row in outcome.attacks.items()}
    records: list[Any] = [record for record, _ in BENCHMARKS[TASK].records(settings)]
    suited = [row for row in WEIGHT_ATTACKS.values() if getattr(row, suite)]
    suited = [row for row in suited if not lacking(row, suite, records, settings, 0)]
    if stated != {row.name: (row.original, row.inside) for row in suited}:
        raise UserError(f"{STRESS}: its attacks are not those of a suite of this version on these data")
    expected = [_asked(doc) for doc in docs]
    places = [(START, role) for role in (CHECKPOINT, REFERENCE, ORIGINAL)]
    places += [(name, role) for name in outcome.worst for role in (CHECKPOINT, REFERENCE)]
    for name, role in places:
        of_point = outcome.run(name, role)
        logged = [_asked(row["doc"]) for row in of_point.rows(TASK)]
        if any(logged.count(doc) * len(expected) != expected.count(doc) * len(logged) for doc in expected):
            raise UserError(f"{STRESS}: the documents of {name}, {role}, are not those of the forget set")
        formed = as_row(task_report(TASK, of_point.samples(TASK), of_point.settings(TASK)))
        known = {key: value for key, value in formed.items() if not math.isnan(value)}  # the rest is written as null
        reported = {key: of_point.results["results"][TASK].get(key) for key in known}
        if differs := difference(reported, known):
            raise UserError(f"{STRESS}: {name}, {role}{differs}, which does not follow from the samples")
    strongest(outcome)
    return outcome


def _asked(doc: Mapping[str, Any]) -> dict[str, Any]:
    """What of a logged document was asked, without its place."""
    return {name: value for name, value in doc.items() if name != "id" and name not in MEASURED}


def run_again(submitted: Outcome, again: Path, weights: Mapping[str, str]) -> str:
    """What a second run of the attacks, by the keeper, says against the one that was submitted; "" for nothing.

    Args:
        again: the keeper's finished folder of ``elude stress``.
        weights: SHA-256 of the weight files that were asked.

    Raises:
        UserError: the keeper's folder is of other weights, of another suite, or of another reference.
    """
    repeated = Outcome(again)
    if not repeated.is_of(CHECKPOINT, [{"weights": dict(weights)}]):
        raise UserError(f"--stress {again}: its checkpoint is not the one that --rescore names")
    if odd := [name for name in (*_REPEATED, "suite") if repeated.summary.get(name) != submitted.summary.get(name)]:
        raise UserError(f"--stress {again}: {', '.join(odd)} differ from those submitted")
    for role in (REFERENCE, ORIGINAL):
        if not repeated.is_of(role, submitted.summary["models"][role].get("checkpoint") or ()):
            raise UserError(f"--stress {again}: its {role} is not the one that was submitted")
    (name, back), (_, stated) = strongest(repeated), strongest(submitted)
    if back.value - stated.value <= AGAIN:
        return ""
    return f"attacked again: {name} brings back {back.value:.0%}, and {stated.value:.0%} is the most that was submitted"
