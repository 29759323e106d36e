"""The paper's tables as Markdown, CSV and LaTeX, its figures as SVG."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from html import escape
from typing import Any

from lm_eval_elude.errors import UserError
from lm_eval_elude.report.paper import COLLAPSED, TABLES, Entry, PaperTable, Row, ablation, attacks
from lm_eval_elude.report.tables import Cell, Table, field, grid, lines, percent, span
from lm_eval_elude.scoring.estimates import Estimate


def markdown(tables: Sequence[PaperTable]) -> str:
    """All tables: value, ± over seeds, 95 % interval in brackets, the paper's value in parentheses."""
    note = (
        "Per cent, with the standard deviation over seeds (±) or 95 % intervals in brackets, and the paper's own value "
        "in parentheses; – was not measured."
    )
    return "\n\n".join([note, *(grid(_shown(table)) for table in tables)]) + "\n"


def _shown(table: PaperTable) -> Table:
    cells = [[Cell(name), *map(_cell, entries), Cell(_count(entries, n))] for name, entries, n in table.rows]
    caption = table.caption + ("" if cells else " Not run.")
    return Table(table.name.replace("_", " ").capitalize(), caption, ["", *table.head, COUNT], cells)


# A table within a page: which one, on which targets (all, if they are not named), and names or patterns of its rows.
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
        made = TABLES[block["name"]](rows((block["targets"] or "").replace(",", " ").split()), model)
        chosen = []
        for row in block["rows"].split(" | "):
            fitting = [line for line in made.rows if fnmatchcase(line[0].removesuffix(f", {COLLAPSED}"), row)]
            chosen += fitting or [(row, [Entry(None)] * len(made.head), 0)]
        return "\n\n".join([block[1], "\n".join(lines(_shown(made._replace(rows=chosen)))), block[5]])

    text, found = BLOCK.subn(filled, page)
    if not found or found != page.count("<!-- table "):
        raise UserError(
            f"{where}: <!-- table NAME of TARGETS: ROW | ROW --> to <!-- /table --> is expected once or more"
        )
    return text


def csv_text(table: PaperTable) -> str:
    """One line for each cell; values in per cent, empty where there is none."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("row", "column", "value", "low", "high", "n", "records", "runs", "paper", "deviation"))
    for name, entries, runs in table.rows:
        for column, (ours, paper, spread) in zip(table.head, entries, strict=True):
            said: tuple[Any, ...] = (ours or "", "", "", "", "")
            if isinstance(ours, Estimate):
                low, high = ours.interval if ours.stderr == ours.stderr else (math.nan, math.nan)
                values = (f"{100 * v:.4f}" if v == v else "" for v in (ours.value, low, high))
                said = (*values, ours.n, _records(ours))
            deviation = "" if spread is None else f"{100 * spread:.4f}"
            writer.writerow((field(name), column, *said, runs, "" if paper is None else paper, deviation))
    return out.getvalue()


def latex(table: PaperTable) -> str:
    """A ``booktabs`` table."""
    lines = [" & ".join(map(_tex, ["", *table.head, COUNT])) + r" \\ \midrule"]
    for name, entries, n in table.rows:
        cells = [_cell(entry) for entry in entries]
        texts = [f"{_tex(c.text)} {{\\scriptsize {_tex(c.small)}}}" if c.small else _tex(c.text) for c in cells]
        lines.append(" & ".join([_tex(name), *texts, _tex(_count(entries, n))]) + r" \\")
    head = [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{l{'r' * (len(table.head) + 1)}}}", r"\toprule"]
    foot = [r"\bottomrule", r"\end{tabular}", rf"\caption{{{_tex(table.caption)}}}", r"\end{table}"]
    return "\n".join([*head, *lines, *foot]) + "\n"


COUNT = "runs / records"


def _count(entries: Sequence[Entry], runs: int) -> str:
    """Results files behind a line, and the most distinct records behind one of its numbers."""
    records = max((_records(ours) for ours, *_ in entries if isinstance(ours, Estimate)), default=0)
    return f"{runs} / {records}" if records else str(runs or "–")


def _records(ours: Estimate) -> int:
    """Distinct records behind a number; of the harness's own tasks, whose error alone is known, their documents."""
    return ours.records if ours.records > 1 else ours.n


def _cell(entry: Entry) -> Cell:
    ours, paper, spread = entry
    text = ours or "–"
    small = []
    if isinstance(ours, Estimate):
        text = percent(ours.value) + ("" if spread is None else f" ± {percent(spread)}")
        small = [] if ours.stderr != ours.stderr else [span(*ours.interval)]
    if isinstance(paper, str) and ours is None:
        return Cell(paper)
    return Cell(str(text), " ".join([*small, *([] if paper is None else [f"({paper})"])]))


def _tex(text: str) -> str:
    signs = {"–": "--", "²": r"\textsuperscript{2}", "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\^{}"}
    return "".join(signs.get(c) or (f"\\{c}" if c in "&%$#_{}" else c) for c in text if c.isprintable())


COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")  # told apart by the colour-blind
Series = Mapping[str, Sequence[Estimate | None]]


def attacks_figure(found: Sequence[Row], model: str) -> str:
    """FQ of the methods with retain losses under each attack (the paper's Figure 3)."""
    table = attacks(found, model)
    kept = [line for line in table.rows if line[0].split(",")[0].endswith("+rt") or "opt-out" in line[0]]
    return bars("Forget quality under attack", table.head, {name: _ours(entries) for name, entries, _ in kept})


def ablation_figure(found: Sequence[Row], model: str) -> str:
    """FQ, RQ and utility with neighbours and with world data only (the paper's Figure 4)."""
    lines = {name: _ours(entries) for name, entries, _ in ablation(found)}
    return bars("Retain data: neighbours and world, or world only", ("FQ", "degen.", "RQ", "Util."), lines)


FIGURES: dict[str, Callable[[Sequence[Row], str], str]] = {"attacks": attacks_figure, "ablation": ablation_figure}


def _ours(entries: Sequence[Entry]) -> list[Estimate | None]:
    return [ours if isinstance(ours, Estimate) else None for ours, *_ in entries]


def bars(title: str, groups: Sequence[str], series: Series) -> str:
    """Grouped bars from 0 to 100 % with 95 % intervals, as SVG; a missing value is a dash.

    Args:
        title: of the figure.
        groups: what stands below the axis.
        series: by name, one value for each group.
    """
    wide, high, left, top, legend = 14, 220, 44, 34, 18
    step = wide * max(1, len(series)) + 20
    width, foot = left + max(step * len(groups), 300) + 80, top + high
    draw = [f'<text x="{left}" y="18" font-size="14">{escape(title)}</text>']
    for tick in range(0, 101, 25):
        y = foot - high * tick / 100
        draw.append(f'<path d="M{left} {y:g}H{width - 80}" stroke="#ddd"/>')
        draw.append(f'<text x="{left - 6}" y="{y + 4:g}" text-anchor="end">{tick}</text>')
    for g, group in enumerate(groups):
        x = left + 10 + step * g
        middle = x + (step - 20) / 2
        draw.append(f'<text transform="translate({middle:g},{foot + 14}) rotate(30)">{escape(group)}</text>')
        for i, values in enumerate(series.values()):
            at, value = x + wide * i, values[g]
            if value is None or math.isnan(value.value):
                draw.append(f'<text x="{at + wide / 2:g}" y="{foot - 4}" text-anchor="middle">–</text>')
                continue
            tall = high * value.value
            draw.append(
                f'<rect x="{at}" y="{foot - tall:.1f}" width="{wide - 2}" height="{tall:.1f}" '
                f'fill="{COLORS[i % len(COLORS)]}"/>'
            )
            if not math.isnan(value.stderr):
                low, top_ = (foot - high * v for v in value.interval)
                draw.append(f'<path d="M{at + wide / 2 - 1:g} {low:.1f}V{top_:.1f}" stroke="#000"/>')
    for i, name in enumerate(series):
        y = foot + 110 + legend * i
        draw.append(f'<rect x="{left}" y="{y - 10}" width="12" height="12" fill="{COLORS[i % len(COLORS)]}"/>')
        draw.append(f'<text x="{left + 18}" y="{y}">{escape(name)}</text>')
    if not series:
        draw.append(f'<text x="{left + 20}" y="{top + high / 2:g}">not measured</text>')
    size = f'width="{width}" height="{foot + 120 + legend * len(series)}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([start, '<rect width="100%" height="100%" fill="#fff"/>', *draw, "</svg>"]) + "\n"
