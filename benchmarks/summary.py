"""Tables of ``docs/results.md`` and of README from the rows of ``outcome.py``: ``python benchmarks/summary.py --docs``.

Means are over targets, of each the mean over its seeds; intervals are t-intervals of 95 % over targets, of differences
paired by target. Only rows with a method's chosen settings may be in the table.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from operator import sub, truediv
from pathlib import Path
from statistics import fmean, stdev

from outcome import RESULTS, ROOT, STEPS, points_file, read_rows, strongest
from scipy.stats import t
from tables import DOCS, markdown, put

# Heads of the main table, and columns of the rows, in per cent.
SHOWN = {
    "choice": "mc", "cloze": "cloze", "attacked": "attacked_mc", "FQ": "FQ", "P": "P", "AUC": "AUC",
    "repetition": "repetition", "odd words": "odd_words", "utility": "RQ", "named": "named", "recovery": "recovery",
}  # fmt: skip
# Of these differences and relearning are shown with their intervals.
MAIN = (
    "guardrail", "ga+rt", "dpo+rt", "npo+rt", "idk+rt", "opt-out", "simnpo+rt", "name-swap", "name-swap-robust",
)  # fmt: skip
# README's table: heads and columns; the paper's method and its nearest baseline, ours, and the goal.
README = {
    "multiple choice": "mc", "after relearning": "recovery", "repetition": "repetition", "utility": "RQ", "FQ": "FQ",
}  # fmt: skip
README_METHODS = {
    "original": "original", "npo+rt": "`npo+rt`", "opt-out": "`opt-out` (the paper's)",
    "name-swap": "`name-swap` (ours)", "name-swap-robust": "`name-swap-robust` (ours)",
    "retrained": "retrained model: the goal",
}  # fmt: skip
# Differences from the retrained model, in points, and what we wanted ours to reach; then a share of the retrained
# model's, one of the original's, and processor time in that of NPO+RT (for name-swap 2.5).
LESS_THAN_RETRAINED = {"choice": "mc", "cloze": "cloze", "worst attack": "worst_mc", "odd words": "odd_words"}
LIMITS = ("≤ 8", "≤ 15", "≤ 15", "≤ 5", "≥ 95", "≥ 95", "≤ 5")
RECOVERED = "≤ 30"
Row = Mapping[str, str]
Rows = dict[str, dict[str, list[Row]]]  # by method and target


def grouped(rows: Sequence[Row]) -> Rows:
    found: Rows = {}
    for row in rows:
        found.setdefault(row["method"], {}).setdefault(row["target"], []).append(row)
    return found


def of_targets(rows: Mapping[str, Sequence[Row]], column: str) -> dict[str, float]:
    """The mean over seeds by target, of those that have the column."""
    kept = {target: [float(row[column]) for row in of if row.get(column)] for target, of in rows.items()}
    return {target: fmean(values) for target, values in kept.items() if values}


def interval(values: Sequence[float], scale: float = 100) -> str:
    """Mean and its 95 % interval over targets; of one target the value alone, of none a dash."""
    if len(values) < 2:
        return f"{scale * values[0]:.1f}" if values else "–"
    half = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return f"{scale * fmean(values):.1f} [{scale * (fmean(values) - half):.1f}, {scale * (fmean(values) + half):.1f}]"


def paired(left: Mapping[str, float], right: Mapping[str, float], by: Callable[[float, float], float]) -> list[float]:
    return [by(value, right[target]) for target, value in left.items() if target in right]


def means(of: Mapping[str, Sequence[Row]], columns: Sequence[str]) -> list[str]:
    found = [of_targets(of, column).values() for column in columns]
    return [f"{100 * fmean(values):.1f}" if values else "–" for values in found]


def methods(rows: Rows) -> list[str]:
    lines = []
    for method, of in rows.items():
        seeds = f"{len(of)} × {max(len(seeds) for seeds in of.values())}"
        lines.append([f"`{method}`", *means(of, [*SHOWN.values()]), seeds])
    return markdown(["model", *SHOWN, "targets × seeds"], lines)


def readme(rows: Rows) -> list[str]:
    lines = [[name, *means(rows[method], [*README.values()])] for method, name in README_METHODS.items()]
    return markdown(["model", *README], lines)


def differences(rows: Rows) -> list[str]:
    """From the retrained model in points; utility as a share of the retrained model's, named of the original's."""
    lines, head = [], [*LESS_THAN_RETRAINED, "utility, share of retrained", "named, share of original", "cost, NPO+RT"]
    for method in filter(rows.__contains__, MAIN):
        cells, of = [], rows[method]
        for column in LESS_THAN_RETRAINED.values():
            cells.append(interval(paired(of_targets(of, column), of_targets(rows["retrained"], column), sub)))
        for column, other in (("RQ", "retrained"), ("named", "original")):
            goal = of_targets(rows[other], column)
            cells.append(interval(paired(of_targets(of, column), goal, truediv)))
        usual = of_targets(rows.get("npo+rt", {}), "train_seconds")
        cost = paired(of_targets(of, "train_seconds"), usual, truediv)
        lines.append([f"`{method}`", *cells, interval(cost, 1)])
    lines.append(["wanted of ours", *LIMITS])
    return markdown(["model", *head], lines)


def relearning(rows: Rows) -> list[str]:
    """Recovery after so many steps on one half, the largest of the rates that count."""
    lines = []
    for method in filter(rows.__contains__, MAIN[1:]):
        found = [list(of_targets(rows[method], f"recovery_{steps}").values()) for steps in STEPS]
        lines.append([f"`{method}`", *map(interval, found)])
    lines.append(["wanted of `name-swap-robust`", RECOVERED, "–", RECOVERED])
    return markdown(["model", *(f"{steps} steps" for steps in STEPS)], lines)


def attacks(rows: Rows) -> list[str]:
    """Recovery by each attack at its strongest point, the mean over targets of those where a point counts."""
    lines = []
    names = dict.fromkeys(row["attack"] for of in rows.values() for points in of.values() for row in points)
    for method, of in rows.items():
        cells = []
        for name in names:
            counted = {
                target: [float(row["recovery"]) for row in points if row["attack"] == name and row["counts"] == "1"]
                for target, points in of.items()
            }
            cells.append(interval([max(found) for found in counted.values() if found]))
        lines.append([f"`{method}`", *cells])
    return markdown(["model", *(f"`{name}`" for name in names)], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, nargs="?", default=RESULTS / "final.csv")
    parser.add_argument("--docs", action="store_true", help="also write the tables into docs/results.md and README.md")
    given = parser.parse_args()
    rows = grouped([{**row, "recovery": strongest(row)} for row in read_rows(given.table)])
    points = grouped(read_rows(points_file(given.table)))
    made = {"methods": methods(rows), "differences": differences(rows), "relearning": relearning(rows)}
    for name, lines in (made | {"attacks": attacks(points)}).items():
        print("\n".join([*lines, ""]))
        if given.docs:
            put(DOCS / "results.md", name, lines)
    if given.docs:
        put(ROOT / "README.md", "found", readme(rows))


if __name__ == "__main__":
    main()
