"""Verdicts of unlearned models, from runs of the harness and from the attacks on the weights of ``elude stress``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval_elude.errors import UserError
from lm_eval_elude.metrics.compare import recovery
from lm_eval_elude.metrics.estimates import Estimate, mean_of
from lm_eval_elude.metrics.samples import mean
from lm_eval_elude.metrics.table import written
from lm_eval_elude.metrics.verdict import LEAST_GAP, Asked, ByRecord, Point, verdict
from lm_eval_elude.report.frame import Model
from lm_eval_elude.stress.table import FILE, by_record, summary
from lm_eval_elude.tasks.runs import Run

ASKED = ("elude_forget", "elude_cloze", "tofu_forget")  # what a verdict looks at


def formats(run: Run, original: Run, retrained: Run, tasks: Sequence[str] = ASKED) -> dict[str, Asked]:
    """``mc_accuracy`` of three runs, by task, in the question formats that all of them have."""
    runs = (run, retrained, original)
    return {
        task: Asked(*(mean(each.samples[task], "mc_accuracy") for each in runs))
        for task in tasks
        if all("mc_accuracy" in each.numbers.get(task, {}) for each in runs)
    }


def repetition(run: Run) -> Estimate:
    """The share of answers to the forget set that are empty or repeat themselves."""
    return next(run.numbers[task]["repetition"] for task in ("elude_forget", "tofu_forget") if task in run.numbers)


def judge_models(models: Sequence[Model], stress: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Give each unlearned model its verdict beside the original and the retrained one.

    ``stress`` are tables of ``elude stress`` as NAME=PATH, or PATH where one unlearned model is among the models.
    Returns the points of the attacks as rows of text; without an original or a retrained model there is no verdict.
    """
    roles = {model.role: model for model in models}
    unlearned = {model.name: model for model in models if not model.role}
    files = dict(_named(text, list(unlearned)) for text in stress)
    if not {"original", "retrained"} <= roles.keys():
        if stress:
            raise UserError("--stress needs --original and --reference: recovery is measured between these two")
        return []
    original, retrained = roles["original"].run, roles["retrained"].run
    rows = []
    for name, model in unlearned.items():
        asked = formats(model.run, original, retrained)
        if not asked:
            continue
        found = summary(files[name], original, retrained) if name in files else None
        if found and found.recovery:
            model.numbers["attacks on the weights"] = {"mc_accuracy": found.recovery.checkpoint,
                                                       "recovery": found.recovery.share}  # fmt: skip
            roles["retrained"].numbers["attacks on the weights"] = {"mc_accuracy": found.recovery.retrained}
        repeated = repetition(model.run), repetition(retrained)
        share = found.recovery.share if found and found.recovery else None
        model.verdict = verdict([*asked.values()], (repeated[0].value, repeated[1].value), share)
        if not math.isfinite(model.run.numbers[next(iter(asked))]["probability"].value):
            model.verdict, model.reason = "broken", "its log-probabilities are not finite"
            continue
        model.reason = reason(model.verdict, next(iter(asked.values())), repeated[0], share, bool(found))
        if found:
            before = by_record(original), by_record(retrained)
            rows += [{"model": name, **row(point, *before)} for point in found.points]
    return rows


def _named(text: str, unlearned: Sequence[str]) -> tuple[str, Path]:
    """A model's name and its table; a folder stands for the table in it."""
    name, _, path = text.rpartition("=")
    if not name and len(unlearned) == 1:
        name = unlearned[0]
    if name not in unlearned:
        raise UserError(f"--stress {text}: name an unlearned model as NAME=PATH, one of {', '.join(unlearned)}")
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise UserError(f"--stress {file}: no such file; `elude stress` writes it")
    return name, file


def reason(word: str, asked: Asked, repeated: Estimate, recovered: Estimate | None, attacked: bool) -> str:
    """What a verdict rests on, in a sentence."""
    plain = f"choice {100 * asked.checkpoint.value:.0f} %, retrained {100 * asked.retrained.value:.0f} %"
    if word == "broken":
        return f"{100 * repeated.value:.0f} % of its answers about the target are empty or repeat themselves"
    if word == "not forgotten":
        return plain
    if recovered is not None:
        low, high = recovered.bounds
        return f"{plain}; recovery after attacks {100 * recovered.value:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"
    return f"{plain}; {'no attack allows a judgement' if attacked else 'no attack on the weights was run'}"


def row(point: Point, original: ByRecord, retrained: ByRecord) -> dict[str, Any]:
    """A point as the report's table has it."""
    records = [record for record in point.checkpoint if record in point.retrained]
    attacked, control, known, never = (
        mean_of((record, values[record]) for record in records)
        for values in (point.checkpoint, point.retrained, original, retrained)
    )
    shown = "–"
    if point.counts and known.value - never.value >= LEAST_GAP:
        found = recovery(attacked, control, known, never)
        low, high = found.bounds
        shown = f"{100 * found.value:.0f} %" + ("" if math.isnan(low) else f" [{100 * low:.0f}, {100 * high:.0f}]")
    return {
        "attack": point.attack, "setting": point.setting, "step": f"{point.step:g}",
        "attacked": written(attacked.value, "mc_accuracy", unit=True),
        "retrained": written(control.value, "mc_accuracy", unit=True),
        "recovery": shown, "note": "" if point.counts else "a model lost its utility",
    }  # fmt: skip
