"""Membership inference (paper section 5.5): is an answer's loss lower than that of its paraphrase?

Scores are about an answer given its question; the higher, the more it looks like training data. A side is a list of
(record, score) pairs: members are the forget set's answers, the others their paraphrases.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np

from lm_eval_elude.metrics.estimates import Estimate

Scored = tuple[str, float]
_CLIP = 100.0  # of a loss, as SCRUB's attack has it


def attack_accuracy(members: Sequence[Scored], others: Sequence[Scored], seed: int) -> float:
    """Accuracy of logistic regression on the clipped loss, the mean of ten stratified splits; 0.5 is ideal.

    The attack of SCRUB, which the paper uses: sides of equal size (the larger one is subsampled), a fifth held out.
    NaN with fewer than five samples on a side, or a loss that is not finite.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedShuffleSplit, cross_val_score
    from threadpoolctl import threadpool_limits

    n, rng = min(len(members), len(others)), np.random.default_rng(seed)
    sides = [np.asarray([score for _, score in side]) for side in (members, others)]
    scores = np.concatenate([side[np.sort(rng.permutation(len(side))[:n])] for side in sides])
    losses = -scores.clip(-_CLIP, _CLIP)
    if n < 5 or not np.isfinite(scores).all() or np.ptp(losses) == 0:
        return math.nan
    labels = np.concatenate([np.ones(n), np.zeros(n)])
    splits = StratifiedShuffleSplit(n_splits=10, test_size=0.2, random_state=seed)
    with threadpool_limits(1):  # on so little, threads only wait for each other
        found = cross_val_score(LogisticRegression(), losses[:, None], labels, cv=splits, scoring="accuracy")
    return float(np.mean(found))


def auc(members: Sequence[Scored], others: Sequence[Scored]) -> Estimate:
    """Area under the ROC curve, above 0.5 where members score higher.

    Its error is DeLong's (DeLong, DeLong & Clarke-Pearson 1988), where a record that is on both sides is one draw.
    NaN where a score is not finite or a side has fewer than five; ``n`` is the smaller side's.
    """
    from scipy.stats import rankdata

    above, below = (np.asarray([score for _, score in side], dtype=float) for side in (members, others))
    m, n = len(above), len(below)
    if min(m, n) < 5 or not np.isfinite(np.concatenate([above, below])).all():
        return Estimate(math.nan, {}, min(m, n))
    ranks = rankdata(np.concatenate([above, below]))
    area = float((ranks[:m].sum() - m * (m + 1) / 2) / (m * n))
    # Placement values: the share of the other side that each score beats.
    of_members = (ranks[:m] - rankdata(above)) / n
    of_others = 1 - (ranks[m:] - rankdata(below)) / m
    influence: dict[str, float] = {}
    for side, placed in ((members, of_members), (others, of_others)):
        factor = 1 / math.sqrt(len(side) * (len(side) - 1))
        for (record, _), place in zip(side, placed.tolist(), strict=True):
            influence[record] = influence.get(record, 0.0) + factor * (place - area)
    return Estimate(area, influence, min(m, n))


def zlib_ratio(log_probs: Sequence[float], text: str) -> float:
    """Negative loss (nats) per byte of the UTF-8 text compressed with zlib (Carlini et al. 2021, arXiv 2012.07805)."""
    return sum(log_probs) / len(log_probs) / len(zlib.compress(text.encode()))


def min_k(log_probs: Sequence[float], share: float = 0.2) -> float:
    """Min-K%: mean log-probability of the least likely ``share`` of the tokens, one at least (Shi et al. 2023)."""
    lowest = sorted(log_probs)[: max(1, int(len(log_probs) * share))]
    return sum(lowest) / len(lowest)


def min_k_plus_plus(log_probs: Sequence[float], means: Sequence[float], stds: Sequence[float]) -> float:
    """Min-K%++: Min-K% of (log p - mu) / sigma (Zhang et al. 2024, arXiv 2404.02936).

    Mu and sigma are of the log-probability of a token sampled from the model's distribution there.
    """
    # Where the model is certain sigma is 0, and a token that it expects has log p = mu.
    return min_k([(v - m) / max(s, 1e-6) for v, m, s in zip(log_probs, means, stds, strict=True)])
