"""Membership inference: the attack on the loss (section 5.5), and scores from token log-probabilities.

Scores are about the answer given its question: the higher, the more it looks like training data. ``elude_mia`` reports
the AUC of each (forget set against paraphrase) where the model backend gives token log-probabilities; the plain loss
needs none.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lm_eval_elude.metrics.estimates import Array, variance_of_mean

_CLIP = 100  # of a loss, as SCRUB's attack has it


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
    variance = variance_of_mean(of_positive) + variance_of_mean(of_negative)
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


def zlib_ratio(log_probs: Sequence[float], text: str) -> float:
    """Negative loss per byte of the text compressed with zlib (Carlini et al. 2021, https://arxiv.org/abs/2012.07805).

    Args:
        log_probs: of the text's tokens (nats).
        text: what zlib compresses (default level, UTF-8).
    """
    return sum(log_probs) / len(log_probs) / len(zlib.compress(text.encode()))


def min_k(log_probs: Sequence[float], share: float = 0.2) -> float:
    """Min-K%: mean log-probability of the least likely tokens (Shi et al. 2023, https://arxiv.org/abs/2310.16789).

    Args:
        log_probs: of the answer's tokens (nats).
        share: of them, rounded down, at least one token; 0.2 is what its paper found best.
    """
    lowest = sorted(log_probs)[: max(1, int(len(log_probs) * share))]
    return sum(lowest) / len(lowest)


def min_k_plus_plus(log_probs: Sequence[float], means: Sequence[float], stds: Sequence[float]) -> float:
    """Min-K%++: Min-K% of (log p - mu) / sigma (Zhang et al. 2024, https://arxiv.org/abs/2404.02936).

    Args:
        log_probs: of the answer's tokens (nats).
        means, stds: mu and sigma, of the log-probability of a token drawn from the model's distribution there.
    """
    # Where the model is certain sigma is 0, and a token that it expects has log p = mu.
    return min_k([(v - m) / max(s, 1e-6) for v, m, s in zip(log_probs, means, stds, strict=True)])


def reference_gap(log_probs: Sequence[float], reference: Sequence[float]) -> float:
    """Loss under a reference model less the loss (Carlini et al. 2021, section 5.2; there as a ratio of perplexities).

    Args:
        log_probs, reference: of the same text's tokens under the two models (nats); tokenized by each of them.
    """
    return sum(log_probs) / len(log_probs) - sum(reference) / len(reference)
