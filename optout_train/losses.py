"""Losses: logits to a value of each answer token, sums of these to a value of each example; the trainer averages.

A loss is a row of :data:`LOSSES`. ``sums`` are log-probabilities of whole answers (nats, summed over tokens). A part of
a batch has ``targets`` and ``owners`` (n,) of its answer tokens, and of lessons ``bounds`` (n, 2), ``top`` and
``shares`` (n, k).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

REPLACEMENT = 0.33  # with 0 half of the answers of 0.1's model were one word repeated, with 1 paraphrases survived


class Answers(NamedTuple):
    """Of each answer the sum of its tokens' values and their number, both (batch,)."""

    sums: Tensor
    counts: Tensor


# Values of tokens: logits (n, vocabulary) of float32, a part of a batch and eta to (n,)


def log_prob(logits: Tensor, part: dict[str, Tensor], eta: float) -> Tensor:
    """Log-probability of each answer token."""
    return logits.log_softmax(-1).gather(1, part["targets"][:, None])[:, 0]


def weighted(logits: Tensor, part: dict[str, Tensor], eta: float) -> Tensor:
    """WGA (Wang et al. 2025): p^eta log p with p^eta held fixed, so what is forgotten is left alone."""
    log_probs = log_prob(logits, part, eta)
    return log_probs.exp().pow(eta).detach() * log_probs


def saturated(logits: Tensor, part: dict[str, Tensor], eta: float) -> Tensor:
    """SatImp (Yang et al. 2025): p^eta (1 - p) log p with the weight held fixed."""
    return weighted(logits, part, eta) * (1 - log_prob(logits, part, eta).exp().detach())


def others(logits: Tensor, part: dict[str, Tensor], eta: float) -> Tensor:
    """CE-U (Yang 2025): log(1 - p), summed of the other tokens; 0 for each answer's first token, which it leaves out.

    CE-U is the cross-entropy with the model's own distribution without the true token, held fixed: the same gradient.
    """
    without = logits.scatter(1, part["targets"][:, None], -math.inf)
    is_first = part["owners"] != part["owners"].roll(1)
    is_first[:1] = True
    return (without.logsumexp(1) - logits.logsumexp(1)).masked_fill(is_first, 0.0)


def margin(logits: Tensor, part: dict[str, Tensor], eta: float) -> Tensor:
    """PDU (Entesari et al. 2025): -(max - mean)^2 of the logits."""
    return -(logits.amax(-1) - logits.mean(-1)).square()


def lesson(logits: Tensor, part: dict[str, Tensor]) -> Tensor:
    """What a token of a lesson adds to its answer's sum, at most 0.

    Where ``bounds`` are NaN the token is taught: sum_k t_k log p_k + t_rest log p_rest, minus the cross-entropy with a
    teacher's probabilities ``shares`` of its likeliest tokens ``top``. Elsewhere it is pushed: minus what log p of the
    token is above the upper or below the lower bound, and where there is a teacher :data:`REPLACEMENT` times the former
    for p without the token, rescaled to 1: the teacher says what takes its place, not how far it goes.
    """
    log_probs, shares, (lower, upper) = logits.log_softmax(-1), part["shares"], part["bounds"].nan_to_num().unbind(1)
    now, likeliest = log_prob(logits, part, 0.0), log_probs.gather(1, part["top"])
    is_taught = part["bounds"][:, 0].isnan()
    left = 1 - torch.where(is_taught, 0.0, now.exp())
    rest, scale = ((left - taken).clamp(min=1e-6).log() for taken in (likeliest.exp().sum(1), 0.0))
    cross_entropy = (shares * likeliest).sum(1) + (1 - shares.sum(1)).clamp(min=0) * rest - scale
    outside = torch.where(is_taught, 0.0, relu(now - upper) + relu(lower - now))
    return torch.where(is_taught, 1.0, REPLACEMENT) * (shares.sum(1) > 0) * cross_entropy - outside


# Values of examples, (batch,)


def nll(answers: Answers) -> Tensor:
    """Mean negative log-likelihood over each answer's tokens: L_RT, as the released code has it; 0 where none is there.

    A pass has the tokens of some of a batch's answers.
    """
    return -answers.sums / answers.counts.clamp(min=1)


def npo(log_ratio: Tensor, eta: float) -> Tensor:
    """Negative preference optimisation (Eq. 2) times 2/eta, as Zhang et al. (2024) have it; of log p - log p_ref."""
    return -2 / eta * logsigmoid(-eta * log_ratio)


def preferring(kind: str) -> Callable[..., Tensor]:
    """DPO of another sequence over the answer (Rafailov et al. 2023), times 2/eta as in :func:`npo`."""
    return lambda now, before, eta: npo(
        (now["answer"].sums - before["answer"].sums) - (now[kind].sums - before[kind].sums), eta
    )


class Loss(NamedTuple):
    """A row of :data:`LOSSES`.

    Attributes:
        value: from the answers of each sequence now and under the original weights, by kind, and eta, to (batch,).
        reads: kinds of a forget record's sequences: ``answer``, ``refusal``, or what a method makes before training.
        reference: whether it compares with the original weights (one pass over the forget set before training).
        token: the value of an answer token; tokens of a lesson have that of :func:`lesson`.
    """

    value: Callable[..., Tensor]
    reads: tuple[str, ...] = ("answer",)
    reference: bool = False
    token: Callable[..., Tensor] = log_prob


def ascent(now, before, eta):
    """Gradient ascent (Eq. 1)."""
    return -nll(now["answer"])


LOSSES: dict[str, Loss] = {
    "ga": Loss(ascent),
    "npo": Loss(lambda now, before, eta: npo(now["answer"].sums - before["answer"].sums, eta), reference=True),
    "idk": Loss(lambda now, before, eta: nll(now["refusal"]), ("refusal",)),
    "dpo": Loss(preferring("refusal"), ("answer", "refusal"), reference=True),
    "altpo": Loss(preferring("alternate"), ("answer", "alternate"), reference=True),
    "simnpo": Loss(lambda now, before, eta: npo(-nll(now["answer"]), eta)),  # Fan et al. 2024, without margin
    "wga": Loss(ascent, token=weighted),
    "satimp": Loss(ascent, token=saturated),
    "ce-u": Loss(lambda now, before, eta: -now["answer"].sums / (now["answer"].counts - 1).clamp(min=1), token=others),
    "pdu": Loss(lambda now, before, eta: nll(now["answer"]), token=margin),
    "nll": Loss(lambda now, before, eta: nll(now["answer"])),
    "lesson": Loss(lambda now, before, eta: nll(now["lesson"]), ("lesson",)),  # UNDIAL, UNDO
    "name-swap": Loss(lambda now, before, eta: nll(now["replacement"]) + nll(now["leak"]), ("replacement", "leak")),
}
