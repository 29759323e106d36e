"""Which settings ``benchmarks/settings.toml``'s runs choose: ``python benchmarks/choose.py [--best 2]``.

Of a method, the setting with the highest score in the mean over its targets, among those that keep 95 % of the
retrained model's utility there; where none does, 90 %, and where none does that, all, which is said. The score is the
board's: the harmonic mean of forgetting, utility and fluency, and of 1 less recovery where a block's weights were
attacked. Where it is equal (0, where nothing is forgotten), Forget Quality decides.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

from outcome import RESULTS, read_rows, strongest
from tables import markdown

SHARES = (0.95, 0.9, 0.0)


def board_score(row: dict[str, str]) -> float:
    """A row's score, with recovery (the largest over steps) where it has one."""
    score, found = float(row["score"]), strongest(row)
    kept = min(1.0, max(0.0, 1 - float(found))) if found else None
    if kept is None or not score * kept:
        return score if kept is None else 0.0
    return 4 / (3 / score + 1 / kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, nargs="?", default=RESULTS / "settings.csv")
    parser.add_argument("--best", type=int, default=1, help="how many of each method  [default: 1]")
    given = parser.parse_args()
    rows = read_rows(given.table)
    goals = {row["target"]: float(row["RQ"]) for row in rows if row["method"] == "retrained"}
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows if row["score"]):
        tried: dict[str, list[dict[str, str]]] = {}
        for row in rows:
            if row["method"] == method:
                tried.setdefault(row["settings"], []).append(row)
        targets = max(len(of) for of in tried.values())
        whole = {settings: of for settings, of in tried.items() if len(of) == targets}
        kept = {settings: min(float(row["RQ"]) / goals[row["target"]] for row in of) for settings, of in whole.items()}
        reached = {settings: next(share for share in SHARES if value >= share) for settings, value in kept.items()}
        scores = {settings: fmean(map(board_score, of)) for settings, of in whole.items()}
        quality = {settings: fmean(float(row["FQ"]) for row in of) for settings, of in whole.items()}
        order = sorted(whole, key=lambda name: (reached[name], scores[name], quality[name]), reverse=True)
        for name in order[: given.best]:
            cells = [f"{scores[name]:.3f}", f"{kept[name]:.1%}", f"{reached[name]:.0%}", f"{len(whole)} on {targets}"]
            lines.append([f"`{method}`", f"`{name}`" if name else "the method's own", *cells])
    head = ["method", "settings", "score", "least utility", "of the retrained model's, at least", "tried, targets"]
    print("\n".join(markdown(head, lines)))


if __name__ == "__main__":
    main()
