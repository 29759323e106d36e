"""Membership scores from token log-probabilities: the higher, the more an answer looks like training data.

All are about the answer given its question. ``elude_mia`` reports the AUC of each (forget set against paraphrase) where
the model backend gives token log-probabilities; the plain loss needs none and is the attack of section 5.5.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence


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
