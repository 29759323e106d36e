"""Several runs beside each other: their names, their numbers with errors, differences paired by record, warnings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_elude.errors import UserError
from lm_eval_elude.scoring.benchmarks import BENCHMARKS, GROUPS
from lm_eval_elude.scoring.estimates import Z95, Estimate, difference
from lm_eval_elude.scoring.logs import open_run
from lm_eval_elude.scoring.metrics import METRICS
from lm_eval_elude.scoring.runs import Run, results_files
from lm_eval_elude.scoring.samples import Sample
from lm_eval_elude.stress.outcome import CHECKPOINT, REFERENCE, SUMMARY, Outcome

GIBBERISH = 0.05  # a larger share of degenerate answers is warned of
TOLERANCE = 1e-6  # between a number of the results file and the same one formed from its samples
# What two runs must share to be compared.
SHARED = ("targets", "fingerprint", "truth_ratio", "guardrail", "attack_file", "seed")


class NamedRun:
    """A run under the name that a report gives it.

    Args:
        name: of the run.
        run: the run.
        reference: whether it is the model that never knew the targets.
        beside: that model's run, for the numbers that say how far this one is from it.
    """

    def __init__(self, name: str, run: Run, reference: bool = False, beside: Run | None = None) -> None:
        self.name, self.run, self.reference, self.beside = name, run, reference, beside

    @property
    def title(self) -> str:
        """The name, which says of a reference that it is one."""
        return f"{self.name} (reference)" if self.reference and "reference" not in self.name else self.name

    @cached_property
    def outcome(self) -> Outcome | None:
        """The attacks on the weights of this checkpoint: the folder that was given, or one beside the run."""
        near = [file for folder in self.run.path.absolute().parents[:3] for file in _summaries(folder)]
        return next((found for file in near if self.is_of(found := Outcome(file.parent))), None)

    def is_of(self, outcome: Outcome) -> bool:
        """Whether this run is of the checkpoint whose weights were attacked."""
        scored = self.run.settings(self.run.tasks[0]) if self.run.tasks else {}
        return outcome.is_of(CHECKPOINT, scored.get("checkpoint") or ())

    @cached_property
    def estimates(self) -> dict[tuple[str, str, str], Estimate]:
        """Every number by task or group, target ("" for all together) and metric, with its influence by record."""
        run, other = self.run, self.beside
        samples = {task: run.samples_beside(task, other) if other else run.samples(task) for task in run.tasks}
        targets = list(dict.fromkeys(s.target for measured in samples.values() for s in measured if s.target))
        estimates = self._numbers(samples)
        if len(targets) > 1:
            for target in targets:
                part = {task: [s for s in measured if s.target in (target, "")] for task, measured in samples.items()}
                estimates |= self._numbers(part, target)
        else:
            of_target = {task: any(s.target for s in measured) for task, measured in samples.items()}
            estimates |= {
                (task, target, metric): estimate
                for (task, _, metric), estimate in list(estimates.items())
                for target in targets
                if of_target.get(task, True)
            }
        return estimates

    def _numbers(
        self, samples: Mapping[str, Sequence[Sample]], target: str = ""
    ) -> dict[tuple[str, str, str], Estimate]:
        """The numbers of some samples; the world set, which is no target's, stands under "" alone."""
        numbers = {
            task: BENCHMARKS[task].numbers(measured, self.run.settings(task))
            for task, measured in samples.items()
            if any(s.target == target for s in measured) or (measured and not target)
        }
        if all(samples.values()):  # a --limit may leave a target without samples
            for group in [group for group in GROUPS if group in self.run.results["results"]]:
                try:
                    numbers[group] = GROUPS[group].numbers(samples)
                except (KeyError, ZeroDivisionError):
                    raise UserError(f"{self.run.path}: {group} is in it, but not all of its tasks") from None
        return {(task, target, metric): e for task, of_task in numbers.items() for metric, e in of_task.items()}

    def estimate(self, task: str, metric: str) -> Estimate | None:
        """A number over all targets, None where the run does not have it."""
        return self.estimates.get((task, "", metric))


class Change(NamedTuple):
    """How one number differs between two runs.

    Attributes:
        estimate: after minus before; ``n`` counts the samples of the later run.
        shared: records that both runs asked; the others count as independent draws.
        p_value: two-sided, of no difference (the normal distribution); NaN where the error is not known.
    """

    estimate: Estimate
    shared: int
    p_value: float

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the difference."""
        half = Z95 * self.estimate.stderr
        return self.estimate.value - half, self.estimate.value + half


def change(after: Estimate, before: Estimate) -> Change:
    """The difference of two estimates, paired by record, and the test of no difference."""
    found = difference(after, before)
    error = found.stderr
    if found.value == 0 and error == 0:
        p_value = 1.0
    else:
        p_value = math.erfc(abs(found.value) / error / math.sqrt(2)) if error > 0 else math.nan
    return Change(found, len(after.influence.keys() & before.influence.keys()), p_value)


def named_runs(paths: Sequence[str], reference: str = "", *, utility: bool = False) -> list[NamedRun]:
    """The runs that a user names.

    Args:
        paths: results files, released logs of TOFU, or folders, or ``NAME=PATH``; a folder stands for every results
            file below it, each run called by the folder that it lies in, in the order in which they were made. A
            folder of ``elude stress`` belongs to the run of its checkpoint.
        reference: one of these names, or another path; "" for none.
        utility: whether a run of the utility benchmarks alone is one, too.

    Raises:
        UserError: there is no results file, it is not one of ours, or no run is of an attacked checkpoint.
    """
    attacked = [path for path in paths if (Path(path) / SUMMARY).is_file()]
    paths = [path for path in paths if path not in attacked]
    found = [(name, file) for path in paths for name, file in _files(path)]
    names: list[str] = []
    for name, _ in found:
        twice = [n for n in names if re.fullmatch(rf"{re.escape(name)}( \d+)?", n)]
        names.append(f"{name} {len(twice) + 1}" if twice else name)
    runs = [
        NamedRun(name, open_run(file, utility=utility), name == reference)
        for name, (_, file) in zip(names, found, strict=True)
    ]
    if reference and not any(run.reference for run in runs):
        (name, file), *more = _files(reference)
        if more:
            raise UserError(f"--reference {reference}: has {len(more) + 1} results files; name one of them")
        runs.append(NamedRun(name if name not in names else f"{name} (reference)", open_run(file), True))
    if known := [run.run for run in runs if run.reference]:
        runs = [run if run.reference else NamedRun(run.name, run.run, beside=known[0]) for run in runs]
    for path in attacked:
        outcome = Outcome(Path(path))
        if not (of := [run for run in runs if run.is_of(outcome)]):
            raise UserError(f"{path}: no run here is of the checkpoint whose weights it attacked")
        for run in of:
            run.outcome = outcome
    return runs


def _summaries(folder: Path) -> list[Path]:
    return sorted([*folder.glob(SUMMARY), *folder.glob(f"*/{SUMMARY}")])


def _files(given: str) -> Iterator[tuple[str, Path]]:
    """Name and results file of each run at a path."""
    named, path = "", Path(given)
    if not path.exists() and "=" in given:
        named, rest = given.split("=", 1)
        path = Path(rest)
    if path.is_dir():
        files = sorted(results_files(path), key=lambda file: (file.name, file))
        if not files:
            raise UserError(f"{path} has no results file of lm-eval (results_*.json) in it")
        for file in files:
            inner = file.relative_to(path).parts[:-1]
            yield (inner[0] if len(files) > 1 and inner else named or path.resolve().name), file
        return
    if not path.is_file():
        raise UserError(f"{given}: no such results file or folder")
    yield named or path.resolve().parent.name, path


def warnings(runs: Sequence[NamedRun]) -> list[str]:
    """What a reader must know before believing the numbers, one line each."""
    found = [] if any(run.reference for run in runs) else ["No reference: no run is of a model that never knew."]
    for run in runs:
        found += [f"{run.name}: {text}" for text in _of_one(run)]
    first = runs[0]
    for run in runs[1:]:
        for task in sorted(set(run.run.tasks) & set(first.run.tasks)):
            one, two = first.run.settings(task), run.run.settings(task)
            both = [key for key in SHARED if key in one and key in two]  # a released log knows little of itself
            if odd := [key for key in both if one[key] != two[key]]:
                found.append(
                    f"{run.name}: {task} differs from {first.name} in {', '.join(odd)}: not the same questions"
                )
        if lacking := sorted(set(first.run.tasks) - set(run.run.tasks)):
            found.append(f"{run.name}: lacks {', '.join(lacking)}, which {first.name} has")
    return found


def _of_one(run: NamedRun) -> Iterator[str]:
    if run.run.limit is not None:
        yield f"scored with --limit {run.run.limit:g}: a part of the benchmark only"
    over_all = {(task, metric): e.value for (task, target, metric), e in run.estimates.items() if not target}
    gibberish = {task: share for (task, metric), share in over_all.items() if metric == "degenerate"}
    if worst := [f"{share:.1%} in {task}" for task, share in gibberish.items() if share > GIBBERISH]:
        yield f"gibberish, which forget quality rewards: {', '.join(worst)}"
    for (task, metric), value in over_all.items():
        if metric == "mia_auc_high" and value < 0.5:
            yield "over-unlearned: the forget set is significantly less likely than its own paraphrase"
        if metric == "mia_auc" and math.isnan(value):
            yield f"no membership attack: {run.run.settings(task).get('mia_reason', 'no reason given')}"
    wrong = [
        f"{task} {metric}"
        for (task, metric), value in over_all.items()
        if _differs(run.run.reported(task).get(metric), value)
    ]
    if run.outcome and (strongest := run.outcome.strongest):
        changes = "; ".join(
            f"{METRICS[metric].label} from {run.outcome.known[CHECKPOINT][metric].value:.1%} to "
            f"{attacked.value:.1%} (the reference {strongest.values[REFERENCE][metric].value:.1%})"
            for metric, attacked in strongest.values[CHECKPOINT].items()
        )
        yield f"after attacks on the weights, at worst {strongest.attack} ({strongest.setting}): {changes}"
    if wrong:
        yield f"{len(wrong)} reported numbers are not those of the samples: {', '.join(wrong[:5])}"


def _differs(reported: Any, value: float) -> bool:
    if not isinstance(reported, int | float):
        return False  # lm-eval writes N/A where there is no number
    same = math.isnan(reported) if math.isnan(value) else abs(reported - value) <= TOLERANCE
    return not same
