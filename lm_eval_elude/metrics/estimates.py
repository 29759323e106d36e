"""Values with standard errors: means over targets, harmonic means, differences between runs.

A value is kept with its influence by record (its first-order change when that record counts more), so one rule gives
all standard errors: a record that is asked several times, shared by targets, or part of two values that are combined
counts as one draw. Sums of squares over records are the cluster-robust variance with the factor G / (G - 1) for G
records of a target; with one sample a record this is the textbook variance of a mean.

A value that cannot be had is NaN, and a mean with a NaN in it is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

Z95 = 1.959963984540054  # of a two-sided 95 % interval


class Estimate(NamedTuple):
    """A value with what its error follows from.

    Attributes:
        influence: by record.
        n: the number of samples behind it.
        binary: whether each of them is exactly 0 or 1.
    """

    value: float
    influence: Mapping[str, float]
    n: int
    binary: bool = False

    @property
    def stderr(self) -> float:
        """Standard error; NaN where it cannot be had."""
        known = bool(self.influence) and not math.isnan(self.value)
        return math.sqrt(sum(v * v for v in self.influence.values())) if known else math.nan

    @property
    def records(self) -> int:
        """How many distinct records are behind it."""
        return len(self.influence)

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
        return self.value - half, self.value + half


def wilson(share: float, stderr: float, records: int, z: float = Z95) -> tuple[float, float]:
    """The interval of a share by Wilson (1927), which is no single point at 0 and 1.

    The number of draws is that which would give the standard error; where all say the same it is that of the records.
    """
    draws = share * (1 - share) / stderr**2 if stderr else records
    centre, weight = share + z**2 / (2 * draws), 1 + z**2 / draws
    half = z * math.sqrt(share * (1 - share) / draws + (z / (2 * draws)) ** 2)
    return float(np.clip((centre - half) / weight, 0, 1)), float(np.clip((centre + half) / weight, 0, 1))


def mean_of(values: Iterable[tuple[str, float]]) -> Estimate:
    """The mean of (record, value) pairs; the error is clustered by record, and unknown for a single record."""
    pairs = list(values)
    n, value = len(pairs), float(np.mean([v for _, v in pairs]))
    sums: dict[str, float] = {}
    for record, v in pairs:
        sums[record] = sums.get(record, 0.0) + (v - value) / n
    small_sample = math.sqrt(len(sums) / (len(sums) - 1)) if len(sums) > 1 else math.nan
    influence = {record: small_sample * total for record, total in sums.items()}
    return Estimate(value, influence, n, binary=all(v in (0, 1) for _, v in pairs))


def combine(value: float, parts: Sequence[Estimate], gradient: Sequence[float]) -> Estimate:
    """A function of other estimates by the delta method: its value, and its partial derivatives by part.

    The parts may share records.
    """
    influence: dict[str, float] = {}
    for part, slope in zip(parts, gradient, strict=True):
        for record, change in part.influence.items():
            influence[record] = influence.get(record, 0.0) + slope * change
    return Estimate(value, influence, sum(part.n for part in parts))


def average(parts: Sequence[Estimate]) -> Estimate:
    """The plain mean of several estimates (of targets, of attacks)."""
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


def harmonic_mean(values: Sequence[float]) -> float:
    """Harmonic mean of values in [0, 1]; 0 where one of them is 0, NaN where one is NaN."""
    if any(math.isnan(v) for v in values):
        return math.nan
    return 0.0 if min(values) <= 0 else len(values) / sum(1 / v for v in values)


def difference(after: Estimate, before: Estimate) -> Estimate:
    """After minus before, paired by record; ``n`` is that of ``after``."""
    return combine(after.value - before.value, [after, before], [1.0, -1.0])._replace(n=after.n)
