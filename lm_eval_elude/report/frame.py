"""All numbers of some runs as one long frame, and a table in every form.

A frame has a row for each run, task (or group), target ("" for all together) and metric. Its columns are
:data:`COLUMNS`. Names, units and order come from :data:`~lm_eval_elude.scoring.metrics.METRICS`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from lm_eval_elude.report.comparison import NamedRun
from lm_eval_elude.scoring.benchmarks.elude import ATTACK, CLOZE, CONTROL, LEAK, MENTION
from lm_eval_elude.scoring.estimates import Estimate
from lm_eval_elude.scoring.units import number, unit

COLUMNS = ("run", "task", "metric", "target", "value", "stderr", "low", "high", "n", "records", "seed")
# What the tables call the tasks and groups, in their order; the group ``elude`` repeats the others.
SECTIONS = {
    "elude_quality": "plain questions", "elude_forget": "forget set", "elude_retain": "retain set",
    "elude_world": "world set", MENTION: "mention set", CLOZE: "cloze set", "elude_attacks": "mean of the attacks",
    LEAK: "drawn answers", "elude_mia": "membership",
    "tofu": "TOFU", "tofu_forget": "TOFU forget set", "tofu_retain": "TOFU retain set",
    "tofu_real_authors": "TOFU real authors", "tofu_world_facts": "TOFU world facts",
}  # fmt: skip
FORGET_SETS = ("elude_forget", "tofu_forget")


def frame(runs: Sequence[NamedRun]) -> pd.DataFrame:
    """The numbers of runs, formed again from their samples; ``seed`` is the training's, where a manifest tells it."""
    rows = []
    for run in runs:
        seed = run.manifest.settings.get("seed") if run.manifest else None
        for (task, target, metric), estimate in run.estimates.items():
            low, high = bounds(estimate, unit(metric))
            numbers = (estimate.value, estimate.stderr, low, high, estimate.n, estimate.records)
            rows.append((run.name, task, metric, target, *numbers, seed))
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"seed": object})


def bounds(estimate: Estimate, unit: str) -> tuple[float, float]:
    """The 95 % interval, that of a share within 0 and 1; NaN where no error is known."""
    if math.isnan(estimate.stderr):
        return math.nan, math.nan
    if unit in ("share", "p-value"):
        return estimate.interval
    return estimate.bounds


def cell(value: float, low: float, high: float, unit: str, sign: str = "") -> str:
    """A value, and in small print (after a line break) its interval."""
    sign = "+" if unit == "difference of shares" else sign
    interval = "" if math.isnan(low) else f"\n[{number(low, unit, sign)}, {number(high, unit, sign)}]"
    return number(value, unit, sign) + (interval if value == value else "")


def attack_name(task: str) -> str:
    """What the tables and plots call an attack."""
    return "asked plainly" if task == CONTROL else task.removeprefix(ATTACK).replace("_", " ")


# ---- tables
class Table(NamedTuple):
    """A table of texts with a caption; a line break stands before what is in small print."""

    name: str
    caption: str
    cells: pd.DataFrame


def markdown(table: Table) -> str:
    """A table in Markdown, with its name and caption."""
    return f"### {plain(table.name)}\n\n{table.caption}\n\n" + "\n".join(lines(table.cells))


def lines(cells: pd.DataFrame) -> list[str]:
    """The lines of a table in Markdown."""
    rows = [["", *cells.columns], *([name, *row] for name, row in zip(cells.index, cells.to_numpy(), strict=True))]
    texts = [[plain(text) for text in row] for row in rows]
    widths = [max(2, *map(len, column)) for column in zip(*texts, strict=True)]  # a rule needs a dash and a colon
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [
        f"| {' | '.join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])])} |"
        for first, *others in [texts[0], rule, *texts[1:]]
    ]


def latex(table: Table) -> str:
    """A table in LaTeX, for the packages ``booktabs`` and ``inputenc``."""
    caption = f"{table.name}. {table.caption}".replace("%", r"\%")
    return str(table.cells.map(plain_cell).to_latex(escape=True, caption=caption))


def csv_text(table: pd.DataFrame) -> str:
    """A frame as CSV: an empty field is a number that cannot be had, and no text is a spreadsheet's formula."""
    texts = table.select_dtypes(["object", "string"]).columns
    return str(table.assign(**{name: table[name].map(_no_formula) for name in texts}).to_csv(index=False))


def _no_formula(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def plain_cell(text: str) -> str:
    """A text in one line without what cannot be printed."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def plain(text: str) -> str:
    """A text of a run as Markdown shows it: one line, no markup."""
    return re.sub(r"[\\|`*]|<(?=[\w/!?])|(?<=])\(", r"\\\g<0>", plain_cell(text))
