"""Rows of ``outcome.py`` beside version 0.1's: ``python benchmarks/against_0_1.py RESULTS_JSON [OUTCOME_CSV]``.

``RESULTS_JSON`` is ``docs/results.json`` of commit 34fb9ec. Of each method and target: the means over seeds, their
difference, and that in standard errors; the spread over seeds is that of both versions together. Recovery is the
largest over steps: 2 to 20 in 0.1, 5 and 20 here. Processor time has loading and lessons in it
here, and begins with the first step there.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import fmean

from outcome import ROOT, read_rows
from tables import markdown

from lm_eval_elude.data.targets import slugify

NAMES = {"opt-out": "opt-out", "npo+rt": "npo+rt", "name-swap": "opt-out-stranger", "name-swap-robust": "stranger-muon"}
COLUMNS = {
    "FQ": ("elude_quality", "forget_quality"), "RQ": ("elude_quality", "retain_quality"),
    "mc": ("elude_forget", "truth_first"), "cloze": ("elude_cloze", "truth_first"), "AUC": ("elude_mia", "mia_auc"),
    "repetition": ("elude_forget", "degenerate"), "recovery": ("stress relearn_half", "truth_first"),
    "train_seconds": ("cost", "processor"),
}  # fmt: skip


def compared(old: list[float], new: list[float]) -> list[str]:
    """Both means, their difference, and that in standard errors, "–" where neither has two seeds."""
    squares = sum((v - fmean(side)) ** 2 for side in (old, new) for v in side)
    degrees, gap = len(old) + len(new) - 2, fmean(new) - fmean(old)
    error = math.sqrt(squares / degrees * (1 / len(old) + 1 / len(new))) if degrees else 0.0
    shown = [f"{value:.3g}" for value in (fmean(old), fmean(new), gap)]
    return [*shown, f"{gap / error:+.1f}" if error else "–", f"{len(old)} / {len(new)}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=ROOT / "benchmarks" / "results" / "outcome.csv")
    given = parser.parse_args()
    before: dict[tuple[str, ...], list[float]] = {}
    for method, target, _, task, metric, value in json.loads(given.old.read_text(encoding="utf-8"))["data"]:
        before.setdefault((method, target, task, metric), []).append(value)
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in read_rows(given.new):
        row["recovery"] = max(row["recovery_5"], row["recovery_20"], key=lambda text: float(text or "-inf"))
        if row["method"] in NAMES and not row["settings"]:
            groups.setdefault((row["method"], row["target"]), []).append(row)
    lines = []
    for (method, target), rows in groups.items():
        for column, place in COLUMNS.items():
            old = before.get((NAMES[method], slugify(target), *place), [])
            new = [float(row[column]) for row in rows if row[column]]
            if old and new:
                lines.append([f"`{method}`", target, column, *compared(old, new)])
    head = ["method", "target", "", "0.1", "1.0", "difference", "in standard errors", "seeds"]
    print("\n".join(markdown(head, lines)))


if __name__ == "__main__":
    main()
