"""The paper's tables and figures from results alone, with the paper's own values (``paper.toml``) beside ours."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from statistics import stdev
from typing import Any

import pandas as pd

from lm_eval_elude.data import tofu
from lm_eval_elude.errors import UserError
from lm_eval_elude.report import frame, plots
from lm_eval_elude.report.frame import Table
from lm_eval_elude.report.rows import COLLAPSED, COST, FQ, RQ, WORLD_ONLY, Key, Row
from lm_eval_elude.scoring.benchmarks import UTILITY, UTILITY_BENCHMARKS
from lm_eval_elude.scoring.benchmarks.elude import ATTACK, CLOZE, CONTROL
from lm_eval_elude.scoring.estimates import Estimate, average
from lm_eval_elude.scoring.units import NONE, number, scale
from lm_eval_elude.scoring.units import unit as unit_of

PAPER: dict[str, Any] = tomllib.loads(Path(__file__).with_name("paper.toml").read_text(encoding="utf-8"))
MODELS = tuple(PAPER["main"])
DISTANCES = PAPER["distances"]["llama-3.1"]
# FQ and RQ of every method.
PAPER["quality"] = {
    model: {method: row[:2] for method, row in (PAPER["distances"].get(model, {}) | known).items()}
    for model, known in PAPER["main"].items()
}
TRIPLE = (("P", "probability"), ("ROUGE", "rougeL_recall"), ("TR", "truth_ratio"))
MEAN = (UTILITY, "acc")
# Of a table's cells; values are in per cent where they are shares.
ENTRY = ["line", "row", "column", "value", "low", "high", "n", "records", "runs", "paper", "deviation", "text"]
Column = tuple[str, Key, str, int]  # its name, our number, and where the paper has it: section and place in a row


# ---- the columns
# Forget quality never stands alone: the share of gibberish is beside it.
GIBBERISH: Column = ("degen.", ("elude_forget", "degenerate"), "", -1)


def summary(section: str) -> tuple[Column, ...]:
    """FQ, RQ and mean utility, which a section of the paper has in this order."""
    return ("FQ", FQ, section, 0), GIBBERISH, ("RQ", RQ, section, 1), ("Util.", MEAN, section, 2)


MAIN: tuple[Column, ...] = (
    *summary("main")[:3],
    *((name, (task, "acc"), "main", i) for i, (name, task) in enumerate(UTILITY_BENCHMARKS.items(), 2)),
    ("Avg.", MEAN, "main", 10),
)  # fmt: skip
FULL: tuple[Column, ...] = tuple(
    (f"{name} {part}", (f"elude_{name}", metric), "full", 3 * i + j)
    for i, name in enumerate(("forget", "retain", "world"))
    for j, (part, metric) in enumerate(TRIPLE)
)
_OF_FORGET: tuple[Column, ...] = (("FQ", FQ, "quality", 0), ("P", ("elude_forget", "probability"), "full", 0))
_FLUENCY: tuple[Column, ...] = (GIBBERISH, ("oddness", ("elude_forget", "oddness"), "", -1))
_KNOWN: tuple[Column, ...] = (
    ("first", ("elude_forget", "truth_first"), "", -1),
    ("log R", ("elude_forget", "log_truth_ratio"), "", -1),
    ("cloze", (CLOZE, "truth_first"), "", -1),
)
_OF_KEPT: tuple[Column, ...] = (("RQ", RQ, "quality", 1), ("mention", ("elude_quality", "mention_quality"), "", -1))
QUALITY: tuple[Column, ...] = (
    *_KNOWN, *_OF_FORGET, ("TR", ("elude_forget", "truth_ratio"), "full", 2), *_FLUENCY, *_OF_KEPT,
    ("degen. retain", ("elude_retain", "degenerate"), "", -1),
)  # fmt: skip
NEVER_KNEW: tuple[Column, ...] = (
    ("known", ("elude", "known"), "", -1), *_KNOWN, *_OF_FORGET, *_FLUENCY, *_OF_KEPT,
    ("AUC", ("elude_mia", "mia_auc"), "", -1),
    ("reverse", (f"{ATTACK}reverse_query", "forget_quality"), "", -1),
    ("nine", ("elude_attacks", "forget_quality"), "", -1), ("KS p", ("elude_forget", "ks_p_value"), "", -1),
    ("divergence", ("elude_forget", "reference_divergence"), "", -1),
)  # fmt: skip
# Numbers of ``elude stress`` in files of kept runs: what came back of truth first and P, and the unlearning depth.
STRESS = "stress"
ADVERSARY: tuple[Column, ...] = (
    *_KNOWN[:1], ("first, nine", ("elude_attacks", "truth_first"), "", -1), *_OF_FORGET[:1], GIBBERISH, *_OF_KEPT[:1],
    ("AUC", ("elude_mia", "mia_auc"), "", -1),
    *((f"{attack}: {name}", (f"{STRESS} {attack}", metric), "", -1) for attack, name, metric in
      (("relearn_half", "first", "truth_first"), ("relearn_half", "P", "probability"),
       ("quantise", "first", "truth_first"))),
    ("depth", (STRESS, "depth"), "", -1), ("processor, s", COST["processor"], "", -1),
)  # fmt: skip
MEMBERSHIP: tuple[Column, ...] = (
    ("accuracy", ("elude_mia", "mia_accuracy"), "membership", 0),
    ("deviation", ("elude_mia", "mia_accuracy_std"), "membership", 1),
    *((name, ("elude_mia", f"mia_{name.replace(' ', '_').lower()}"), "membership", -1)
      for name in ("AUC", "AUC low", "AUC high")),
)  # fmt: skip
TOFU: tuple[Column, ...] = (
    ("FQ*", ("tofu", "forget_quality"), "tofu", 0), ("degen.", ("tofu_forget", "degenerate"), "tofu", -1),
    ("RQ*", ("tofu", "model_utility"), "tofu", 1),
    *((f"{task.removeprefix('tofu_').replace('_', ' ')} {part}", (task, metric), "tofu", -1)
      for task in tofu.SETS for part, metric in TRIPLE),
)  # fmt: skip
_COST: tuple[Column, ...] = (
    *((f"{what} {of}", ("", ""), "cost", 2 * i + j) for i, what in enumerate(("training", "inference"))
      for j, of in enumerate(("time", "memory"))),
    *((f"{name}, s" if name in ("processor", "scoring") else name, key, "cost", -1)
      for name, key in COST.items()),
)  # fmt: skip


# ---- the tables
def entries(
    name: str, columns: Sequence[Column], rows: Sequence[Row], model: str,
    wanted: Callable[[str], bool] = lambda method: method == "opt-out" or method not in DISTANCES,
) -> pd.DataFrame:  # fmt: skip
    """The cells of a table: of each base model the paper's methods in its order, then ours."""
    first = next((section for _, _, section, _ in columns if section), "")
    section = PAPER.get(first, {})  # says which rows there are
    ours = [row for row in rows if any(key in row.numbers for _, key, *_ in columns) and wanted(row.method)]
    bases = list(dict.fromkeys(row.base for row in ours)) or [""]
    cells: list[tuple[Any, ...]] = []
    line = 0
    for base in bases:
        its = next((m for m in MODELS if m in base.lower()), "")
        known = _of_model(section, its or model)
        missing = filter(wanted, known) if its or len(bases) == 1 else ()
        here = [row for row in ours if row.base == base]
        for method in dict.fromkeys([*missing, *(row.method for row in here)]):
            for row in [row for row in here if row.method == method] or (None,):
                label = row.name if row else method
                label = f"{base}: {label}" if len(bases) > 1 else label
                for column, key, part, place in columns:
                    theirs = _of_model(PAPER.get(part, {}), its or model).get(method) if place >= 0 else None
                    value = theirs[place] if theirs and (row is None or _papers(row)) else None
                    cells.append((line, label, column, *_entry(row, key, value)))
                line += 1
    return pd.DataFrame(cells, columns=ENTRY)


def _of_model(section: dict[str, Any], model: str) -> dict[str, Any]:
    return section.get(model) or section.get("any", {})


def _papers(row: Row) -> bool:
    """Whether what distinguishes a row from others of its method is what the paper has."""
    return all(str(PAPER["settings"].get(key)) == value for key, value in row.varied.items())


def _entry(row: Row | None, key: Key, paper: float | str | None) -> tuple[Any, ...]:
    """Our number and the paper's: what stands in a cell after its line, row and column."""
    ours = row.numbers.get(key) if row else None
    runs = row.runs if row else 0
    small = "" if paper is None else f"({paper})"
    if row is None or ours is None:
        text = paper if isinstance(paper, str) else NONE
        return *(math.nan,) * 5, runs, paper, math.nan, text + (f"\n{small}" if small and text == NONE else "")
    unit = "count" if key in COST.values() else unit_of(key[1])
    seeds, factor = row.of_seeds.get(key, ()), scale(unit)
    low, high = frame.bounds(ours, unit)
    value, deviation = ours.value, stdev(seeds) if len(seeds) > 1 else math.nan
    text, *interval = frame.cell(value, low, high, unit).split("\n")
    if deviation == deviation:
        text += f" ± {number(deviation, unit)}"
    if unit == "p-value" and len(seeds) > 1:  # the mean of p-values is none
        value = deviation = math.nan
        text = f"{sum(p < 0.05 for p in seeds)} of {len(seeds)} < .05"
    numbers = (factor * number for number in (value, low, high))
    text = "\n".join(filter(None, [text, " ".join([*interval, small]).strip()]))
    # Of the harness's own tasks the error alone is known: the documents are the records.
    records = ours.records if ours.records > 1 else ours.n
    return *numbers, ours.n, records, runs, paper, factor * deviation, text


def table(name: str, cells: pd.DataFrame, model: str) -> Table:
    """A table as it is shown: its name, caption and texts; ``model`` is the paper's, beside ours."""
    compared = f"beside {model} where the model is neither of its two" if name in PAPER else "which has no numbers"
    caption = f"{CAPTIONS[name]} The paper's {PAPER['where'][name]}, {compared}."
    if cells.empty:
        return Table(_title(name), f"{caption} Not run.", pd.DataFrame())
    texts = cells.pivot(index=["line", "row"], columns="column", values="text").droplevel("line")
    texts = texts[list(dict.fromkeys(cells.column))]
    counts = []
    for _, of_line in cells.groupby("line"):
        runs, records = of_line.runs.iloc[0], of_line.records.fillna(0).max()
        counts.append(f"{runs} / {records:.0f}" if records else str(runs or NONE))
    return Table(_title(name), caption, texts.assign(**{"runs / records": counts}))


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()


def neighbours(rows: Sequence[Row], model: str) -> pd.DataFrame:
    """With the neighbours' retain loss and with world data alone, also averaged over the methods that have both."""
    both = {row.method.removesuffix(WORLD_ONLY) for row in rows if row.method.endswith(WORLD_ONLY)}
    columns = summary("neighbours")
    cells = entries("neighbours", columns, rows, model, lambda method: method.removesuffix(WORLD_ONLY) in both)
    means = [
        (len(cells) + line, row.name, column, *_entry(row, key, None))
        for line, row in enumerate(ablation(rows))
        for column, key, *_ in columns
    ]
    return pd.concat([cells, pd.DataFrame(means, columns=ENTRY)]) if means else cells


def ablation(rows: Sequence[Row]) -> list[Row]:
    """Means over the methods that were run both ways."""
    pairs = [
        (row, other) for row in rows for other in rows
        if other.method == row.method + WORLD_ONLY and other.base == row.base
    ]  # fmt: skip
    means = []
    for name, side in (("mean, neighbours and world", 0), ("mean, world only", 1)) if pairs else ():
        numbers = {}
        for key in (FQ, GIBBERISH[1], RQ, MEAN):
            if have := [pair[side].numbers[key] for pair in pairs if all(key in row.numbers for row in pair)]:
                numbers[key] = average(have)
        means.append(Row(name, "", {}, numbers, sum(pair[side].runs for pair in pairs)))
    return means


def attack_columns(rows: Sequence[Row]) -> list[Column]:
    """FQ under each attack, asked plainly, and the mean of the nine attacks."""
    tasks = sorted({task: 0 for row in rows for task, _ in row.numbers if task.startswith(ATTACK)}, key=CONTROL.__eq__)
    columns: list[Column] = [
        (task.removeprefix(ATTACK).replace("_", " "), (task, "forget_quality"), "attacks", -1) for task in tasks
    ]
    return [*columns, ("nine", ("elude_attacks", "forget_quality"), "attacks", -1)]


def attacks(rows: Sequence[Row], model: str) -> pd.DataFrame:
    """The table of the attacks."""
    return entries("attacks", attack_columns(rows), rows, model)


def _row(name: str, columns: Sequence[Column], **how: Any) -> Callable[[Sequence[Row], str], pd.DataFrame]:
    return partial(entries, name, columns, **how)


# By name: what is shown, and what makes the cells. The distances are of the initial weights, opt-out's is the sliced
# Wasserstein distance; TOFU's FQ is a p-value.
CAPTIONS = {
    "main": "Forget and retain quality, and utility.",
    "full": "What FQ and RQ are made of.",
    "distances": "Distances in the regulariser.",
    "neighbours": "Retain losses on neighbours and world data, and on world data only.",
    "attacks": "FQ under adversarial prompts; none: the same records asked plainly; nine: the mean of the attacks.",
    "membership": "Membership inference; 50 is ideal.",
    "tofu": "TOFU: p-value of the KS test against the retained model; model utility.",
    "utility": "Accuracy by the harness's own tasks, and their mean.",
    "cost": "L: tokens, d: projections, as they stand in the paper. Beside it what was run.",
    "quality": "What is still known, FQ with P and TR of it, how fluent the answers are, and what is kept.",
    "never_knew": "What is compared with a model that never knew; known: the worst of what the truth comes first in, "
    "asked plainly and by the attacks; reverse: FQ under the reverse query.",
    "adversary": "What attacks on prompts and weights bring back; depth: in how much of the layers it is gone.",
}
TABLES: dict[str, Callable[[Sequence[Row], str], pd.DataFrame]] = {
    "main": _row("main", MAIN), "full": _row("full", FULL),
    "distances": _row("distances", summary("distances"), wanted=DISTANCES.__contains__), "neighbours": neighbours,
    "attacks": attacks, "membership": _row("membership", MEMBERSHIP), "tofu": _row("tofu", TOFU),
    "utility": _row("utility", MAIN[3:]), "cost": _row("cost", _COST), "quality": _row("quality", QUALITY, wanted=bool),
    "never_knew": _row("never_knew", NEVER_KNEW, wanted=bool),
    "adversary": _row("adversary", ADVERSARY, wanted=bool),
}  # fmt: skip
NOTE = (
    "Per cent, with the standard deviation over seeds (±) or 95 % intervals in brackets, and the paper's own value in "
    "parentheses; – was not measured."
)


def csv_ready(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells of a table for a spreadsheet, one line each."""
    return cells.drop(columns=["line", "text"]).round(4)


# ---- the figures
def attacks_figure(rows: Sequence[Row]) -> str:
    """FQ of the methods with retain losses under each attack (the paper's Figure 3)."""
    columns = attack_columns(rows)
    chosen = [row for row in rows if row.method.endswith("+rt") or row.method.startswith("opt-out")]
    return _bars("Forget quality under attack", columns, chosen)


def ablation_figure(rows: Sequence[Row]) -> str:
    """FQ, RQ and utility with neighbours and with world data only (the paper's Figure 4)."""
    return _bars("Retain data: neighbours and world, or world only", summary("neighbours"), ablation(rows))


def _bars(title: str, columns: Sequence[Column], rows: Sequence[Row]) -> str:
    series: dict[str, list[Estimate | None]] = {}
    for row in rows:
        if any(key in row.numbers for _, key, *_ in columns):
            name = row.name if len({r.base for r in rows}) == 1 else f"{row.base}: {row.name}"
            series[name] = [row.numbers.get(key) for _, key, *_ in columns]
    return plots.bars(title, [column for column, *_ in columns], series)


FIGURES: dict[str, Callable[[Sequence[Row]], str]] = {"attacks": attacks_figure, "ablation": ablation_figure}


# ---- tables within a page
# Which one, on which targets (all, if they are not named), and names or patterns of its rows.
BLOCK = re.compile(
    r"^(<!-- table (?P<name>\w+)(?: of (?P<targets>[^:\n]+))?: (?P<rows>[^\n]+) -->)$.*?^(<!-- /table -->)$",
    re.M | re.S,
)


def fill(page: str, rows: Callable[[Sequence[str]], Sequence[Row]], model: str, where: str) -> str:
    """A page with its tables made anew: what stands between ``<!-- table NAME of TARGETS: ROW | ROW -->`` and its end.

    Args:
        page: text in Markdown.
        rows: what there is of the named targets.
        model: the paper's, beside ours.
        where: what to call the page in an error.

    Raises:
        UserError: it has no table, one without an end, or one that is not known.
    """

    def filled(block: re.Match[str]) -> str:
        if block["name"] not in TABLES:
            raise UserError(f"{where}: no table {block['name']!r}; there are {', '.join(TABLES)}")
        cells = TABLES[block["name"]](rows((block["targets"] or "").replace(",", " ").split()), model)
        texts = table(block["name"], cells, model).cells
        chosen = []
        for pattern in block["rows"].split(" | "):
            fitting = [fnmatchcase(name.removesuffix(f", {COLLAPSED}"), pattern) for name in texts.index]
            missing = pd.DataFrame(NONE, index=[pattern], columns=texts.columns)
            chosen.append(texts[fitting] if any(fitting) else missing)
        return "\n\n".join([block[1], "\n".join(frame.lines(pd.concat(chosen))), block[5]])

    text, count = BLOCK.subn(filled, page)
    if not count or count != page.count("<!-- table "):
        raise UserError(
            f"{where}: <!-- table NAME of TARGETS: ROW | ROW --> to <!-- /table --> is expected once or more"
        )
    return text
