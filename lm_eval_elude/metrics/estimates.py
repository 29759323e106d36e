"""Means over targets and their errors.

NaN policy: a value that cannot be had (no tokens, an infinite loss) is NaN, and a mean with a NaN in it is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_eval_elude.core.likelihood import harmonic_mean

Array = NDArray[np.float64]


class Estimate(NamedTuple):
    """A value with its standard error and the number of samples behind it."""

    value: float
    stderr: float
    n: int


def mean_over_targets(values: Mapping[str, Sequence[float]]) -> Estimate:
    """The mean of the targets' means (each target weighs the same), as the paper's tables have it.

    Args:
        values: per-sample values by target.

    Returns:
        The value, its standard error from the spread within each target, and the number of samples.
    """
    means = [float(np.mean(v)) for v in values.values()]
    variances = [variance_of_mean(np.asarray(v, dtype=float)) for v in values.values()]
    n = sum(len(v) for v in values.values())
    return Estimate(float(np.mean(means)), math.sqrt(sum(variances)) / len(variances), n)


def covariance_of_means(samples: Mapping[str, Sequence[Sequence[float]]]) -> Array:
    """Covariance of the k measures' means over targets.

    Args:
        samples: by target, (n, k) per-sample measures.
    """
    parts = []
    for rows in samples.values():
        table = np.asarray(rows, dtype=float)
        n, k = table.shape
        parts.append(np.cov(table, rowvar=False) / n if n > 1 else np.full((k, k), np.nan))
    return np.asarray(sum(parts)) / len(parts) ** 2


def block_diagonal(first: Array, second: Array) -> Array:
    """Covariance of two independent groups of values: (j, j) and (k, k) to (j + k, j + k)."""
    from scipy.linalg import block_diag

    return np.asarray(block_diag(first, second))


def harmonic_stderr(means: Sequence[float], covariance: Array) -> float:
    """Standard error of a harmonic mean by the delta method.

    Args:
        means: the k values the harmonic mean is formed of.
        covariance: (k, k) covariance of those values, as estimates.
    """
    value = harmonic_mean(means)
    if math.isnan(value) or value == 0:
        return math.nan
    gradient = value**2 / (len(means) * np.asarray(means) ** 2)
    return math.sqrt(max(0.0, float(gradient @ covariance @ gradient)))


def variance_of_mean(values: Array) -> float:
    return float(np.var(values, ddof=1) / len(values)) if len(values) > 1 else math.nan
