"""How a number is written, by its unit."""

from __future__ import annotations

import math

from lm_eval_elude.scoring.metrics import METRICS

# How a unit is written: the factor, and the digits after the point. What has no row in METRICS is a share.
FORMS = {"nats per token": (1, 2), "bits": (1, 2), "ratio": (1, 2), "p-value": (1, 3), "count": (1, 0)}
PER_CENT = (100, 1)
NONE = "–"


def unit(metric: str) -> str:
    return METRICS[metric].unit if metric in METRICS else "share"


def scale(unit: str) -> int:
    """What a value is multiplied by where it is shown."""
    return FORMS.get(unit, PER_CENT)[0]


def number(value: float, unit: str, sign: str = "") -> str:
    """A value in the form of its unit; ``sign`` is "+" for a difference."""
    factor, digits = FORMS.get(unit, PER_CENT)
    if math.isnan(value):
        return NONE
    return "< 0.001" if unit == "p-value" and value < 0.001 else f"{factor * value:{sign}.{digits}f}"


def with_unit(value: float, unit: str) -> str:
    """A value with its unit in a sentence or a table of several units."""
    return number(value, unit) + ("" if math.isnan(value) else " %" if unit == "share" else f" {unit}")
