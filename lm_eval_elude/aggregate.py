"""Samples to numbers: means over targets, forget and retain quality, the membership attack, intervals.

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
_CLIP = 100  # of a loss, as SCRUB's attack has it


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
    variances = [_variance_of_mean(np.asarray(v, dtype=float)) for v in values.values()]
    n = sum(len(v) for v in values.values())
    return Estimate(float(np.mean(means)), math.sqrt(sum(variances)) / len(variances), n)


def forget_quality(probability: float, rouge: float, truth_ratio: float) -> float:
    """FQ: harmonic mean of 1 - probability, 1 - ROUGE-L recall and min(R, 1/R) on the forget set (section 5.2)."""
    return harmonic_mean((1 - probability, 1 - rouge, truth_ratio))


def retain_quality(retain: Sequence[float], world: Sequence[float]) -> float:
    """RQ: harmonic mean of probability, ROUGE-L recall and max(0, 1 - R) on the retain and world sets (section 5.2)."""
    return harmonic_mean((*retain, *world))


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


class MembershipAttack(NamedTuple):
    """How well losses tell what was trained on from its paraphrase (section 5.5); fractions, not per cent.

    ``auc`` is signed: above one half members have the *lower* loss, below it an over-unlearned model gives itself away
    the other way round. ``reason`` says why the numbers are NaN, "" where they are not.
    """

    accuracy: float
    accuracy_std: float
    auc: float
    auc_low: float
    auc_high: float
    n: int
    reason: str = ""


def membership_attack(members: Sequence[float], others: Sequence[float], *, seed: int = 0) -> MembershipAttack:
    """Logistic regression on the clipped per-sample loss, ten stratified shuffle splits; the attack of SCRUB.

    Args:
        members: mean NLL of each forget answer given its question (nats per token).
        others: the same for the paraphrased question and answer.
        seed: for the subsampling of the larger side and the splits, each with a fifth of the samples held out.

    Returns:
        Accuracy (mean, standard deviation over splits), and the signed AUC with its 95 % DeLong interval.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedShuffleSplit, cross_val_score

    raw_in, raw_out = np.asarray(members, dtype=float), np.asarray(others, dtype=float)
    n = min(len(raw_in), len(raw_out))
    if reason := _unusable(raw_in, raw_out, n):
        return MembershipAttack(math.nan, math.nan, math.nan, math.nan, math.nan, n, reason)
    rng = np.random.default_rng(seed)
    inside, outside = (
        np.clip(side[np.sort(rng.permutation(len(side))[:n])], -_CLIP, _CLIP) for side in (raw_in, raw_out)
    )
    losses = np.concatenate([inside, outside])[:, None]
    labels = np.concatenate([np.ones(n), np.zeros(n)])
    splits = StratifiedShuffleSplit(n_splits=10, test_size=0.2, random_state=seed)
    accuracies = cross_val_score(LogisticRegression(), losses, labels, cv=splits, scoring="accuracy")
    auc, low, high = auc_interval(-inside, -outside)
    return MembershipAttack(float(np.mean(accuracies)), float(np.std(accuracies)), auc, low, high, n)


def auc_interval(positive: Sequence[float] | Array, negative: Sequence[float] | Array) -> tuple[float, float, float]:
    """Area under the ROC curve with its 95 % interval (DeLong, DeLong & Clarke-Pearson 1988).

    Args:
        positive: scores of the members, shape (m,); higher means more like a member.
        negative: scores of the others, shape (n,).

    Returns:
        AUC, lower and upper bound, within [0, 1]; bounds are NaN where one side has a single score.
    """
    from scipy.stats import rankdata

    positive, negative = np.asarray(positive, dtype=float), np.asarray(negative, dtype=float)
    m, n = len(positive), len(negative)
    ranks = rankdata(np.concatenate([positive, negative]))
    auc = (ranks[:m].sum() - m * (m + 1) / 2) / (m * n)
    # Placement values: the share of the other side each score beats.
    of_positive = (ranks[:m] - rankdata(positive)) / n
    of_negative = 1 - (ranks[m:] - rankdata(negative)) / m
    variance = _variance_of_mean(of_positive) + _variance_of_mean(of_negative)
    half = 1.96 * math.sqrt(variance)
    return float(auc), float(np.clip(auc - half, 0, 1)), float(np.clip(auc + half, 0, 1))


def mean_auc(areas: Sequence[tuple[float, float, float]]) -> tuple[float, float, float, float]:
    """Mean AUC over independent targets, which is known better than each of them.

    Args:
        areas: of each target, AUC with lower and upper bound as :func:`auc_interval` gives them.

    Returns:
        AUC, lower and upper bound of its 95 % interval within [0, 1], and standard error.
    """
    auc = sum(area for area, _, _ in areas) / len(areas)
    half = math.sqrt(sum((high - low) ** 2 for _, low, high in areas)) / 2 / len(areas)
    # One target's own interval may be cut at 0 or 1 on one side only.
    low, high = areas[0][1:] if len(areas) == 1 else np.clip([auc - half, auc + half], 0, 1).tolist()
    return auc, low, high, half / 1.96


def _unusable(inside: Array, outside: Array, n: int) -> str:
    if n < 5:
        return f"only {n} samples on one side, at least 5 are needed"
    both = np.concatenate([inside, outside])
    if not np.isfinite(both).all():
        return f"{int((~np.isfinite(both)).sum())} losses are infinite or not a number"
    if np.ptp(np.clip(both, -_CLIP, _CLIP)) == 0:
        return "all losses are equal" + (f" (clipped to {_CLIP})" if np.abs(both).max() > _CLIP else "")
    return ""


def _variance_of_mean(values: Array) -> float:
    return float(np.var(values, ddof=1) / len(values)) if len(values) > 1 else math.nan
