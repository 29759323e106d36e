"""Values with the errors that records bring: means over targets, harmonic means, differences between runs.

Every value is kept with its influence by record (its first-order change when that record counts more), so that one rule
gives all standard errors: a record that is asked several times, shared by targets, or part of two values that are
combined counts as what it is, one draw. Sums of squares over records are the cluster-robust variance with the factor
G / (G - 1) for G records of a target; with one sample a record this is the textbook variance of a mean.

NaN policy: a value that cannot be had (no tokens, an infinite loss) is NaN, and a mean with a NaN in it is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_eval_elude.scoring.likelihood import harmonic_mean

Array = NDArray[np.float64]
Z95 = 1.959963984540054  # of a two-sided 95 % interval


class Observation(NamedTuple):
    """One measured value: the target it counts for, the record it is about, and the value."""

    target: str
    record: str
    value: float


class Estimate(NamedTuple):
    """A value with what its error follows from.

    Attributes:
        influence: by record.
        n: the number of samples behind it.
        binary: whether each of them is exactly 0 or 1.
        ends: of its 95 % interval, where that is not formed from the standard error.
    """

    value: float
    influence: Mapping[str, float]
    n: int
    binary: bool = False
    ends: tuple[float, float] | None = None

    @property
    def stderr(self) -> float:
        """Standard error; NaN where it cannot be had."""
        known = bool(self.influence) and not math.isnan(self.value)
        return math.sqrt(sum(v * v for v in self.influence.values())) if known else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of a value in [0, 1]; by :func:`wilson` where each sample is 0 or 1."""
        if self.binary:
            return wilson(self.value, self.stderr, self.records)
        low, high = self.bounds
        return float(np.clip(low, 0, 1)), float(np.clip(high, 0, 1))

    @property
    def bounds(self) -> tuple[float, float]:
        """The 95 % interval of any other value, which may lie below 0 or above 1."""
        half = Z95 * self.stderr
        return self.ends or (self.value - half, self.value + half)

    @property
    def records(self) -> int:
        """How many distinct records are behind it: the effective number of draws."""
        return len(self.influence)


def wilson(share: float, stderr: float, records: int, z: float = Z95) -> tuple[float, float]:
    """The interval of a share by Wilson (1927), which is no single point at 0 and 1.

    The number of draws is that which would give the standard error; where all say the same it is that of the records.
    """
    draws = share * (1 - share) / stderr**2 if stderr else records
    centre, weight = share + z**2 / (2 * draws), 1 + z**2 / draws
    half = z * math.sqrt(share * (1 - share) / draws + (z / (2 * draws)) ** 2)
    return float(np.clip((centre - half) / weight, 0, 1)), float(np.clip((centre + half) / weight, 0, 1))


def exact(value: float) -> Estimate:
    """A number that is known without samples behind it."""
    return Estimate(value, {}, 0)


def mean_over_targets(observations: Iterable[Observation]) -> Estimate:
    """The mean of the targets' means (each target weighs the same), as the paper's tables have it."""
    by_target: dict[str, list[Observation]] = {}
    for observation in observations:
        by_target.setdefault(observation.target, []).append(observation)
    return average([_mean(group) for group in by_target.values()])


def _mean(group: Sequence[Observation]) -> Estimate:
    n, value = len(group), float(np.mean([o.value for o in group]))
    sums: dict[str, float] = {}
    for observation in group:
        sums[observation.record] = sums.get(observation.record, 0.0) + (observation.value - value) / n
    # One record says nothing of its spread.
    small_sample = math.sqrt(len(sums) / (len(sums) - 1)) if len(sums) > 1 else math.nan
    influence = {record: small_sample * total for record, total in sums.items()}
    return Estimate(value, influence, n, binary=all(o.value in (0, 1) for o in group))


def combine(value: float, parts: Sequence[Estimate], gradient: Sequence[float]) -> Estimate:
    """A function of other estimates by the delta method: its value, and its partial derivatives (``gradient``) by part.

    The parts may share records.
    """
    influence: dict[str, float] = {}
    for part, slope in zip(parts, gradient, strict=True):
        for record, change in part.influence.items():
            influence[record] = influence.get(record, 0.0) + slope * change
    return Estimate(value, influence, sum(part.n for part in parts))


def average(parts: Sequence[Estimate]) -> Estimate:
    """The plain mean of several estimates."""
    share = 1 / len(parts)
    estimate = combine(sum(part.value for part in parts) * share, parts, [share] * len(parts))
    return estimate._replace(binary=all(part.binary for part in parts))


def complement(part: Estimate) -> Estimate:
    """One minus the value."""
    return combine(1 - part.value, [part], [-1.0])


def harmonic(parts: Sequence[Estimate]) -> Estimate:
    """Harmonic mean of values in [0, 1]; its error is NaN where it is 0, as it has no derivative there."""
    values = [part.value for part in parts]
    value = harmonic_mean(values)
    known = value > 0  # NaN is not
    return combine(value, parts, [(value / v) ** 2 / len(parts) if known else math.nan for v in values])


def difference(after: Estimate, before: Estimate) -> Estimate:
    """After minus before, paired by record; ``n`` is that of ``after``.

    The interval of shares of yes and no ends at -1 and 1. Where they differ by the same in every record (from 1 to 0,
    or not at all) it would be a single point: there it is that of Newcombe (1998), formed of the two shares' Wilson
    intervals.
    """
    gap = combine(after.value - before.value, [after, before], [1.0, -1.0])._replace(n=after.n)
    if not (after.binary and before.binary):
        return gap
    low, high = newcombe(after, before) if gap.stderr == 0 else gap.bounds
    return gap._replace(ends=(max(low, -1.0), min(high, 1.0)))


def newcombe(after: Estimate, before: Estimate, z: float = Z95) -> tuple[float, float]:
    """The interval of the difference of two shares of yes and no by Newcombe (1998, method 10), not paired."""
    (low, high), (low_before, high_before) = (wilson(e.value, e.stderr, e.records, z) for e in (after, before))
    gap = after.value - before.value
    below = math.hypot(after.value - low, high_before - before.value)
    return gap - below, gap + math.hypot(high - after.value, before.value - low_before)
