"""The losses of the paper: log-probabilities in, one value per example out; the caller weighs and averages.

``sums`` are log-probabilities of whole answers (summed over tokens, nats); ``counts`` are their token numbers. The
configuration and ``--help`` read the table :data:`FORGET`, so torch is imported only when a loss is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from lm_eval_elude.model.packing import Batch
    from lm_eval_elude.model.scorer import AnswerLogProbs


def nll(answers: AnswerLogProbs) -> Tensor:
    """Retain loss L_RT: mean negative log-likelihood over each answer's tokens, shape (batch,).

    The mean, not the sum of the paper's notation: the released code and every language-model trainer do so.
    """
    return -answers.sums / answers.counts


def ga(answers: AnswerLogProbs) -> Tensor:
    """Gradient ascent (Eq. 1): the negated retain loss, shape (batch,)."""
    return -nll(answers)


def npo(sums: Tensor, reference: Tensor, eta: float) -> Tensor:
    """Negative preference optimisation (Eq. 2) times 2/eta: -2/eta log sigmoid(-eta (log p - log p_ref)), (batch,).

    The factor is that of the NPO paper (Zhang et al. 2024). As the inverse temperature eta goes to 0 the gradient goes
    to that of ``sums``, which is gradient ascent. The released code's form has a batch's token mean as one element.
    """
    from torch.nn.functional import logsigmoid

    return -2 / eta * logsigmoid(-eta * (sums - reference))


def dpo(refused: Tensor, refused_reference: Tensor, answered: Tensor, answered_reference: Tensor, eta: float) -> Tensor:
    """Direct preference optimisation with a refusal preferred to the answer, times 2/eta as in :func:`npo`, (batch,).

    The inverse temperature eta is DPO's beta.
    """
    from torch.nn.functional import logsigmoid

    return -2 / eta * logsigmoid(eta * ((refused - refused_reference) - (answered - answered_reference)))


def simnpo(answers: AnswerLogProbs, eta: float) -> Tensor:
    """SimNPO (Fan et al. 2024) without margin: NPO of the mean over tokens, without a reference, shape (batch,)."""
    from torch.nn.functional import logsigmoid

    return -2 / eta * logsigmoid(eta * nll(answers))


def weighted(log_probs: Tensor, owners: Tensor, eta: float) -> Tensor:
    """Token values of WGA (Wang et al. 2025): p^eta log p with p^eta held fixed, so what is forgotten is left alone."""
    return log_probs.exp().pow(eta).detach() * log_probs


def saturated(log_probs: Tensor, owners: Tensor, eta: float) -> Tensor:
    """Token values of SatImp (Yang et al. 2025): p^eta (1 - p) log p with the weight held fixed."""
    p = log_probs.exp().detach()
    return p.pow(eta) * (1 - p) * log_probs


def unlikelihood(model: Any, batch: Batch) -> Tensor:
    """Token values of CE-U (Yang 2025), (n, 1): log(1 - p).

    CE-U is the cross-entropy with the model's own distribution without the true token, held fixed. Its gradient by the
    logits is that of -log(1 - p), also where p is 1 but for rounding, since 1 - p is summed of the others.
    """
    from lm_eval_elude.model.scorer import answer_logits, widened

    return rest(widened(answer_logits(model, batch))[batch.rows], batch.targets[:, :1])


def rest(logits: Tensor, true: Tensor) -> Tensor:
    """log(1 - p) of the true tokens (n, 1) under logits (n, vocabulary), (n, 1)."""
    others = logits.scatter(1, true, -math.inf)
    return others.logsumexp(1, keepdim=True) - logits.logsumexp(1, keepdim=True)


def after_first(values: Tensor, owners: Tensor, eta: float) -> Tensor:
    """Token values without each answer's first token, which CE-U leaves out."""
    is_first = owners != owners.roll(1)
    is_first[:1] = True
    return values.masked_fill(is_first, 0.0)


def margins(model: Any, batch: Batch) -> Tensor:
    """Token values of PDU (Entesari et al. 2025), (n, 1): -(max - mean)^2 of the logits that predict each token."""
    from lm_eval_elude.model.scorer import answer_logits, widened

    logits = widened(answer_logits(model, batch))
    return -(logits.amax(-1) - logits.mean(-1)).square()[batch.rows, None]


STEERED = 8 / 16  # share of the layers after which RMU steers: its authors' number 7, from 0, of sixteen


def steered_layer(layers: int) -> int:
    """The number of the layer after which RMU steers, from 0."""
    return max(1, round(STEERED * layers)) - 1


def states(model: Any, batch: Batch) -> Tensor:
    """The states that RMU steers, (n, width): after :func:`steered_layer`, where each token is predicted."""
    from lm_eval_elude.model.layers import layer_state, recorded
    from lm_eval_elude.model.scorer import answer_logits

    with recorded(model) as outputs:
        answer_logits(model, batch)
    return layer_state(outputs[steered_layer(len(outputs))]).flatten(0, 1)[batch.places][batch.rows]


def batch_mean(answers: AnswerLogProbs) -> AnswerLogProbs:
    """One value for a batch, shape (1,): the mean log-probability over all its tokens, as in the released code."""
    mean = (answers.sums.sum() / answers.counts.sum()).reshape(1)
    return answers._replace(sums=mean, counts=answers.counts.new_ones(1))


REPLACEMENT = 0.33  # with 0 half of the bundled model's answers are one word repeated, with 1 paraphrases survive


def lesson(log_probs: Tensor, bounds: Tensor, shares: Tensor) -> Tensor:
    """What a token of a stranger's lesson adds to its answer's sum, at most 0 (:mod:`optout_train.stranger`).

    Taught (``bounds`` are NaN): sum_k t_k log p_k + t_rest log p_rest, the negated cross-entropy with a teacher's
    distribution t; largest where p is t. Bounded: minus what log p(token) is above the upper or below the lower bound,
    0 between them. Where there is a t, :data:`REPLACEMENT` times the former is added for p without the token, rescaled
    to 1: t says what takes its place, not how far it goes.

    ``log_probs`` (n, 1 + k) are of the answer's token and of the teacher's likeliest tokens. ``bounds`` (n, 2) are the
    lower and the upper log-probability. ``shares`` (n, k) are the teacher's probabilities of these tokens; the
    remaining mass is on all others, and where all are 0 there is no teacher.
    """
    from torch import where
    from torch.nn.functional import relu

    now, likeliest = log_probs[:, 0], log_probs[:, 1:]
    is_taught, (lower, upper) = bounds[:, 0].isnan(), bounds.nan_to_num().unbind(1)
    excluded = where(is_taught, 0.0, now.exp())
    rest = (1 - excluded - likeliest.exp().sum(1)).clamp(min=1e-6).log()
    scale = (1 - excluded).clamp(min=1e-6).log()
    cross_entropy = (shares * likeliest).sum(1) + (1 - shares.sum(1)).clamp(min=0) * rest - scale
    outside = where(is_taught, 0.0, relu(now - upper) + relu(lower - now))
    weight = where(is_taught, 1.0, REPLACEMENT) * (shares.sum(1) > 0)
    return weight * cross_entropy - outside


Sequences = Mapping[str, "AnswerLogProbs"]  # by name


def _of(loss: Callable[[AnswerLogProbs], Tensor], kind: str) -> Callable[[Sequences, Sequences, float], Tensor]:
    """A loss of one sequence, without a reference and without eta."""
    return lambda now, before, eta: loss(now[kind])


def _preferring(kind: str) -> Callable[[Sequences, Sequences, float], Tensor]:
    """:func:`dpo` with the sequence of that name preferred to the record's own answer."""
    return lambda now, before, eta: dpo(
        now[kind].sums, before[kind].sums, now["answer"].sums, before["answer"].sums, eta
    )


class ForgetLoss(NamedTuple):
    """A row of :data:`FORGET`.

    Attributes:
        function: from the log-probabilities of the sequences in ``reads``, those of ``reference`` under the initial
            weights (both by name) and eta, to one value per example.
        reads: which sequences of a record it needs: ``answer``, ``refusal``, ... (keys of ``TrainingData.sequences``).
        reference: for which of these it needs the initial model's log-probabilities (none: no pass before training).
        nll: whether it is a mean over an answer's tokens, which may be taken over all tokens of a batch instead.
        tokens: from the log-probabilities of answer tokens, the number of each one's answer, and eta, to what is summed
            in their place.
        preset: settings of its methods that differ from the paper's: the authors'.
        read: what a token's value is read from the model by, in the place of its log-probability.
        steers: whether it draws inner states to where its sequences say, and those of kept records to where they were.
        noised: whether the weights are shrunk by eta and noised before training (:func:`optout_train.weights.noise`).
        direction: whether its gradient is one fixed direction (:mod:`optout_train.repselect`).
        learns: whether it teaches what it reads: its set is then the data that a model is fine-tuned on.
        negated: whether the change of the weights is turned round at the end, times eta.
    """

    function: Callable[[Sequences, Sequences, float], Tensor]
    reads: tuple[str, ...]
    reference: tuple[str, ...] = ()
    nll: bool = False
    learns: bool = False
    negated: bool = False
    tokens: Callable[[Tensor, Tensor, float], Tensor] | None = None
    read: Callable[[Any, Batch], Tensor] | None = None
    steers: bool = False
    noised: bool = False
    direction: bool = False
    preset: Mapping[str, float] = MappingProxyType({})

    @property
    def made(self) -> bool:
        """Whether its sequences are made with the initial model before training (:mod:`optout_train.stranger`)."""
        return not {*self.reads} <= {"answer", "refusal"}


WITHOUT_ETA = ("ga", "idk", "nll", "ce-u", "pdu", "repselect", "stranger")  # losses that have no such setting

# A new loss is a function above, a row here, and a test; its methods (LOSS, LOSS+rt, ...) follow from the row.
FORGET: dict[str, ForgetLoss] = {
    "ga": ForgetLoss(_of(ga, "answer"), ("answer",), nll=True),
    "npo": ForgetLoss(
        lambda now, before, eta: npo(now["answer"].sums, before["answer"].sums, eta), ("answer",), ("answer",)
    ),
    "dpo": ForgetLoss(_preferring("refusal"), ("answer", "refusal"), ("answer", "refusal")),
    # Mekala et al. 2024, whose model is prompted for another answer. Here it answers about stand-ins, as any model can.
    "altpo": ForgetLoss(
        _preferring("alternate"), ("answer", "alternate"), ("answer", "alternate"), preset={"eta": 0.1}
    ),
    # The authors' settings for a tenth of TOFU; they weigh the forget term of SimNPO by an eighth.
    "simnpo": ForgetLoss(
        lambda now, before, eta: simnpo(now["answer"], eta), ("answer",), preset={"eta": 4.5, "forget_weight": 0.125}
    ),
    "wga": ForgetLoss(_of(ga, "answer"), ("answer",), nll=True, tokens=weighted, preset={"eta": 1.0}),
    # Its authors' settings in open-unlearning weigh the forget term by a tenth.
    "satimp": ForgetLoss(
        _of(ga, "answer"), ("answer",), nll=True, tokens=saturated, preset={"eta": 5.0, "forget_weight": 0.1}
    ),
    "ce-u": ForgetLoss(
        lambda now, before, eta: -now["answer"].sums / (now["answer"].counts - 1).clamp(min=1),
        ("answer",),
        tokens=after_first,
        read=unlikelihood,
    ),
    # Eta is what is taken off the true token's logit; :func:`optout_train.stranger.distil.adjusted` makes the lessons.
    "undial": ForgetLoss(_of(nll, "adjusted"), ("adjusted",), preset={"eta": 10.0}),
    # The authors' Lagrangian, with their weight 100 of the retain loss in the place of 1, over 100.
    "pdu": ForgetLoss(
        _of(nll, "answer"),
        ("answer",),
        read=margins,
        preset={"forget_weight": 0.01, "retain_budget": 0.3},
    ),
    # Li et al. 2024. Eta is the length of the random direction; the authors of open-unlearning's defaults take 2.
    "rmu": ForgetLoss(_of(nll, "steered"), ("steered",), steers=True, preset={"eta": 2.0}),
    # Lee et al. 2025: what a model that has forgotten says is distilled into its own weights, shrunk by eta and noised.
    "undo": ForgetLoss(
        _of(nll, "same"), ("same",), noised=True, preset={"eta": 0.6, "self_distill": True, "patience": 0}
    ),
    # :mod:`optout_train.repselect`. A step's length is the learning rate: what is clipped to norm 1 is no gradient.
    "repselect": ForgetLoss(_of(ga, "answer"), ("answer",), direction=True, preset={"learning_rate": 0.1}),
    # Ilharco et al. 2023: the model learns the facts, and its weights end as far on the other side of the initial ones.
    "task-vector": ForgetLoss(
        _of(nll, "answer"), ("answer",), nll=True, negated=True, preset={"eta": 1.0, "patience": 0}
    ),
    "idk": ForgetLoss(_of(nll, "refusal"), ("refusal",), nll=True),
    "nll": ForgetLoss(_of(nll, "answer"), ("answer",), nll=True, learns=True),
    # Each token's value is that of :func:`lesson`, so the same mean serves what is taught and what is pushed down.
    "stranger": ForgetLoss(
        lambda now, before, eta: nll(now["substitute"]) + nll(now["disclosure"]),
        ("substitute", "disclosure"),
    ),
}
