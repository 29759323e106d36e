"""The tables of a report: pivots of the frame of its numbers, a row for each metric and a column for each run."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pandas as pd

from lm_eval_elude.report import weights
from lm_eval_elude.report.comparison import Change, NamedRun, change_of
from lm_eval_elude.report.frame import FORGET_SETS, SECTIONS, Table, attack_name, cell, frame
from lm_eval_elude.scoring.benchmarks import BENCHMARKS
from lm_eval_elude.scoring.benchmarks.elude import ATTACK, CONTROL, MENTION
from lm_eval_elude.scoring.metrics import METRICS, THREE
from lm_eval_elude.scoring.units import NONE, number, unit

# The columns of the summary.
FIRST = (
    *((task, metric) for task in FORGET_SETS for metric in ("truth_first", "probability")), ("elude_attacks", "known"),
    *((task, "log_truth_ratio") for task in FORGET_SETS),
    ("elude_forget", "forget_quality"), ("tofu_forget", "ks_p_value"),
    *((task, "degenerate") for task in FORGET_SETS), ("elude_forget", "oddness"),
    ("elude_quality", "retain_quality"), ("tofu", "model_utility"),
    ("elude_quality", "mention_quality"), ("elude_mia", "mia_auc"),
)  # fmt: skip
# Of an attack the table shows what sums up an answer; the parts of FQ and the wording of answers stand in the plots.
PARTS = (*THREE, "degenerate", "ngram_entropy", "refusal", "log_truth_ratio")
ATTACK_METRICS = [m.name for m in METRICS.values() if m.name not in PARTS and m.unit == "share"]


def tables(runs: Sequence[NamedRun]) -> list[Table]:
    """Every table that the runs have numbers for."""
    numbers = frame(runs)
    over_all = numbers[numbers.target == ""]
    titles = {run.name: run.title for run in runs}
    quality = "FQ" if "elude_forget" in {*over_all.task} else "the forget set's TR"
    made = [
        summary(over_all),
        Table(
            "Scores",
            f"Shares in per cent, with 95 % intervals; n distinct records. Read {quality} beside the share of "
            "gibberish (degen.) and the reference's: beyond that, higher is not better.",
            pivot(over_all, labels(SECTIONS.keys() - {"elude_mia"}, False)),
        ),
        differences(runs),
        Table(
            "Distance from the reference",
            "This model less the reference in points of per cent, with 95 % intervals paired by record; 0 is ideal. "
            "KS p: of equal truth ratios on the forget set (TOFU's forget quality); a high one cannot tell the two "
            "apart.",
            pivot(over_all, labels(SECTIONS, True)),
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
            pivot(over_all, labels({"elude_mia"}, False)),
        ),
        by_target(numbers),
    ]
    made = [
        table._replace(cells=table.cells.rename(index=titles, columns=titles)) for table in made if len(table.cells)
    ]
    attacked = {run.title: run.outcome for run in runs if run.outcome}
    return [*made, weights.table(attacked)] if attacked else made


def summary(numbers: pd.DataFrame) -> Table:
    """What a first look needs: a row for each run."""
    both = {*FORGET_SETS} <= {*numbers.task}
    of = {place: METRICS[place[1]].label + (" (TOFU)" if both and "tofu" in place[0] else "") for place in FIRST}
    cells = pivot(numbers, of)
    return Table(
        "Summary",
        "Per cent, with 95 % intervals. Of the forget set: first, share of facts whose truth is likelier than every "
        "wrong answer; P, probability of the true answers; known, the worst under attack. FQ counts gibberish (degen.) "
        "and odd words (oddness, nats per token) as forgotten. RQ and utility: what is kept. KS p: TOFU's forget "
        "quality, a p-value.",
        cells.drop(columns="n").T,
    )


def labels(tasks: Collection[str], distances: bool) -> dict[tuple[str, str], str]:
    """What the rows of these metrics are called, by task and metric, in the order of the tables."""
    return {
        (task, metric): f"{SECTIONS[task]}: {METRICS[metric].label}"
        for task, metric in PLACES
        if task in tasks and METRICS[metric].is_distance == distances
    }


def by_attack(numbers: pd.DataFrame) -> pd.DataFrame:
    """Each metric that sums up an attack, the same records asked plainly first."""
    tasks, metrics = attack_tasks(numbers.task), [METRICS[name] for name in ATTACK_METRICS]
    return pivot(numbers, {(t, m.name): f"{m.label}: {attack_name(t)}" for m in metrics for t in tasks})


def by_target(numbers: pd.DataFrame) -> Table:
    """What is still known of each target, and its FQ, where there are several."""
    metrics = ("truth_first", "probability", "forget_quality")
    rows = numbers[(numbers.task == "elude_forget") & (numbers.target != "")]
    targets = list(dict.fromkeys(rows.target))
    of = {(target, metric): f"{target}: {METRICS[metric].label}" for target in targets for metric in metrics}
    cells = pivot(rows.assign(task=rows.target), of)
    caption = "The forget set of each target, in per cent, with 95 % intervals; first, P and FQ as in the summary."
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


def _places() -> list[tuple[str, str]]:
    """Tasks and groups with their metrics, in the order in which the tables have them; no number stands twice."""
    places = []
    for task in SECTIONS:
        kind = BENCHMARKS[task].kind if task in BENCHMARKS else "group"
        places += [(task, metric.name) for metric in METRICS.values() if kind in metric.kinds]
    # The forget sets have FQ and truth first, and TOFU's forget quality as KS p; the mention quality stands beside RQ.
    twice = {
        *(("elude_quality", metric) for metric in ("forget_quality", "truth_first")),
        ("tofu", "forget_quality"), (MENTION, "set_quality"),
    }  # fmt: skip
    return [place for place in places if place not in twice]


PLACES = _places()


# ---- differences between runs
def changes(runs: Sequence[NamedRun]) -> pd.DataFrame:
    """What changed between the first run and each other one, paired by record."""
    before = runs[0]
    rows = [
        (run.name, before.name, task, metric, *change_of(task, metric, run, before))
        for run in runs[1:]
        for task, target, metric in before.estimates
        if not target and (task, "", metric) in run.estimates
    ]
    return pd.DataFrame(rows, columns=["run", "before", "task", "metric", *Change._fields])


def differences(runs: Sequence[NamedRun]) -> Table:
    """What changed between the first run and each other one, with the test of no difference."""
    columns: dict[str, dict[str, str]] = {}
    counts: dict[str, list[str]] = {}
    of_place = labels(SECTIONS, False)
    for row in changes(runs).itertuples():
        if label := of_place.get((row.task, row.metric)):
            text = cell(row.difference, row.low, row.high, unit(row.metric), "+")
            for column, shown in {row.run: text, f"p: {row.run}": number(row.p_value, "p-value")}.items():
                columns.setdefault(column, {})[label] = shown if row.records else NONE
            if row.records:
                counts.setdefault(label, []).append(str(row.records))
    columns |= {"n": {label: " / ".join(dict.fromkeys(of_label)) for label, of_label in counts.items()}}
    index = [label for label in of_place.values() if any(label in column for column in columns.values())]
    return Table(
        f"Differences from {runs[0].name}",
        "Shares in points of per cent, with 95 % intervals and the two-sided test of no difference, paired by record; "
        "– where no error can be formed.",
        pd.DataFrame(columns, index=index, dtype=object).fillna(NONE),
    )
