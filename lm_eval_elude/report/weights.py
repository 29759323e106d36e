"""What came back after attacks on the weights, as a table: a row for each attack, columns for each checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from lm_eval_elude.report.frame import Table
from lm_eval_elude.scoring.metrics import METRICS
from lm_eval_elude.scoring.units import NONE, number
from lm_eval_elude.stress.outcome import CHECKPOINT, KEPT, RECOVERED, REFERENCE, Known, Outcome, Worst, recoveries

BEFORE = "before any attack"
CAPTION = (
    "Per cent, with 95 % intervals paired by record. Of each attack the worst point, at which the checkpoint keeps "
    f"{KEPT:.0%} of its retain quality; in brackets the model that never knew after the same attack. back: how much of "
    "what the original knows beyond that model, neither attacked, the checkpoint knows beyond it, both attacked; what "
    "is there before any attack was never gone. Whoever has the weights from before unlearning has the facts; * needs "
    "them."
)


def table(outcomes: Mapping[str, Outcome]) -> Table:
    """The attacks of some stress folders by the name of their checkpoint."""
    columns: dict[str, dict[str, str]] = {}
    for name, outcome in outcomes.items():
        lead = f"{name}: " if len(outcomes) > 1 else ""
        known = outcome.known
        rows: dict[str, Worst | None] = {BEFORE: Worst(BEFORE, "", math.nan, known, recoveries(known, known))}
        rows |= {attack: outcome.worst.get(attack) for attack in outcome.attacks}
        for attack, worst in rows.items():
            label = attack.replace("_", " ") + ("*" if outcome.attacks.get(attack, {}).get("original") else "")
            cells = {"at": NONE if worst is None or not worst.setting else f"{worst.setting}, {worst.at:g}"}
            for metric in RECOVERED:
                of_metric = METRICS[metric].label
                cells[of_metric] = _pair(worst, metric) if worst else NONE
                cells[f"{of_metric} back"] = _back(worst, metric, known) if worst else NONE
            for column, text in cells.items():
                columns.setdefault(lead + column, {})[label] = text
    index = list(dict.fromkeys(label for column in columns.values() for label in column))
    frame = pd.DataFrame(columns, index=index).fillna(NONE)
    depths = [f"{name} {_bracketed(o.depth.value, o.depth.bounds, ' ')}" for name, o in outcomes.items() if o.depth]
    deep = f" Unlearning depth (100: no layer carries the facts any more): {', '.join(depths)}." if depths else ""
    return Table("After attacks on the weights", CAPTION + deep, frame)


def _pair(worst: Worst, metric: str) -> str:
    checkpoint, reference = (number(worst.values[role][metric].value, "share") for role in (CHECKPOINT, REFERENCE))
    return f"{checkpoint} ({reference})"


def _back(worst: Worst, metric: str, known: Known) -> str:
    return _bracketed(worst.recovery[metric].value, worst.interval(metric, known))


def _bracketed(value: float, bounds: tuple[float, float], between: str = "\n") -> str:
    low, high = (number(bound, "share") for bound in bounds)
    return f"{number(value, 'share')}{between}[{low}, {high}]"
