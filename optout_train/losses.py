"""Losses: logits to a value of each answer token, sums of these to a value of each example; the trainer averages.

A loss is a row of :data:`LOSSES`. ``sums`` are log-probabilities of whole answers (nats, summed over tokens).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

REPLACEMENT = 0.33  # with 0 half of the bundled model's answers are one word repeated, with 1 paraphrases survive


class Answers(NamedTuple):
    """Of each answer the sum of its tokens' values and their number, both (batch,)."""

    sums: Tensor
    counts: Tensor

    def mean(self) -> Answers:
        """One value for a batch, (1,): the mean over all its tokens (the released code's NPO and DPO)."""
        return Answers((self.sums.sum() / self.counts.sum()).reshape(1), self.counts.new_ones(1))


Part = Mapping[str, Any]  # of a batch: targets and owners (n,), and of lessons top and shares (n, k) and bounds (n, 2)


# Values of tokens: logits (n, vocabulary) of float32, the part of a batch and eta to (n,)


def log_prob(logits: Tensor, part: Part, eta: float) -> Tensor:
    """Log-probability of each answer token."""
    return logits.log_softmax(-1).gather(1, part["targets"][:, None])[:, 0]


def weighted(logits: Tensor, part: Part, eta: float) -> Tensor:
    """WGA (Wang et al. 2025): p^eta log p with p^eta held fixed, so what is forgotten is left alone."""
    log_probs = log_prob(logits, part, eta)
    return log_probs.exp().pow(eta).detach() * log_probs


def saturated(logits: Tensor, part: Part, eta: float) -> Tensor:
    """SatImp (Yang et al. 2025): p^eta (1 - p) log p with the weight held fixed."""
    log_probs = log_prob(logits, part, eta)
    p = log_probs.exp().detach()
    return p.pow(eta) * (1 - p) * log_probs


def others(logits: Tensor, part: Part, eta: float) -> Tensor:
    """CE-U (Yang 2025): log(1 - p), summed of the other tokens; 0 for each answer's first token, which it leaves out.

    CE-U is the cross-entropy with the model's own distribution without the true token, held fixed; this has its
    gradient.
    """
    without = logits.scatter(1, part["targets"][:, None], -math.inf)
    is_first = part["owners"] != part["owners"].roll(1)
    is_first[:1] = True
    return (without.logsumexp(1) - logits.logsumexp(1)).masked_fill(is_first, 0.0)


def margin(logits: Tensor, part: Part, eta: float) -> Tensor:
    """PDU (Entesari et al. 2025): -(max - mean)^2 of the logits."""
    return -(logits.amax(-1) - logits.mean(-1)).square()


def lesson(logits: Tensor, part: Part) -> Tensor:
    """What a token of a lesson adds to its answer's sum, at most 0.

    Where ``bounds`` (n, 2) are NaN the token is taught: sum_k t_k log p_k + t_rest log p_rest, the negated cross-entropy with a
    teacher's probabilities ``shares`` of its likeliest tokens ``top``. Elsewhere it is pushed down: minus what log p of
    the token is above the upper or below the lower bound, and where there is a teacher :data:`REPLACEMENT` times the former for p without the
    token, rescaled to 1: the teacher says what takes its place, not how far it goes.
    """
    log_probs = logits.log_softmax(-1)
    now = log_probs.gather(1, part["targets"][:, None])[:, 0]
    likeliest, shares, is_taught = log_probs.gather(1, part["top"]), part["shares"], part["bounds"][:, 0].isnan()
    lower, upper = part["bounds"].nan_to_num().unbind(1)
    excluded = torch.where(is_taught, 0.0, now.exp())
    rest = (1 - excluded - likeliest.exp().sum(1)).clamp(min=1e-6).log()
    scale = (1 - excluded).clamp(min=1e-6).log()
    cross_entropy = (shares * likeliest).sum(1) + (1 - shares.sum(1)).clamp(min=0) * rest - scale
    outside = torch.where(is_taught, 0.0, relu(now - upper) + relu(lower - now))
    weight = torch.where(is_taught, 1.0, REPLACEMENT) * (shares.sum(1) > 0)
    return weight * cross_entropy - outside


# Values of examples, (batch,)


def nll(answers: Answers) -> Tensor:
    """Mean negative log-likelihood over each answer's tokens: L_RT, as the released code has it."""
    return -answers.sums / answers.counts


def npo(now: Answers, before: Answers, eta: float) -> Tensor:
    """Negative preference optimisation (Eq. 2) times 2/eta, as Zhang et al. (2024) have it."""
    return -2 / eta * logsigmoid(-eta * (now.sums - before.sums))


Now = Mapping[str, Answers]


def dpo(preferred: str) -> Callable[[Now, Now, float], Tensor]:
    """Direct preference optimisation of another sequence over the answer, times 2/eta as in :func:`npo`."""

    def loss(now: Now, before: Now, eta: float) -> Tensor:
        gains = {kind: now[kind].sums - before[kind].sums for kind in (preferred, "answer")}
        return -2 / eta * logsigmoid(eta * (gains[preferred] - gains["answer"]))

    return loss


def simnpo(now: Answers, eta: float) -> Tensor:
    """SimNPO (Fan et al. 2024) without margin: NPO of the mean over tokens, without a reference."""
    return -2 / eta * logsigmoid(eta * nll(now))


class Loss(NamedTuple):
    """A row of :data:`LOSSES`.

    Attributes:
        value: from the answers of each sequence now and under the original weights, and eta, to (batch,).
        reads: sequences of a forget record: ``answer``, ``refusal``, or what a method makes before training.
        reference: whether it compares with the original weights (one pass over the forget set before training).
        token: the value of an answer token; tokens of a lesson have that of :func:`lesson`.
    """

    value: Callable[[Now, Now, float], Tensor]
    reads: tuple[str, ...] = ("answer",)
    reference: bool = False
    token: Callable[[Tensor, Part, float], Tensor] = log_prob


LOSSES: dict[str, Loss] = {
    "ga": Loss(lambda now, before, eta: -nll(now["answer"])),  # Eq. 1
    "npo": Loss(lambda now, before, eta: npo(now["answer"], before["answer"], eta), reference=True),
    "idk": Loss(lambda now, before, eta: nll(now["refusal"]), ("refusal",)),
    "dpo": Loss(dpo("refusal"), ("answer", "refusal"), reference=True),
    "altpo": Loss(dpo("alternate"), ("answer", "alternate"), reference=True),
    "simnpo": Loss(lambda now, before, eta: simnpo(now["answer"], eta)),
    "wga": Loss(lambda now, before, eta: -nll(now["answer"]), token=weighted),
    "satimp": Loss(lambda now, before, eta: -nll(now["answer"]), token=saturated),
    "ce-u": Loss(lambda now, before, eta: -now["answer"].sums / (now["answer"].counts - 1).clamp(min=1), token=others),
    "pdu": Loss(lambda now, before, eta: nll(now["answer"]), token=margin),
    "lesson": Loss(lambda now, before, eta: nll(now["lesson"]), ("lesson",)),  # UNDIAL, UNDO
    "name-swap": Loss(lambda now, before, eta: nll(now["replacement"]) + nll(now["leak"]), ("replacement", "leak")),
    "nll": Loss(lambda now, before, eta: nll(now["answer"])),
}
