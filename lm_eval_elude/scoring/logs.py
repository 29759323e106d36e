"""Truth ratios of a retained model from the logs of TOFU's evaluators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from lm_eval_elude.data import jsonio
from lm_eval_elude.errors import UserError


def truth_ratios(path: Path) -> list[float]:
    """R (wrong answers over the paraphrase) of each forget question, in the order of the data.

    Args:
        path: ``eval_log_aggregated.json`` of the released evaluator, or open-unlearning's ``TOFU_EVAL.json``.

    Raises:
        UserError: it is neither, or a value is missing or no number.
    """
    log = jsonio.load(path, nan=True)
    if not isinstance(log, dict):
        raise UserError(f"{path}: not a log of TOFU's evaluators")
    if isinstance(released := log.get("eval_log_forget.json"), dict):
        right, wrong = (_by_index(released.get(key), path, key) for key in _LOSSES)
        if right.keys() != wrong.keys():
            raise UserError(f"{path}: {' and '.join(_LOSSES)} are of different questions")
        found = {i: math.exp(_number(right[i], path, i) - fmean(_numbers(wrong[i], path, i))) for i in right}
    elif isinstance(other := log.get("forget_truth_ratio"), dict):
        scores = _by_index(other.get("value_by_index"), path, "value_by_index")
        found = {i: _number((s or {}).get("score") if isinstance(s, dict) else s, path, i) for i, s in scores.items()}
    else:
        raise UserError(f"{path}: no log of TOFU's evaluators (eval_log_forget.json or forget_truth_ratio)")
    if sorted(found) != list(range(len(found))):
        raise UserError(f"{path}: the questions are not numbered from 0 to {len(found) - 1}")
    return [found[i] for i in range(len(found))]


_LOSSES = ("avg_paraphrased_loss", "average_perturb_loss")


def _by_index(table: Any, path: Path, key: str) -> Mapping[int, Any]:
    if not isinstance(table, dict) or not table or not all(name.isdecimal() for name in table):
        raise UserError(f"{path}: {key} is not a table by question number")
    return {int(name): value for name, value in table.items()}


def _numbers(values: Any, path: Path, index: int) -> list[float]:
    if not isinstance(values, list) or not values:
        raise UserError(f"{path}: question {index} has no list of wrong answers' losses")
    return [_number(value, path, index) for value in values]


def _number(value: Any, path: Path, index: int) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UserError(f"{path}: question {index} has {value!r} where a number is needed")
    return float(value)
