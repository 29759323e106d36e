"""The tables of a report: pivots of the frame of its numbers, a row for each metric and a column for each run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pandas as pd

from lm_eval_elude.data import jsonio
from lm_eval_elude.report import weights
from lm_eval_elude.report.comparison import NamedRun, change, warnings
from lm_eval_elude.report.frame import NONE, Table, cell, frame, markdown, number, plain, unit
from lm_eval_elude.scoring.benchmarks import BENCHMARKS
from lm_eval_elude.scoring.benchmarks.elude import ATTACK, CLOZE, CONTROL, MENTION
from lm_eval_elude.scoring.metrics import METRICS, THREE

# What the tables call the tasks and groups, in their order; the group ``elude`` repeats the others.
SECTIONS = {
    "elude_forget": "forget set", "elude_quality": "retain and world", "elude_retain": "retain set",
    "elude_world": "world set", MENTION: "mention set", CLOZE: "cloze set", "elude_attacks": "mean of the attacks",
    "elude_mia": "membership",
    "tofu": "TOFU", "tofu_forget": "TOFU forget set", "tofu_retain": "TOFU retain set",
    "tofu_real_authors": "TOFU real authors", "tofu_world_facts": "TOFU world facts",
}  # fmt: skip
# Of an attack the table shows what sums up an answer; the parts of FQ and the wording of answers stand in the plots.
PARTS = (*THREE, "degenerate", "ngram_entropy", "refusal", "log_truth_ratio")
ATTACK_METRICS = [m.name for m in METRICS.values() if m.name not in PARTS and m.unit == "share"]


def tables(runs: Sequence[NamedRun]) -> list[Table]:
    """Every table that the runs have numbers for."""
    numbers = frame(runs)
    over_all = numbers[numbers.target == ""]
    titles = {run.name: run.title for run in runs}
    quality = "FQ" if "elude_forget" in {*over_all.task} else "A forget set's TR"
    made = [
        Table(
            "Scores",
            f"Shares in per cent, with 95 % intervals; n distinct records. Read {quality} beside the share of "
            "gibberish (degen.) and the reference's: beyond that, higher is not better.",
            by_metric(over_all, SECTIONS.keys() - {"elude_mia"}, False),
        ),
        differences(runs),
        Table(
            "Distance from the reference",
            "This model less the reference in points of per cent, with 95 % intervals paired by record; 0 is ideal. "
            "KS p: of equal truth ratios on the forget set (TOFU's forget quality); a high one cannot tell the two "
            "apart.",
            by_metric(over_all, SECTIONS, True),
        ),
        Table(
            "Attacks",
            "Per cent, with 95 % intervals; n distinct records, which several prompts may ask.",
            by_attack(over_all),
        ),
        Table(
            "Membership inference",
            "Forget set against its paraphrase, per cent; 50 is ideal. AUC with 95 % intervals: above 50 the forget "
            "set is still known, below it the model is over-unlearned. Accuracy and its standard deviation are over "
            "ten splits.",
            by_metric(over_all, {"elude_mia"}, False),
        ),
        by_target(numbers),
    ]
    made = [table._replace(cells=table.cells.rename(columns=titles)) for table in made if len(table.cells)]
    attacked = {run.title: run.outcome for run in runs if run.outcome}
    return [*made, weights.table(attacked)] if attacked else made


def by_metric(numbers: pd.DataFrame, tasks: Collection[str], distances: bool) -> pd.DataFrame:
    """The metrics of tasks, either those that are a distance from a reference or the others."""
    places = [(task, metric) for task, metric in PLACES if task in tasks and METRICS[metric].is_distance == distances]
    labels = {(task, metric): f"{SECTIONS[task]}: {METRICS[metric].label}" for task, metric in places}
    return pivot(numbers, labels)


def by_attack(numbers: pd.DataFrame) -> pd.DataFrame:
    """Each metric that sums up an attack, the same records asked plainly first."""
    tasks = attack_tasks(numbers.task)
    return pivot(
        numbers,
        {
            (task, metric): f"{METRICS[metric].label}: {attack_name(task)}"
            for metric in ATTACK_METRICS
            for task in tasks
        },
    )


def by_target(numbers: pd.DataFrame) -> Table:
    """FQ of each target, where there are several."""
    rows = numbers[(numbers.task == "elude_forget") & (numbers.metric == "forget_quality") & (numbers.target != "")]
    targets = list(dict.fromkeys(rows.target))
    cells = pivot(rows.assign(task=rows.target, metric=""), {(target, ""): target for target in targets})
    caption = "FQ on the forget set in per cent, with 95 % intervals."
    return Table("Targets", caption, cells if len(targets) > 1 else cells[:0])


def pivot(numbers: pd.DataFrame, labels: dict[tuple[str, str], str]) -> pd.DataFrame:
    """A row for each task and metric that is there, under its label, with a column for each run and one for n."""
    shown = [place in labels for place in zip(numbers.task, numbers.metric, strict=True)]
    numbers = numbers[pd.Series(shown, numbers.index, dtype=bool)]
    texts = [cell(row.value, row.low, row.high, unit(row.metric)) for row in numbers.itertuples()]
    table = numbers.assign(text=texts).pivot(index=["task", "metric"], columns="run", values="text")
    table = table.reindex(columns=list(dict.fromkeys(numbers.run)))
    # A number without an error has no records, but samples.
    counted = numbers.assign(count=numbers.records.where(numbers.records > 0, numbers.n))
    table["n"] = counted.groupby(["task", "metric"])["count"].agg(lambda counts: " / ".join(map(str, counts.unique())))
    table = table.reindex([place for place in labels if place in table.index]).fillna(NONE)
    return table.set_axis([labels[place] for place in table.index])


def attack_tasks(tasks: Collection[str]) -> list[str]:
    """The attacks among some tasks, the control first."""
    return sorted(dict.fromkeys(task for task in tasks if task.startswith(ATTACK)), key=lambda task: task != CONTROL)


def attack_name(task: str) -> str:
    """What the tables and plots call an attack."""
    return "asked plainly" if task == CONTROL else task.removeprefix(ATTACK).replace("_", " ")


def _places() -> list[tuple[str, str]]:
    """Tasks and groups with their metrics, in the order in which the tables have them; no number stands twice."""
    places = []
    for task in SECTIONS:
        kind = BENCHMARKS[task].kind if task in BENCHMARKS else "group"
        places += [(task, metric.name) for metric in METRICS.values() if kind in metric.kinds]
    # The forget sets have FQ, and TOFU's forget quality as KS p; the mention quality stands beside RQ.
    twice = {("elude_quality", "forget_quality"), ("tofu", "forget_quality"), (MENTION, "set_quality")}
    return [place for place in places if place not in twice]


PLACES = _places()


# ---- differences between runs
def changes(runs: Sequence[NamedRun]) -> pd.DataFrame:
    """What changed between the first run and each other one, paired by record."""
    before, rows = runs[0], []
    for run in runs[1:]:
        for task, target, metric in [place for place in before.estimates if place in run.estimates]:
            if not target:
                found = change(run.estimates[task, "", metric], before.estimates[task, "", metric])
                numbers = (found.estimate.value, found.estimate.stderr, *found.interval, found.p_value, found.shared)
                rows.append((run.name, before.name, task, metric, *numbers))
    columns = ["run", "before", "task", "metric", "difference", "stderr", "low", "high", "p_value", "records"]
    return pd.DataFrame(rows, columns=columns)


def differences(runs: Sequence[NamedRun]) -> Table:
    """What changed between the first run and each other one, with the test of no difference."""
    columns: dict[str, dict[tuple[str, str], str]] = {}
    for row in changes(runs).itertuples():
        place, p = (row.task, row.metric), number(row.p_value, "p-value")
        text = cell(row.difference, row.low, row.high, unit(row.metric), "+")
        for column, shown in ((row.run, text), (f"p: {row.run}", p), ("n", str(row.records))):
            columns.setdefault(column, {})[place] = shown if row.records else NONE
    places = [
        place
        for place in PLACES
        if not METRICS[place[1]].is_distance and any(place in column for column in columns.values())
    ]
    columns |= {"n": columns.pop("n")} if columns else {}
    cells = {column: [texts.get(place, NONE) for place in places] for column, texts in columns.items()}
    return Table(
        f"Differences from {runs[0].name}",
        "Shares in points of per cent, with 95 % intervals and the two-sided test of no difference, paired by record; "
        "– where no error can be formed.",
        pd.DataFrame(cells, index=[f"{SECTIONS[task]}: {METRICS[metric].label}" for task, metric in places]),
    )


# ---- other forms
def report_text(runs: Sequence[NamedRun]) -> str:
    """All tables and warnings in Markdown, for a terminal or a paper."""
    parts = [markdown(table) for table in tables(runs)]
    if lines := warnings(runs):
        parts.append("### Mind\n\n" + "\n".join(f"- {plain(text)}" for text in lines))
    return "\n\n".join(parts) + "\n"


def json_ready(runs: Sequence[NamedRun]) -> dict[str, Any]:
    """Numbers, differences from the first run, settings and warnings; null is a number that cannot be had."""
    settings = [{task: run.run.settings(task).copy() for task in run.run.tasks} for run in runs]
    for of_run in settings:
        for of_task in of_run.values():
            of_task.pop("aggregates", None)
    about = [
        {"name": run.name, "reference": run.reference, "settings": of_run}
        for run, of_run in zip(runs, settings, strict=True)
    ]
    return {
        "runs": about,
        "numbers": jsonio.finite(frame(runs).to_dict("records")),
        "differences": jsonio.finite(changes(runs).to_dict("records")),
        "warnings": warnings(runs),
    }
