"""For report and board until they call the benchmarks."""

from typing import Any

from lm_eval_elude.scoring.benchmark import report
from lm_eval_elude.scoring.benchmarks import BENCHMARKS
from lm_eval_elude.scoring.metrics import TOKEN_ATTACKS, attacked_forget_quality, forget_quality, retain_quality

__all__ = ["TOKEN_ATTACKS", "report"]


def quality_numbers(forget: Any, retain: Any, world: Any) -> Any:
    return {"forget_quality": forget_quality(forget), "retain_quality": retain_quality(retain, world)}


def attack_numbers(suites: Any) -> Any:
    return {"forget_quality": attacked_forget_quality(suites)}


def membership_numbers(samples: Any, seed: int = 0) -> Any:
    return BENCHMARKS["elude_mia"].numbers(samples, {"seed": seed})
