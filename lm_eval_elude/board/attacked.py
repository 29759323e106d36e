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
from lm_eval_elude.scoring.runs import Run
from lm_eval_elude.scoring.settings import Settings
from lm_eval_elude.stress.outcome import CHECKPOINT, ORIGINAL, REFERENCE, START, TASK, Outcome

# By which the recovery of a second run may be higher: devices round, and training makes more of it.
RECOVERY_TOLERANCE = 0.1
_REPEATED = ("targets", "truth_ratio", "fingerprint")  # settings that are those of the run


def check(run: Packed, docs: Sequence[Mapping[str, Any]], settings: Settings) -> Outcome:
    """The attacks of a submission; UserError where what is in the files does not agree with its run and our attacks.

    What a point keeps of the retain quality, and that no other point was worse, only another run can say. ``docs`` are
    the documents of the forget set, as they must be. ``settings`` are those of the run with the data set that is at
    hand: what it cannot teach is no attack of its suite.
    """
    outcome = Outcome(run.folder / STRESS)
    check_complete_suite(outcome, run, settings, STRESS)
    expected = [_asked(doc) for doc in docs]
    places = [(START, role) for role in (CHECKPOINT, REFERENCE, ORIGINAL)]
    places += [(name, role) for name in outcome.worst for role in (CHECKPOINT, REFERENCE)]
    for name, role in places:
        of_point = outcome.run(name, role)
        logged = [_asked(row["doc"]) for row in of_point.rows(TASK)]
        if any(logged.count(doc) * len(expected) != expected.count(doc) * len(logged) for doc in expected):
            raise UserError(f"{STRESS}: the documents of {name}, {role}, are not those of the forget set")
        formed = as_row(task_report(TASK, of_point.samples(TASK), of_point.settings(TASK)))
        # An unknown number is null in the file, an unknown error the text "N/A".
        known = {key: value for key, value in formed.items() if value != "N/A" and not math.isnan(value)}
        reported = {key: of_point.results["results"][TASK].get(key) for key in known}
        if differs := difference(reported, known):
            raise UserError(f"{STRESS}: {name}, {role}{differs}, which does not follow from the samples")
    if broken := [name for name, worst in outcome.worst.items() if math.isnan(worst.back.value)]:
        raise UserError(
            f"{STRESS}: {broken[0]} has a worst point at which nothing can be measured, so it does not count"
        )
    if not outcome.strongest():
        raise UserError(f"{STRESS}: no attack has a point that counts")
    return outcome


def check_complete_suite(outcome: Outcome, run: Run, settings: Settings, where: str) -> list[str]:
    """The attacks of the suite that the data set cannot teach, which are left out of it.

    ``settings`` are as those of :func:`check`. UserError, which begins with ``where``, where the attacks are not a
    whole suite on the checkpoint of the run; a glance is none.
    """
    from lm_eval_elude.stress.weights import WEIGHT_ATTACKS, suite_lessons  # with torch, which a board does without

    outcome.must_be_of(CHECKPOINT, run, where)
    if odd := [name for name in _REPEATED if outcome.summary.get(name) != run.settings(TASK)[name]]:
        raise UserError(f"{where}: {', '.join(odd)} differ from those of the run")
    suite = outcome.summary.get("suite")
    if suite not in ("quick", "full"):
        raise UserError(f"{where}: made by --suite {suite!r}; a submission or record takes quick or full")
    stated = {name: (row.get("original"), row.get("inside")) for name, row in outcome.attacks.items()}
    records: list[Any] = [record for record, _ in BENCHMARKS[TASK].records(settings)]
    of_suite = [row for row in WEIGHT_ATTACKS.values() if getattr(row, suite)]
    _, left_out = suite_lessons(of_suite, suite, records, settings, 0)
    if stated != {row.name: (row.original, row.inside) for row in of_suite if row.name not in left_out}:
        raise UserError(f"{where}: its attacks are not those of a suite of this version on these data")
    return list(left_out)


def _asked(doc: Mapping[str, Any]) -> dict[str, Any]:
    """What of a logged document was asked, without its place."""
    return {name: value for name, value in doc.items() if name != "id" and name not in MEASURED}


def run_again(submitted: Outcome, again: Path, weights: Mapping[str, str]) -> str:
    """What the keeper's own folder of ``elude stress`` says against the attacks that were submitted; "" for nothing.

    UserError where that folder is of other ``weights`` (SHA-256 by file), of another suite, or of another reference.
    """
    repeated = Outcome(again)
    if not repeated.is_of(CHECKPOINT, [{"weights": dict(weights)}]):
        raise UserError(f"--stress {again}: its checkpoint is not the one that --rescore names")
    if odd := [name for name in (*_REPEATED, "suite") if repeated.summary.get(name) != submitted.summary.get(name)]:
        raise UserError(f"--stress {again}: {', '.join(odd)} differ from those submitted")
    for role in (REFERENCE, ORIGINAL):
        if not repeated.is_of(role, submitted.summary["models"][role].get("checkpoint") or ()):
            raise UserError(f"--stress {again}: its {role} is not the one that was submitted")
    worse = []
    for name, worst in repeated.worst.items():  # of each attack: a report shows them all, not the strongest alone
        stated = submitted.worst.get(name)
        if stated is None:
            worse.append(f"{name} brings back {worst.back.value:.0%}, and nothing was submitted of it")
        elif not worst.back.value - stated.back.value <= RECOVERY_TOLERANCE:
            worse.append(f"{name} brings back {worst.back.value:.0%}, and {stated.back.value:.0%} was submitted")
    return f"attacked again: {'; '.join(worse)}" if worse else ""
