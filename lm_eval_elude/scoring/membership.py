"""Membership inference: the attack on the loss (section 5.5), and scores from token log-probabilities.

Scores are about the answer given its question: the higher, the more it looks like training data. ``elude_mia`` reports
the AUC of each (forget set against paraphrase) where the model backend gives token log-probabilities; the plain loss
needs none.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lm_eval_elude.scoring.estimates import Z95, Array, Estimate

_CLIP = 100  # of a loss, as SCRUB's attack has it
Scored = tuple[str, float]  # the record that a score is about, and the score


class MembershipAttack(NamedTuple):
    """How well losses tell what was trained on from its paraphrase (section 5.5); fractions, not per cent.

    ``auc`` is signed: above one half members have the *lower* loss, below it an over-unlearned model gives itself away
    the other way round. ``reason`` says why the numbers are NaN, "" where they are not.
    """

    accuracy: float
    accuracy_std: float
    auc: Estimate
    n: int
    reason: str = ""


@lru_cache(maxsize=64)  # every number of the attack, and a report more than once, asks for the same
def membership_attack(members: tuple[Scored, ...], others: tuple[Scored, ...], *, seed: int = 0) -> MembershipAttack:
    """Logistic regression on the clipped per-sample loss, ten stratified shuffle splits; the attack of SCRUB.

    By record, ``members`` have the mean NLL of each forget answer given its question (nats per token), ``others`` that
    of the paraphrased ones. ``seed`` is for the subsampling of the larger side and the splits, each with a fifth held
    out. Gives accuracy (mean, standard deviation over splits), and the signed AUC with its influence by record.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedShuffleSplit, cross_val_score
    from threadpoolctl import threadpool_limits

    n = min(len(members), len(others))
    if reason := _unusable(_values(members), _values(others), n):
        return MembershipAttack(math.nan, math.nan, Estimate(math.nan, {}, n), n, reason)
    rng = np.random.default_rng(seed)
    inside, outside = (
        [(record, float(np.clip(loss, -_CLIP, _CLIP))) for record, loss in (side[i] for i in chosen)]
        for side, chosen in ((side, np.sort(rng.permutation(len(side))[:n])) for side in (members, others))
    )
    losses = np.concatenate([_values(inside), _values(outside)])[:, None]
    labels = np.concatenate([np.ones(n), np.zeros(n)])
    splits = StratifiedShuffleSplit(n_splits=10, test_size=0.2, random_state=seed)
    with threadpool_limits(1):  # on so little, threads only wait for each other: ten times as long on a busy machine
        accuracies = cross_val_score(LogisticRegression(), losses, labels, cv=splits, scoring="accuracy")
    area = auc([(record, -loss) for record, loss in inside], [(record, -loss) for record, loss in outside])
    return MembershipAttack(float(np.mean(accuracies)), float(np.std(accuracies)), area, n)


def auc(positive: Sequence[Scored], negative: Sequence[Scored]) -> Estimate:
    """Area under the ROC curve with its error (DeLong, DeLong & Clarke-Pearson 1988), a record on both sides one draw.

    Both sides are scores by record; higher means more like a member, which ``positive`` are. The error is NaN where one
    side has a single score. Where one side lies wholly above the other nothing is known of the spread, and the error is
    what :func:`_beyond_spread` allows. ``n`` is the smaller side's.
    """
    from scipy.stats import rankdata

    above, below = _values(positive), _values(negative)
    m, n = len(above), len(below)
    ranks = rankdata(np.concatenate([above, below]))
    area = float((ranks[:m].sum() - m * (m + 1) / 2) / (m * n))
    # Placement values: the share of the other side each score beats.
    of_positive = (ranks[:m] - rankdata(above)) / n
    of_negative = 1 - (ranks[m:] - rankdata(below)) / m
    influence: dict[str, float] = {}
    for side, placed in ((positive, of_positive), (negative, of_negative)):
        factor = 1 / math.sqrt(len(side) * (len(side) - 1)) if len(side) > 1 else math.nan
        for (record, _), place in zip(side, placed.tolist(), strict=True):
            influence[record] = influence.get(record, 0.0) + factor * (place - area)
    if area in (0.0, 1.0) and min(m, n) > 1:
        shared = {record for record, _ in positive} & {record for record, _ in negative}
        error = _beyond_spread(min(m, n) // 2 if shared else min(m, n))
        influence = dict.fromkeys(influence, error / math.sqrt(len(influence)))
    return Estimate(area, influence, min(m, n))


def _beyond_spread(pairs: int) -> float:
    """The standard error that reaches as far from an AUC of 1 as any AUC at which so many pairs may all come out alike.

    Pairs of one score of either side, of which no two share a record, are independent draws, and each is in order with
    the AUC as probability. So all are with at most that to the power of their number, which is to be 2.5 % or more.
    """
    return (1 - 0.025 ** (1 / pairs)) / Z95


def _values(side: Sequence[Scored]) -> Array:
    return np.asarray([value for _, value in side], dtype=float)


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
    """Negative loss (nats) per byte of the UTF-8 text compressed with zlib (Carlini et al. 2021, arXiv 2012.07805)."""
    return sum(log_probs) / len(log_probs) / len(zlib.compress(text.encode()))


def min_k(log_probs: Sequence[float]) -> float:
    """Min-K%: mean log-probability (nats) of the least likely tokens (Shi et al. 2023, https://arxiv.org/abs/2310.16789).

    They are a fifth, which its paper found best, rounded down, and one token at least.
    """
    lowest = sorted(log_probs)[: max(1, int(len(log_probs) * 0.2))]
    return sum(lowest) / len(lowest)


def min_k_plus_plus(log_probs: Sequence[float], means: Sequence[float], stds: Sequence[float]) -> float:
    """Min-K%++: Min-K% of (log p - mu) / sigma (Zhang et al. 2024, https://arxiv.org/abs/2404.02936).

    Mu and sigma are of the log-probability of a token drawn from the model's distribution there.
    """
    # Where the model is certain sigma is 0, and a token that it expects has log p = mu.
    return min_k([(v - m) / max(s, 1e-6) for v, m, s in zip(log_probs, means, stds, strict=True)])


def reference_gap(log_probs: Sequence[float], reference: Sequence[float]) -> float:
    """Loss (nats a token, each model's) under a reference less the loss (Carlini et al. 2021, 5.2: of perplexities)."""
    return sum(log_probs) / len(log_probs) - sum(reference) / len(reference)
