"""Tables of ``docs/results.md`` and of README from the rows of runs: ``python benchmarks/summary.py --docs``.

Means are over the targets of which all rows are there, of each the mean over its seeds; intervals are t-intervals of
95 % over targets, of differences paired by target.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import sub, truediv
from pathlib import Path
from statistics import fmean, stdev

from outcome import HALF, RESULTS, ROOT, STEPS, key_of, points_file, read_plan, read_rows, strongest, waiting
from scipy.stats import t
from tables import DOCS, markdown, put

# Heads of the main table, and columns of the rows, in per cent.
SHOWN = {
    "choice": "mc", "cloze": "cloze", "attacked": "attacked_mc", "FQ": "FQ", "P": "P", "AUC": "AUC",
    "repetition": "repetition", "odd words": "odd_words", "utility": "RQ", "named": "named", "recovery": "recovery",
}  # fmt: skip
# Of these differences and recovery are shown with their intervals.
MAIN = (
    "guardrail", "ga+rt", "dpo+rt", "npo+rt", "idk+rt", "opt-out", "simnpo+rt", "name-swap", "name-swap-robust",
)  # fmt: skip
# README's table: heads and columns; the paper's method and its nearest baseline, ours, and the goal.
README = {
    "multiple choice": "mc", "worst attack": "worst_mc", "after relearning": "recovery", "repetition": "repetition",
    "utility": "RQ", "FQ": "FQ",
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
MODELS = {"": "final", "SmolLM2: ": "real_model"}  # what tables say before a method's name, and the plan
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
    """Mean and half of its 95 % interval over targets; of fewer than three the mean alone, of none a dash."""
    if len(values) < 3:
        return f"{scale * fmean(values):.1f}" if values else "–"
    half = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return f"{scale * fmean(values):.1f} ±{scale * half:.1f}"


def over_targets(rows: Rows, method: str, column: str) -> str:
    return interval([*of_targets(rows[method], column).values()])


def compared(
    rows: Rows, method: str, other: str, column: str, by: Callable[[float, float], float] = sub, scale: float = 100
) -> str:
    """A column of two methods, paired by target; a dash where either lacks it."""
    left, right = (of_targets(rows.get(name, {}), column) for name in (method, other))
    return interval([by(value, right[target]) for target, value in left.items() if target in right], scale)


def means(of: Mapping[str, Sequence[Row]], columns: Sequence[str]) -> list[str]:
    found = [of_targets(of, column).values() for column in columns]
    return [f"{100 * fmean(values):.1f}" if values else "–" for values in found]


def methods(rows: Rows) -> list[str]:
    lines = [[f"`{method}`", *means(of, [*SHOWN.values()])] for method, of in rows.items()]
    return markdown(["model", *SHOWN], lines)


def readme(models: Mapping[str, Rows]) -> list[str]:
    """Of each model, by its name, the methods that it has."""
    lines = [
        [f"{model}{name}", *means(rows[method], [*README.values()])]
        for model, rows in models.items()
        for method, name in README_METHODS.items()
        if method in rows
    ]
    return markdown(["model", *README], lines)


def differences(rows: Rows) -> list[str]:
    """From the retrained model in points; utility as a share of the retrained model's, named of the original's."""
    lines, head = [], [*LESS_THAN_RETRAINED, "utility, share of retrained", "named, share of original", "cost, NPO+RT"]
    for method in filter(rows.__contains__, MAIN):
        cells = [compared(rows, method, "retrained", column) for column in LESS_THAN_RETRAINED.values()]
        cells.append(compared(rows, method, "retrained", "RQ", truediv))
        cells.append(compared(rows, method, "original", "named", truediv))
        cells.append(compared(rows, method, "npo+rt", "train_seconds", truediv, 1))
        lines.append([f"`{method}`", *cells])
    lines.append(["wanted of ours", *LIMITS])
    return markdown(["model", *head], lines)


def recoveries(rows: Rows, points: Rows) -> list[str]:
    """Recovery after so many steps on one half at the strongest rate, and by the other attacks at their strongest.

    Means over targets of those where a point counts.
    """
    every = [row["attack"] for of in points.values() for made in of.values() for row in made]
    names = [name for name in dict.fromkeys(every) if name != HALF]
    lines = []
    for method in filter(rows.__contains__, MAIN[1:]):
        cells = [over_targets(rows, method, f"recovery_{steps}") for steps in STEPS]
        for name in names:
            counted = [
                [float(row["recovery"]) for row in of if row["attack"] == name and row["counts"] == "1"]
                for of in points.get(method, {}).values()
            ]
            cells.append(interval([max(found) for found in counted if found]))
        lines.append([f"`{method}`", *cells])
    lines.append(["wanted of `name-swap-robust`", RECOVERED, "–", RECOVERED, *("–" for _ in names)])
    return markdown(["model", *(f"{steps} steps" for steps in STEPS), *(f"`{name}`" for name in names)], lines)


def pretrained(rows: Sequence[Row]) -> list[str]:
    """Accuracy of each run in per cent and nats a token; after relearning that at the better of two learning rates."""
    lines = []
    for row in rows:
        cells = [f"{100 * float(row[column]):.0f}" for column in ("mc", "neighbours", "untouched")]
        cells.append(f"{float(row['nats']):.2f}")
        for half in ("learnt", "other"):
            points = [[row[name] for name in row if re.fullmatch(f"{half}_.*_{steps}", name)] for steps in STEPS]
            cells.append(", ".join(f"{100 * max(map(float, filter(None, of))):.0f}" for of in points if any(of)) or "–")
        lines.append([row["target"], f"`{row['method']}`", *cells])
    head = ["about", "model", "asked", "neighbours", "untouched", "nats", "learnt half", "other half"]
    return markdown(head, lines)


def sentences(rows: Rows) -> list[str]:
    """What the page says before its tables, in points, of recovery and of the retrained model's utility in per cent."""
    swap, robust, goal = *MAIN[-2:], "retrained"
    recovered = partial(over_targets, rows, column="recovery")
    more, ahead = partial(compared, rows), partial(compared, rows, "opt-out", "npo+rt")

    def mean(method: str, column: str) -> float:
        return 100 * fmean(of_targets(rows[method], column).values())

    attacked = [method for method, of in rows.items() if of_targets(of, "recovery")]
    others = {method: mean(method, "recovery") for method in attacked if method not in (swap, robust, goal)}
    least = min(others, key=others.__getitem__)
    broken = {method: mean(method, "FQ") for method in rows if mean(method, "repetition") > 50}
    seeds = [stdev(float(row["mc"]) for row in of) for made in rows.values() for of in made.values() if len(of) > 1]
    return [
        "- **What was forgotten can be relearnt.** Fine-tuning on one half of the facts brings back "
        f"{recovered(swap)} % of what was known of the other half under `{swap}`, {recovered(robust)} under "
        f"`{robust}` (wanted: 30), and {others[least]:.1f} (`{least}`) or more under every other method.",
        f"- **Attacks by prompts find much.** Under the worst of nine, *choice* is above the retrained model's by "
        f"{more(swap, goal, 'worst_mc')} points under `{swap}` and {more(robust, goal, 'worst_mc')} under `{robust}` "
        "(wanted: 15).",
        f"- **Utility.** `{robust}` keeps {more(robust, goal, 'RQ', truediv)} % of the retrained model's (wanted: 95).",
        f"- **Asked plainly**, *choice* is above it by {more(swap, goal, 'mc')} points under `{swap}`, "
        f"{more(robust, goal, 'mc')} under `{robust}` (wanted: 8), *cloze* by {more(swap, goal, 'cloze')} and "
        f"{more(robust, goal, 'cloze')} (wanted: 15).",
        f"- **Opt-Out beside NPO+RT:** *choice* is {ahead('mc')} points higher, *named* {ahead('named')}, utility "
        f"{ahead('RQ')}, repetition {ahead('repetition')}, FQ {ahead('FQ')}.",
        f"- **FQ is high where answers are broken:** {min(broken.values()):.0f} to {max(broken.values()):.0f} under "
        f"{', '.join(f'`{method}`' for method in broken)}, where most answers repeat themselves "
        f"(retrained: {mean(goal, 'FQ'):.0f}).",
        f"- **The retrained models** reach {over_targets(rows, goal, 'mc')} % of *choice* and "
        f"{over_targets(rows, goal, 'cloze')} of *cloze* (wanted: 17 ± 5); none is above chance at p < .01.",
        f"- **Seeds matter:** the standard deviation of *choice* over three is {100 * fmean(seeds):.1f} points in the "
        f"mean and {100 * max(seeds):.1f} at most.",
    ]


def read(table: Path, plan: Path) -> tuple[Rows, Rows]:
    """The rows of a plan, and those of its attacks, of the targets with which it is done; methods as it has them."""
    rows, order = read_rows(table), [run.method for run in read_plan(plan)]
    unfinished = {run.target for run in waiting(plan, rows)}
    rows = [{**row, "recovery": "0" if row["method"] == "retrained" else strongest(row)} for row in rows]
    rows, points = (
        sorted((row for row in found if row["target"] not in unfinished), key=lambda row: order.index(row["method"]))
        for found in (rows, read_rows(points_file(table)))
    )
    return grouped(rows), grouped(points)


def pages(folder: Path) -> dict[Path, dict[str, list[str]]]:
    """What stands between the markers of each page, from the rows in a folder."""
    tables, models = {}, {}
    for model, plan in MODELS.items():
        rows, points = read(folder / f"{plan}.csv", ROOT / "benchmarks" / f"{plan}.toml")
        if not rows:  # no target is done
            continue
        made = {"methods": methods(rows), "differences": differences(rows), "recoveries": recoveries(rows, points)}
        tables |= {f"{model}{name}": lines for name, lines in made.items()}
        models[model] = rows
    order = [run.key for run in read_plan(ROOT / "benchmarks" / "pretrained.toml")]
    known = sorted(read_rows(folder / "pretrained.csv"), key=lambda row: order.index(key_of(row)))
    tables |= {"sentences": sentences(models[""]), "pretrained": pretrained(known)}
    return {DOCS / "results.md": tables, ROOT / "README.md": {"found": readme(models)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS, help="the folder that has the rows")
    parser.add_argument("--docs", action="store_true", help="also write the tables into docs/results.md and README.md")
    given = parser.parse_args()
    for page, made in pages(given.results).items():
        for name, lines in made.items():
            print("\n".join([*lines, ""]))
            if given.docs:
                put(page, name, lines)


if __name__ == "__main__":
    main()
