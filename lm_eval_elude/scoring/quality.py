"""For the report until it calls the metrics."""

from typing import Any

from lm_eval_elude.scoring.estimates import average, complement, harmonic


def forget_quality(probability: Any, rouge: Any, truth_ratio: Any) -> Any:
    return harmonic([complement(probability), complement(rouge), truth_ratio])


def retain_quality(retain: Any, world: Any) -> Any:
    return harmonic([*retain, *world])


def attacked_forget_quality(suites: Any) -> Any:
    return average(suites)
