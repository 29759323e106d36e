"""Finished runs as rows: the main table of a report, and every number with its interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_elude.errors import UserError
from lm_eval_elude.metrics.estimates import Estimate
from lm_eval_elude.metrics.samples import Numbers, for_each_target
from lm_eval_elude.metrics.table import METRICS, written
from lm_eval_elude.tasks.elude import ATTACK, CONTROL
from lm_eval_elude.tasks.runs import Run

# What is known of the target, whichever way it is asked.
KNOWS = ("mc_accuracy", "option_accuracy", "name_mc_accuracy")


class Column(NamedTuple):
    """A column of the main table.

    Attributes:
        label: its head; ``group`` stands above it.
        metric: whose unit and direction it has.
        places: tasks and groups that have the number; the first that a run has is taken.
        bar: whether the cell has a bar, which only shares have.
    """

    label: str
    group: str
    metric: str
    places: tuple[str, ...]
    bar: bool = True


COLUMNS = (
    Column("choice", "forgotten?", "mc_accuracy", ("elude_forget", "tofu_forget")),
    Column("cloze", "forgotten?", "mc_accuracy", ("elude_cloze",)),
    Column("worst attack", "forgotten?", "mc_accuracy", ("worst attack",)),
    Column("P(true)", "forgotten?", "probability", ("elude_forget", "tofu_forget")),
    Column("utility", "intact?", "retain_quality", ("elude", "elude_quality")),
    Column("TOFU utility", "intact?", "model_utility", ("tofu",)),
    Column("named", "intact?", "named_retain_quality", ("elude", "elude_quality")),
    Column("repetition", "intact?", "repetition", ("elude_forget", "tofu_forget")),
    Column("choice", "recoverable?", "mc_accuracy", ("attacks on the weights",)),
    Column("FQ", "paper", "forget_quality", ("elude", "elude_quality", "elude_forget", "tofu_forget"), False),
    Column("KS p", "paper", "ks_p_value", ("elude_forget", "tofu_forget"), False),
)


@dataclass
class Model:
    """One model of a report: its run, and what is known of it beside the others."""

    name: str
    run: Run
    role: str = ""  # "original", "retrained" or "" for an unlearned model
    numbers: dict[str, Numbers] = field(default_factory=dict)  # by task or group
    verdict: str = ""
    reason: str = ""  # the verdict's sentence

    @property
    def method(self) -> str:
        """How the checkpoint was made, "" where its manifest does not say."""
        return str(self.run.settings(self.run.tasks[0]).get("made", {}).get("method", ""))

    def number(self, column: Column) -> Estimate | None:
        """The number of a column, None where the run lacks it."""
        return next((n for place in column.places if (n := self.numbers.get(place, {}).get(column.metric))), None)

    @cached_property
    def worst_attack(self) -> tuple[str, Estimate] | None:
        """The attack, and the number, by which most of the facts are known."""
        found = [
            (task, numbers[name])
            for task, numbers in self.run.numbers.items()
            if task.startswith(ATTACK) and task != CONTROL
            for name in KNOWS
            if name in numbers
        ]
        return max(found, key=lambda pair: pair[1].value, default=None)


def read_models(results: Sequence[str], reference: str = "", original: str = "") -> list[Model]:
    """The models of ``NAME=PATH`` or ``PATH``: original first, then the unlearned ones, the retrained model last.

    ``reference`` and ``original`` are names among them. UserError for a name that is not there or stands twice.
    """
    runs: dict[str, Run] = {}
    for text in results:
        name, _, path = text.rpartition("=") if "=" in text else ("", "", text)
        name = name or Path(path.rstrip("/")).name
        if name in runs:
            raise UserError(f"{name} stands twice among the results; name them as NAME=PATH")
        runs[name] = Run(path)
    return models_of(runs, reference, original)


def models_of(runs: Mapping[str, Run], reference: str = "", original: str = "") -> list[Model]:
    """The models of runs by name, in the order and with the errors of :func:`read_models`."""
    models = {name: Model(name, run) for name, run in runs.items()}
    for flag, name, role in (("--reference", reference, "retrained"), ("--original", original, "original")):
        if name and name not in models:
            raise UserError(f"{flag} {name} is none of {', '.join(models)}")
        if name:
            models[name].role = role
    order = {"original": 0, "": 1, "retrained": 2}
    ordered = sorted(models.values(), key=lambda model: order[model.role])
    retrained = models.get(reference)
    for model in ordered:
        model.numbers = {task: dict(numbers) for task, numbers in model.run.numbers.items()}
        if model.worst_attack:
            model.numbers["worst attack"] = {"mc_accuracy": model.worst_attack[1]}
        if retrained and model is not retrained:
            for task, numbers in model.run.beside(retrained.run).items():
                model.numbers.setdefault(task, {}).update(numbers)
    return ordered


def columns(models: Sequence[Model]) -> list[Column]:
    """The columns that some model has."""
    return [column for column in COLUMNS if any(model.number(column) for model in models)]


def heading(models: Sequence[Model]) -> str:
    """What was forgotten, or scored."""
    run = models[0].run
    return ", ".join(run.targets[:3]) + (" and others" if len(run.targets) > 3 else "") or "TOFU"


def chance(models: Sequence[Model]) -> float:
    """What guessing gives in multiple choice: the mean of 1 / (1 + wrong answers) over the asked records."""
    for task in ("elude_forget", "tofu_forget"):
        for model in models:
            counts = [len(doc.get("perturbed_answer") or ()) for doc in model.run.docs.get(task, ())]
            if counts and min(counts):
                return sum(1 / (1 + count) for count in counts) / len(counts)
    return 1 / 6


def interval(estimate: Estimate, metric: str) -> tuple[float, float]:
    """The 95 % interval; within [0, 1] for what is a share."""
    shares = metric in METRICS and METRICS[metric].unit == "share"
    return estimate.interval if shares else estimate.bounds


def spread(estimate: Estimate, metric: str, between: str = " to ") -> str:
    """The 95 % interval as it is shown; "" where there is none."""
    low, high = interval(estimate, metric)
    return "" if math.isnan(low) else f"{written(low, metric)}{between}{written(high, metric)}"


def main_table(models: Sequence[Model]) -> tuple[list[str], list[list[str]]]:
    """The main table as text: heads, and a row of each model with values and intervals."""
    chosen = columns(models)
    heads = ["model", "verdict", *(f"{column.group} {column.label}" for column in chosen)]
    rows = []
    for model in models:
        cells = []
        for column in chosen:
            number = model.number(column)
            if number is None:
                cells.append("–")
                continue
            shown, within = written(number.value, column.metric), spread(number, column.metric, ", ")
            cells.append(f"{shown} [{within}]" if within else shown)
        rows.append([model.name, model.verdict or model.role, *cells])
    return heads, rows


def long_rows(models: Sequence[Model]) -> list[dict[str, Any]]:
    """Every number of every model, over all targets and for each of them."""
    rows: list[dict[str, Any]] = []

    def add(model: Model, task: str, target: str, numbers: Mapping[str, Estimate]) -> None:
        for metric, number in numbers.items():
            low, high = interval(number, metric)
            rows.append(
                {"model": model.name, "task": task, "metric": metric, "target": target, "value": number.value,
                 "stderr": number.stderr, "low": low, "high": high, "n": number.n, "records": number.records}
            )  # fmt: skip

    for model in models:
        for task, numbers in model.numbers.items():
            add(model, task, "", numbers)
        if len(model.run.targets) > 1:
            for target, tasks in for_each_target(model.run.samples).items():
                for task, samples in tasks.items():
                    if samples:
                        add(model, task, target, model.run.of_task(task, samples))
    return rows
