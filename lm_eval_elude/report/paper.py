"""The paper's tables and figures from results alone, with the paper's own values beside ours.

``paper.toml`` has the tables' columns and the paper's values.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import stdev
from typing import Any, NamedTuple

import pandas as pd

from lm_eval_elude.errors import UserError
from lm_eval_elude.report import frame, plots
from lm_eval_elude.report.frame import Table
from lm_eval_elude.report.rows import COLLAPSED, WORLD_ONLY, Key, Row
from lm_eval_elude.scoring.benchmarks.elude import ATTACK, CONTROL
from lm_eval_elude.scoring.estimates import Estimate, average
from lm_eval_elude.scoring.units import NONE, number, scale
from lm_eval_elude.scoring.units import unit as unit_of

PAPER: dict[str, Any] = tomllib.loads(Path(__file__).with_name("paper.toml").read_text(encoding="utf-8"))
TABLES: dict[str, dict[str, Any]] = PAPER["tables"]
MODELS = tuple(PAPER["main"])
DISTANCES = PAPER["distances"]["llama-3.1"]
# FQ and RQ of every method, and P and TR of the forget set.
PAPER["quality"] = {
    model: {method: [*row[:2], *PAPER["full"][model].get(method, (None,) * 3)[:3:2]]
            for method, row in (PAPER["distances"].get(model, {}) | of_main).items()}
    for model, of_main in PAPER["main"].items()
}  # fmt: skip
# Of a table's cells; values are in per cent where they are shares.
ENTRY = ["line", "row", "column", "value", "low", "high", "n", "records", "runs", "paper", "deviation", "text"]
STRESS = "stress"  # the task of the numbers of ``elude stress`` in files of kept runs, before the name of an attack


class Column(NamedTuple):
    """A column of a table: its name, our number, and the place of the paper's value in the rows of its section."""

    name: str
    key: Key
    place: int | None = None


COLUMNS = {
    name: [Column(label, (task, metric), *place) for label, task, metric, *place in of_table["columns"]]
    for name, of_table in TABLES.items()
}


# ---- the tables
def cells(name: str, rows: Sequence[Row], model: str) -> pd.DataFrame:
    """The cells of a table: of each base model the paper's methods in its order, then ours.

    ``model`` is the paper's, whose values stand beside ours where our base model is neither of its two.
    """
    columns = _columns(name, rows)
    section = PAPER.get(TABLES[name].get("values", name), {})
    run_both_ways = {row.method.removesuffix(WORLD_ONLY) for row in rows if row.method.endswith(WORLD_ONLY)}
    wanted: Callable[[str], bool] = {
        "all": lambda method: True,
        "but distances": lambda method: method == "opt-out" or method not in DISTANCES,
        "distances": DISTANCES.__contains__,
        "run both ways": lambda method: method.removesuffix(WORLD_ONLY) in run_both_ways,
    }[TABLES[name].get("methods", "but distances")]
    ours = [row for row in rows if any(column.key in row.numbers for column in columns) and wanted(row.method)]
    bases = list(dict.fromkeys(row.base for row in ours)) or [""]
    lines: list[tuple[str, Row | None, Sequence[Any]]] = []  # label, our row, the paper's row
    for base in bases:
        its = next((m for m in MODELS if m in base.lower()), "")
        papers = section.get(its or model) or section.get("any", {})
        missing = filter(wanted, papers) if its or len(bases) == 1 else ()
        here = [row for row in ours if row.base == base]
        for method in dict.fromkeys([*missing, *(row.method for row in here)]):
            for row in [row for row in here if row.method == method] or (None,):
                label = row.name if row else method
                beside = papers.get(method, ()) if row is None or _with_the_papers_settings(row) else ()
                lines.append((f"{base}: {label}" if len(bases) > 1 else label, row, beside))
    if name == "neighbours":
        lines += [(row.name, row, ()) for row in ablation(rows)]
    entries = [
        (line, label, column, *_entry(row, key, None if place is None or not beside else beside[place]))
        for line, (label, row, beside) in enumerate(lines)
        for column, key, place in columns
    ]
    return pd.DataFrame(entries, columns=ENTRY)


def _columns(name: str, rows: Sequence[Row]) -> list[Column]:
    """The columns of a table; under attack each attack that was run, and asked plainly."""
    if name != "attacks":
        return COLUMNS[name]
    tasks = sorted({task: 0 for row in rows for task, _ in row.numbers if task.startswith(ATTACK)}, key=CONTROL.__eq__)
    of_attacks = [Column(task.removeprefix(ATTACK).replace("_", " "), (task, "forget_quality")) for task in tasks]
    return [*of_attacks, *COLUMNS[name]]


def _with_the_papers_settings(row: Row) -> bool:
    """Whether what distinguishes a row from others of its method is what the paper has."""
    return all(str(PAPER["settings"].get(key)) == value for key, value in row.varied.items())


def _entry(row: Row | None, key: Key, paper: float | str | None) -> tuple[Any, ...]:
    """Our number and the paper's: what stands in a cell after its line, row and column."""
    ours = row.numbers.get(key) if row else None
    runs = row.runs if row else 0
    small = "" if paper is None else f"({paper})"
    if row is None or ours is None:
        text = paper if isinstance(paper, str) else f"{NONE}\n{small}".strip()
        return *(math.nan,) * 5, runs, paper, math.nan, text
    unit = "count" if key[0] == "cost" else unit_of(key[1])
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


def table(name: str, rows: Sequence[Row], model: str) -> Table:
    """A table as it is shown: its name, caption and texts."""
    of_table, entries = TABLES[name], cells(name, rows, model)
    compared = (
        f"beside {model} where the model is neither of its two"
        if of_table.get("values", name) in PAPER
        else "which has no numbers"
    )
    caption = f"{of_table['caption']} The paper's {of_table['where']}, {compared}."
    title = name.replace("_", " ").capitalize()
    if entries.empty:
        return Table(title, f"{caption} Not run.", pd.DataFrame())
    texts = entries.pivot(index=["line", "row"], columns="column", values="text").droplevel("line")
    texts = texts[list(dict.fromkeys(entries.column))]
    counts = []
    for _, of_line in entries.groupby("line"):
        runs, records = of_line.runs.iloc[0], of_line.records.fillna(0).max()
        counts.append(f"{runs} / {records:.0f}" if records else str(runs or NONE))
    return Table(title, caption, texts.assign(**{"runs / records": counts}))


def ablation(rows: Sequence[Row]) -> list[Row]:
    """Means over the methods that were run with the neighbours' retain loss and with world data alone."""
    pairs = [
        (row, other) for row in rows for other in rows
        if other.method == row.method + WORLD_ONLY and other.base == row.base
    ]  # fmt: skip
    means = []
    for name, side in (("mean, neighbours and world", 0), ("mean, world only", 1)) if pairs else ():
        numbers = {}
        for _, key, _ in COLUMNS["neighbours"]:
            if have := [pair[side].numbers[key] for pair in pairs if all(key in row.numbers for row in pair)]:
                numbers[key] = average(have)
        means.append(Row(name, "", {}, numbers, sum(pair[side].runs for pair in pairs)))
    return means


NOTE = (
    "Per cent, with the standard deviation over seeds (±) or 95 % intervals in brackets, and the paper's own value in "
    "parentheses; – was not measured."
)


def csv_ready(entries: pd.DataFrame) -> pd.DataFrame:
    """The cells of a table for a spreadsheet, one line each."""
    return entries.drop(columns=["line", "text"]).round(4)


# ---- the figures
def attacks_figure(rows: Sequence[Row]) -> str:
    """FQ of the methods with retain losses under each attack (the paper's Figure 3)."""
    chosen = [row for row in rows if row.method.endswith("+rt") or row.method.startswith("opt-out")]
    return _bars("Forget quality under attack", _columns("attacks", rows), chosen)


def ablation_figure(rows: Sequence[Row]) -> str:
    """FQ, RQ and utility with neighbours and with world data only (the paper's Figure 4)."""
    return _bars("Retain data: neighbours and world, or world only", COLUMNS["neighbours"], ablation(rows))


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

    ``rows`` gives what there is of the named targets; ``model`` is the paper's, beside ours. UserError, which calls the
    page ``where``: it has no table, one without an end, or one that is not known.
    """

    def filled(block: re.Match[str]) -> str:
        if block["name"] not in TABLES:
            raise UserError(f"{where}: no table {block['name']!r}; there are {', '.join(TABLES)}")
        texts = table(block["name"], rows((block["targets"] or "").replace(",", " ").split()), model).cells
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
