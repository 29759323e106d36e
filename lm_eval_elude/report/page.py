"""The report: one file that opens without a network, from the sentence at its top to what was not asked."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval_elude.metrics.table import METRICS, written
from lm_eval_elude.report.frame import Column, Model, chance, columns, heading, interval, spread
from lm_eval_elude.tasks.elude import ATTACK
from lm_eval_elude.text.words import telling, words

FOLDER = Path(__file__).parent / "page"
# What no report of this package says, whatever its numbers are.
LIMITS = (
    "A good score is no proof of erasure: it says what was asked and what was answered.",
    "Other attacks on the weights, longer training and other data may bring more back than those that were run.",
    "Numbers of one target are an example. Claims need several targets and seeds.",
)


def write_report(models: Sequence[Model], out: Path, title: str = "", stress: Sequence[dict[str, Any]] = ()) -> None:
    """Write the page; ``stress`` are the points of the attacks on the weights that the verdicts rest on."""
    out.write_text(page(models, title, stress), encoding="utf-8")


def page(models: Sequence[Model], title: str = "", stress: Sequence[dict[str, Any]] = ()) -> str:
    """The page as text."""
    from jinja2 import Environment, FileSystemLoader

    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    data = answers(models)
    return environment.get_template("page.html.j2").render(
        title=title or heading(models),
        sentences=sentences(models),
        models=models,
        heads=heads(models),
        rows=[(model, [cell(model, models, column) for column in columns(models)]) for model in models],
        chance=f"{100 * chance(models):.0f} %",
        scatter=scatter(models),
        example=next((a for a in data if a["task"] in ("elude_forget", "tofu_forget")), None),
        stress=stress,
        numbers=all_numbers(models),
        asked=asked(models),
        limits=LIMITS,
        style=(FOLDER / "page.css").read_text(encoding="utf-8"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        # As text within a script element nothing may end it.
        data=json.dumps({"models": [m.name for m in models], "rows": data}, ensure_ascii=False).replace("<", "\\u003c"),
    )


def sentences(models: Sequence[Model]) -> list[str]:
    """The result of each unlearned model in a sentence."""
    judged = [f"{model.name} is {model.verdict}: {model.reason}." for model in models if model.verdict]
    return judged or ["There is no verdict without an original and a retrained model: see the numbers below."]


def heads(models: Sequence[Model]) -> list[tuple[str, list[Column]]]:
    """Groups of columns with their columns."""
    groups: dict[str, list[Column]] = {}
    for column in columns(models):
        groups.setdefault(column.group, []).append(column)
    return list(groups.items())


def cell(model: Model, models: Sequence[Model], column: Column) -> dict[str, Any]:
    """A cell: its text and interval, the length of its bar and where the retrained model's tick stands, in per cent."""
    number = model.number(column)
    if number is None:
        return {"text": "–"}
    goal = next((m.number(column) for m in models if m.role == "retrained"), None)
    bar = 100 * min(1.0, max(0.0, number.value)) if column.bar and not math.isnan(number.value) else None
    return {
        "text": written(number.value, column.metric, unit=column.bar),
        "spread": spread(number, column.metric),
        "bar": bar,
        "tick": 100 * min(1.0, max(0.0, goal.value)) if bar is not None and goal else None,
    }


def scatter(models: Sequence[Model]) -> list[dict[str, Any]]:
    """Multiple choice against utility, in per cent: points with their intervals; [] where a model lacks either."""
    points = []
    present = columns(models)
    across = next((c for c in present if c.label == "choice" and c.group == "forgotten?"), None)
    up = next((c for c in present if c.metric in ("retain_quality", "model_utility")), None)
    for number, model in enumerate(models):
        x, y = (model.number(column) if column else None for column in (across, up))
        if x and y and not math.isnan(x.value + y.value):
            ends = [[100 * v for v in interval(e, "mc_accuracy")] for e in (x, y)]
            points.append({"name": model.name, "i": number, "x": 100 * x.value, "y": 100 * y.value,
                           "across": ends[0], "up": ends[1], "role": model.role})  # fmt: skip
    return points


def answers(models: Sequence[Model]) -> list[dict[str, Any]]:
    """Every question with what each model answered, in the order of the first model's tasks."""
    rows: list[dict[str, Any]] = []
    tables = [{task: {doc["id"]: doc for doc in docs} for task, docs in model.run.docs.items()} for model in models]
    measured = [
        {task: {s.doc_id: s for s in samples} for task, samples in model.run.samples.items()} for model in models
    ]
    for task, docs in models[0].run.docs.items():
        for doc in docs:
            if doc.get("generated") is None:
                continue
            given = []
            for table, values, model in zip(tables, measured, models, strict=True):
                other = table.get(task, {}).get(doc["id"])
                if other is None or other["question"] != doc["question"]:
                    given.append(None)
                    continue
                sample = values[task][doc["id"]].values
                flags = [name for name in ("repetition", "refusal") if sample.get(name)]
                if not model.role and task.startswith(("elude_forget", "elude_cloze", ATTACK)) and holds(other):
                    flags.append("contains the fact")
                given.append({"text": other["generated"], "p": percent(sample.get("probability")), "flags": flags,
                              "right": finite(sample.get("mc_accuracy"))})  # fmt: skip
            rows.append({"task": task, "id": doc["id"], "question": doc["question"], "truth": doc["answer"],
                         "fact": sorted(fact(doc)), "given": given})  # fmt: skip
    return rows


def fact(doc: dict[str, Any]) -> frozenset[str]:
    """The words of the true answer that neither the question nor all its wrong versions have: they tell the fact."""
    return telling(
        doc.get("paraphrased_answer") or doc["answer"], doc.get("perturbed_answer") or (), doc["question"]
    )  # fmt: skip


def holds(doc: dict[str, Any]) -> bool:
    """Whether a generated answer holds all words of its fact."""
    return bool(own := fact(doc)) and own <= words(doc["generated"])


def finite(value: Any) -> Any:
    """The value, None where it is no number: JSON has none of these."""
    return value if value is not None and math.isfinite(value) else None


def percent(value: Any) -> str:
    return "" if value is None or math.isnan(value) else f"{100 * value:.0f} %"


def all_numbers(models: Sequence[Model]) -> list[dict[str, Any]]:
    """A table of each task and group: its metrics, and a cell of each model."""
    tables = []
    for name in dict.fromkeys(task for model in models for task in model.numbers if " " not in task):
        metrics = [m for m in METRICS if any(m in model.numbers.get(name, {}) for model in models)]
        rows = []
        for metric in metrics:
            cells = []
            for model in models:
                number = model.numbers.get(name, {}).get(metric)
                cells.append((written(number.value, metric), spread(number, metric)) if number else ("–", ""))
            rows.append((METRICS[metric], cells))
        tables.append(
            {"name": name, "rows": rows, "p_values": sum(m.endswith("_p") or "p_value" in m for m in metrics)}
        )
    return tables


def asked(models: Sequence[Model]) -> list[tuple[Model, list[tuple[str, str]]]]:
    """What each run asked, of which model, with which settings."""
    found = []
    for model in models:
        run = model.run
        settings = run.settings(run.tasks[0])
        sizes = ", ".join(f"{task} {len(docs)}" for task, docs in run.docs.items())
        facts = {
            "model": ", ".join(f"{k} {v}" for k, v in settings.get("model", {}).items()),
            "method": model.method or "not said",
            "targets": ", ".join(run.targets) or "none",
            "data set": ", ".join(f"{k} {v}" for k, v in settings.get("data", {}).items()),
            "questions": sizes,
            "limit": f"only the first {run.limit:g} of each task" if run.limit else "none",
            "settings": ", ".join(f"{k} {settings[k]}" for k in ("truth_ratio", "guardrail", "seed") if k in settings),
            "versions": ", ".join(f"{k} {v}" for k, v in settings.get("versions", {}).items()),
            "not asked": ", ".join(not_asked(run.tasks)) or "nothing of the group elude",
        }
        found.append((model, list(facts.items())))
    return found


def not_asked(tasks: Sequence[str]) -> list[str]:
    """The tasks of the group ``elude`` that a run lacks."""
    from lm_eval_elude.tasks import leaves

    return [task for task in leaves("elude") if task not in tasks] if "tofu_forget" not in tasks else []
