"""The one label shift and gather: log-probabilities of answer tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

IGNORE = -100


class AnswerLogProbs(NamedTuple):
    """Per sequence: the sum of the answer tokens' log-probabilities (nats) and their number, each of shape (batch,)."""

    sums: torch.Tensor
    counts: torch.Tensor

    @property
    def means(self) -> torch.Tensor:
        """Mean log-probability of an answer token, shape (batch,): the logarithm of P(a|q)^(1/|a|)."""
        return self.sums / self.counts


def shifted_labels(labels: torch.Tensor) -> torch.Tensor:
    """Labels moved so that position t holds the token that the logits at t predict; the last is ignored.

    Args:
        labels: (batch, length), :data:`IGNORE` where no loss is wanted.
    """
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)


def token_log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probability of each token under its row of logits.

    Args:
        logits: (n, vocabulary).
        tokens: (n,) token ids.

    Returns:
        (n,) in float32 (float64 stays float64).
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return -torch.nn.functional.cross_entropy(logits, tokens, reduction="none")


def answer_log_probs(
    hidden: torch.Tensor,
    head: torch.nn.Module,
    labels: torch.Tensor,
    measure: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = token_log_probs,
) -> AnswerLogProbs:
    """Log-probabilities of the labelled tokens; the vocabulary is computed at their positions only.

    Args:
        hidden: (batch, length, width) last hidden states.
        head: the output projection (width to vocabulary).
        labels: (batch, length), :data:`IGNORE` on everything but the answer.
        measure: value of each labelled token, from its row of logits.

    Returns:
        Sums and counts of shape (batch,), in float32.
    """
    targets = shifted_labels(labels)
    mask = targets != IGNORE
    log_probs = measure(head(hidden[mask]), targets[mask])
    rows = mask.nonzero()[:, 0]
    sums = torch.zeros(len(labels), dtype=log_probs.dtype, device=log_probs.device).index_add(0, rows, log_probs)
    return AnswerLogProbs(sums, mask.sum(dim=1))
