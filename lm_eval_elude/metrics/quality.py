"""Forget and retain quality: the one place where they are formed (section 5.2)."""

from __future__ import annotations

from collections.abc import Sequence

from lm_eval_elude.core.likelihood import harmonic_mean


def forget_quality(probability: float, rouge: float, truth_ratio: float) -> float:
    """FQ: harmonic mean of 1 - probability, 1 - ROUGE-L recall and min(R, 1/R) on the forget set (section 5.2)."""
    return harmonic_mean((1 - probability, 1 - rouge, truth_ratio))


def retain_quality(retain: Sequence[float], world: Sequence[float]) -> float:
    """RQ: harmonic mean of probability, ROUGE-L recall and max(0, 1 - R) on the retain and world sets (section 5.2)."""
    return harmonic_mean((*retain, *world))
