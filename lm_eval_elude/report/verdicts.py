"""Verdicts of the unlearned models of a report, with the attacks on the weights that ``elude stress`` ran."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval_elude.errors import UserError
from lm_eval_elude.metrics.estimates import mean_of
from lm_eval_elude.metrics.samples import Sample
from lm_eval_elude.metrics.table import written
from lm_eval_elude.metrics.verdict import KEPT, Point, judge, point_recovery
from lm_eval_elude.report.frame import Model

FORMS = {"plain": ("elude_forget", "tofu_forget"), "cloze": ("elude_cloze",)}


def read_points(path: Path) -> list[Point]:
    """The points of ``attacks.csv``: rows of attack, setting, step, role (checkpoint or retrained), record, metric, value.

    A point keeps its utility where both models have at least three quarters of their ``retain_quality`` at step 0 of
    any attack, in rows of their own. UserError where the file is none of ``elude stress``.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {"attack", "setting", "step", "role", "record", "metric", "value"} <= rows[0].keys():
        raise UserError(f"--stress {path}: not an attacks.csv of `elude stress`")
    values: dict[tuple[str, str, int], dict[str, dict[str, float]]] = {}
    utility: dict[tuple[str, str, int], dict[str, float]] = {}
    for row in rows:
        key = row["attack"], row["setting"], int(row["step"])
        if row["metric"] == "mc_accuracy":
            values.setdefault(key, {}).setdefault(row["role"], {})[row["record"]] = float(row["value"])
        elif row["metric"] == "retain_quality":
            utility.setdefault(key, {})[row["role"]] = float(row["value"])
    before = {role: value for key, roles in utility.items() if key[0] == "none" for role, value in roles.items()}
    points = []
    for key, roles in values.items():
        if key[0] == "none" or not {"checkpoint", "retrained"} <= roles.keys():
            continue
        keeps = all(value >= KEPT * before.get(role, math.inf) for role, value in utility.get(key, {}).items())
        points.append(Point(*key, roles["checkpoint"], roles["retrained"], keeps))
    return points


def by_record(samples: Sequence[Sample]) -> dict[str, float]:
    """``mc_accuracy`` by record."""
    return {sample.record: sample.values["mc_accuracy"] for sample in samples if "mc_accuracy" in sample.values}


def judge_models(models: Sequence[Model], stress: Path | None = None) -> list[dict[str, Any]]:
    """Give each unlearned model its verdict beside the retrained one; returns the points of the attacks as text rows.

    ``stress`` is of the one unlearned model; UserError where there are several, or no original model.
    """
    retrained = next((m for m in models if m.role == "retrained"), None)
    original = next((m for m in models if m.role == "original"), None)
    unlearned = [m for m in models if not m.role]
    points = read_points(stress) if stress else []
    if stress and (len(unlearned) != 1 or not original or not retrained):
        raise UserError("--stress is of one unlearned model, and needs --original and --reference")
    if retrained is None:
        return []
    task = next((t for t in FORMS["plain"] if t in retrained.run.samples), None)
    if task is None:
        return []
    known = [by_record(m.run.samples[task]) if m else None for m in (original, retrained)]
    for model in unlearned:
        asked = {
            form: (model.numbers[task]["mc_accuracy"], retrained.numbers[task]["mc_accuracy"])
            for form, tasks in FORMS.items()
            for task in tasks
            if all("mc_accuracy" in m.numbers.get(task, {}) for m in (model, retrained))
        }
        if "plain" not in asked:
            continue
        gibberish = [m.numbers[task].get("gibberish") or m.numbers[task]["repetition"] for m in (model, retrained)]
        found = judge(asked, (gibberish[0].value, gibberish[1].value), points, *known)
        model.verdict, model.reason = found.word, found.reason
        if not math.isnan(found.recovery.value):
            model.numbers["attacks on the weights"] = {"recovery": found.recovery}
    return [row(point, *known) for point in points] if all(known) else []


def row(point: Point, original: Any, retrained: Any) -> dict[str, Any]:
    """A point as the report's table has it."""
    shares = [mean_of(values.items()).value for values in (point.checkpoint, point.retrained)]
    back = point_recovery(point, original, retrained)
    low, high = back.bounds
    shown = f"{100 * back.value:.0f} % [{100 * low:.0f}, {100 * high:.0f}]" if not math.isnan(back.value) else "–"
    attacked, beside = (written(share, "mc_accuracy", unit=True) for share in shares)
    note = "" if point.keeps else "a model lost its utility"
    return {"attack": point.attack, "setting": point.setting, "step": point.step, "attacked": attacked,
            "retrained": beside, "recovery": shown, "note": note}  # fmt: skip
