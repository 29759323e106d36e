"""Forget and retain quality: the one place where they are formed (section 5.2)."""

from __future__ import annotations

from collections.abc import Sequence

from lm_eval_elude.metrics.estimates import Estimate, average, complement, harmonic


def forget_quality(probability: Estimate, rouge: Estimate, truth_ratio: Estimate) -> Estimate:
    """FQ: harmonic mean of 1 - probability, 1 - ROUGE-L recall and min(R, 1/R) on the forget set."""
    return harmonic([complement(probability), complement(rouge), truth_ratio])


def retain_quality(retain: Sequence[Estimate], world: Sequence[Estimate]) -> Estimate:
    """RQ: harmonic mean of probability, ROUGE-L recall and max(0, 1 - R) on the retain and world sets."""
    return harmonic([*retain, *world])


def attacked_forget_quality(suites: Sequence[Estimate]) -> Estimate:
    """Mean FQ over the attacks; a record that several attacks ask is one draw."""
    return average(suites)
