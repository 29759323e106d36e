"""Several runs beside each other: their names, their numbers with errors, and differences paired by record."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_elude.data import jsonio
from lm_eval_elude.data.manifest import Manifest, read_manifest
from lm_eval_elude.errors import UserError, reason
from lm_eval_elude.scoring.benchmarks import BENCHMARKS, GROUPS
from lm_eval_elude.scoring.estimates import Estimate, difference
from lm_eval_elude.scoring.logs import open_run
from lm_eval_elude.scoring.metrics import mcnemar
from lm_eval_elude.scoring.runs import Run, results_files
from lm_eval_elude.stress.outcome import CHECKPOINT, SUMMARY, Outcome

ORIGINAL = "original"  # the method of a model that forgot nothing
BEFORE = "before"  # its folder among the scores of optout-train, and so its name


class NamedRun:
    """A run under the name that a report gives it; ``reference`` says that it is the model that never knew the targets.

    ``never_knew`` is that model's run, for the numbers that say how far this one is from it. ``outcome`` has the
    attacks on the weights of the checkpoint, where there are any, and ``problems`` what is wrong with files near the
    run, a line each.
    """

    never_knew: Run | None = None

    def __init__(self, name: str, run: Run, reference: bool = False, outcome: Outcome | None = None) -> None:
        self.name, self.run, self.reference, self.outcome = name, run, reference, outcome
        self.problems: list[str] = []

    @property
    def title(self) -> str:
        """The name, which says of a reference that it is one."""
        return f"{self.name} (reference)" if self.reference and "reference" not in self.name else self.name

    @property
    def settings(self) -> dict[str, Any]:
        """What its tasks say of the scored model and of what was asked; nothing where there is no task of ours."""
        return self.run.settings(self.run.tasks[0]) if self.run.tasks else {}

    @property
    def model(self) -> str:
        """The model that was scored, by name: an adapter's before its base's."""
        arguments = self.run.config.get("model_args") or {}
        if isinstance(arguments, str):
            arguments = dict(part.split("=", 1) for part in arguments.split(",") if "=" in part)
        jsonio.check(arguments, dict[str, Any], f"{self.run.path}: field 'model_args'")
        return str(next((arguments[key] for key in ("peft", "pretrained", "model") if arguments.get(key)), self.name))

    @cached_property
    def manifest(self) -> Manifest | None:
        """The manifest of the scored checkpoint; where no task of ours was run, that of the folder of its name."""
        if self.run.tasks:
            return read_manifest(self.run.checkpoint)
        places = (Path(), *self.run.path.absolute().parents)
        return next((known for place in places if (known := read_manifest(place / self.model))), None)

    @property
    def method(self) -> str:
        """What made the checkpoint: a method, ``original``, ``guardrail``, ``retrained`` or ``retained``; or ""."""
        if self.manifest is None:
            return ""
        if self.manifest.method == "none":
            return "guardrail" if self.settings.get("guardrail") else ORIGINAL
        if self.manifest.method == "retrained-without":
            return "retrained"
        return "retained" if self.manifest.settings.get("learn") == "retain" else self.manifest.method

    def is_of(self, outcome: Outcome) -> bool:
        """Whether this run is of the checkpoint whose weights were attacked."""
        return outcome.is_of(CHECKPOINT, self.settings.get("checkpoint") or ())

    @cached_property
    def estimates(self) -> dict[tuple[str, str, str], Estimate]:
        """Every number by task or group, target ("" for all together) and metric, with its influence by record.

        The world set, which is no target's, stands under "" alone.
        """
        run, other = self.run, self.never_knew
        samples = {task: run.samples_beside(task, other) if other else run.samples(task) for task in run.tasks}
        targets = dict.fromkeys(s.target for measured in samples.values() for s in measured if s.target)
        estimates: dict[tuple[str, str, str], Estimate] = {}
        for target in ("", *targets):
            part = {task: [s for s in measured if s.target in (target or s.target, "")]
                    for task, measured in samples.items()}  # fmt: skip
            numbers = {
                task: BENCHMARKS[task].numbers(measured, run.settings(task))
                for task, measured in part.items()
                if any(not target or s.target == target for s in measured)
            }
            if all(part.values()):  # a --limit may leave a target without samples
                for group in [group for group in GROUPS if group in run.results["results"]]:
                    try:
                        numbers[group] = GROUPS[group].numbers(part)
                    except (KeyError, ZeroDivisionError):
                        raise UserError(f"{run.path}: {group} is in it, but not all of its tasks") from None
            estimates |= {
                (task, target, metric): e for task, of_task in numbers.items() for metric, e in of_task.items()
            }
        return estimates

    def estimate(self, task: str, metric: str) -> Estimate | None:
        """A number over all targets, None where the run does not have it."""
        return self.estimates.get((task, "", metric))


class Change(NamedTuple):
    """How one number differs between two runs, after minus before, with its error and its 95 % interval.

    The p-value is two-sided, of no difference: by the normal distribution, of a task's shares of yes and no McNemar's.
    It is NaN where no error can be formed. ``records`` are those that both runs asked; the others count as independent
    draws.
    """

    difference: float
    stderr: float
    low: float
    high: float
    p_value: float
    records: int


def change(after: Estimate, before: Estimate) -> Change:
    """The difference of two estimates, paired by record, and the test of no difference by the normal distribution."""
    gap = difference(after, before)
    value, error = gap.value, gap.stderr
    p_value = 1.0 if error == value == 0 else math.nan
    if error > 0:
        p_value = math.erfc(abs(value) / error / math.sqrt(2))
    return Change(value, error, *gap.bounds, p_value, len(after.influence.keys() & before.influence.keys()))


def change_of(task: str, metric: str, after: NamedRun, before: NamedRun) -> Change:
    """The change of a number that both runs have over all targets; of a share of yes and no by McNemar's exact test."""
    now, then = after.estimates[task, "", metric], before.estimates[task, "", metric]
    changed = change(now, then)
    if task in BENCHMARKS and now.binary and then.binary:  # each the mean of a value of its samples
        exact = mcnemar(after.run.samples(task), before.run.samples(task), metric)
        if not math.isnan(exact):
            changed = changed._replace(p_value=exact)
    return changed


def named_runs(paths: Sequence[str], reference: str = "", *, utility: bool = False) -> list[NamedRun]:
    """The runs that a user names.

    Args:
        paths: results files, released logs of TOFU, or folders, or ``NAME=PATH``; a folder stands for every results
            file below it, in the order in which they were made. A run without a name is called by its checkpoint's
            method, where a manifest tells it, otherwise by the folder that it lies in. A folder of ``elude stress``
            belongs to the run of its checkpoint. The reference comes last.
        reference: the name or the folder's name of one of them, or a path, of one of them or of another; "" for none.
        utility: whether a run of the utility benchmarks alone is one, too.

    Raises:
        UserError: there is no results file, it is not one of ours, or no run is of an attacked checkpoint.
    """
    attacked = [path for path in paths if (Path(path) / SUMMARY).is_file()]
    given = [run for path in paths if path not in attacked for run in _files(path)]
    runs = [NamedRun(name, open_run(file, utility=utility)) for name, file, _ in given]
    folders = _name(runs, given)
    if reference:
        by_name = dict(zip(folders, runs, strict=True)) | {run.name: run for run in runs}
        if not (chosen := by_name.get(reference)):
            (name, file, named), *more = _files(reference)
            if more:
                raise UserError(f"--reference {reference}: has {len(more) + 1} results files; name one of them")
            by_file = {other.resolve(): run for (_, other, _), run in zip(given, runs, strict=True)}
            if not (chosen := by_file.get(file.resolve())):
                chosen = NamedRun(name, open_run(file))
                given.append((f"{name} (reference)" if name in folders else name, file, named))
                runs.append(chosen)
                _name(runs, given)
        chosen.reference = True
    for run in runs:
        run.never_knew = next((other.run for other in runs if other.reference and other is not run), None)
    for path in attacked:
        outcome = Outcome(Path(path))
        if not (of := [run for run in runs if run.is_of(outcome)]):
            raise UserError(f"{path}: no run here is of the checkpoint whose weights it attacked")
        for run in of:
            if run.outcome:
                raise UserError(f"{path}: attacked the same checkpoint as {run.outcome.folder}; name one")
            run.outcome = outcome
    for run in runs:
        if not (run.outcome or utility):
            run.outcome, run.problems = _attacks_near(run)
    return sorted(runs, key=lambda run: run.reference)


def _name(runs: Sequence[NamedRun], given: Sequence[tuple[str, Path, bool]]) -> list[str]:
    """Give each run a name of its own: the user's, its method's, or its folder's; the folders' names are returned."""
    names: list[str] = []
    for run, (name, *_) in zip(runs, given, strict=True):
        run.name = _free(name, names)
        names.append(run.name)
    unnamed = [run for run, (_, _, named) in zip(runs, given, strict=True) if not named]
    methods = [run.method for run in unnamed]
    for run in unnamed:
        alone = methods.count(run.method) == 1 and run.method not in names
        if run.method and run.method != run.name:
            run.name = _free(run.method if alone else f"{run.method} ({run.name})", names)
    return names


def _free(name: str, taken: Sequence[str]) -> str:
    """The name, or where it is taken the first that is not of those with a number behind it; ``n`` is a column."""
    return next(free for free in chain([name], (f"{name} {n}" for n in count(2))) if free not in (*taken, "n"))


def _attacks_near(run: NamedRun) -> tuple[Outcome | None, list[str]]:
    """The largest suite of attacks on the weights of a run's checkpoint in a folder near it, and what was left out.

    A folder near the run may be anybody's: one that cannot be read is left out with a line.
    """
    near: list[Outcome] = []
    problems: list[str] = []
    folders = run.run.path.absolute().parents[:3]
    files = (file for folder in folders for file in sorted([*folder.glob(SUMMARY), *folder.glob(f"*/{SUMMARY}")]))
    for file in dict.fromkeys(files):
        try:
            outcome = Outcome(file.parent)
            if run.is_of(outcome):
                # Formed here, where an error of theirs is caught.
                _ = outcome.known, outcome.worst, outcome.curves, outcome.depth
                near.append(outcome)
        except Exception as error:  # whatever is in the files
            text = str(error) if isinstance(error, UserError) else f"{file} cannot be read ({reason(error)})"
            problems.append(f"{text}; these attacks on weights are left out")
    chosen = max(near, key=lambda outcome: len(outcome.attacks), default=None)
    for other in near:
        if other is not chosen and chosen:
            problems.append(f"{other.folder}: left out, for {chosen.folder} has attacks on the same weights")
    return chosen, problems


def _files(given: str) -> Iterator[tuple[str, Path, bool]]:
    """Name and results file of each run at a path, and whether the user gave the name."""
    if given.rpartition("=")[2] == "":  # as of a variable that is not set; a path of no name is this folder
        raise UserError(f"{given!r} names no results file or folder")
    name, path = "", Path(given)
    if not path.exists() and "=" in given:
        name, rest = given.split("=", 1)
        path = Path(rest)
    if path.is_dir():
        files = sorted(results_files(path), key=lambda file: (file.name, file))
        if not files:
            raise UserError(f"{path} has no results file of lm-eval (results_*.json) in it")
        for file in files:
            inner = file.relative_to(path).parts[:-1] if len(files) > 1 else ()
            yield inner[0] if inner else name or path.resolve().name, file, bool(name and not inner)
        return
    if not path.is_file():
        raise UserError(f"{given}: no such results file or folder")
    yield name or path.resolve().parent.name, path, bool(name)
