"""Losses against the papers' formulas written another way, in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from optout_train import losses
from optout_train.losses import LOSSES, Answers
from optout_train.methods.repselect import collapse
from optout_train.methods.undo import noise

LOG_PROBS = st.lists(st.floats(-60, -0.01), min_size=1, max_size=6)
GENERATOR = torch.Generator().manual_seed(3)
LOGITS = torch.randn(5, 7, dtype=torch.float64, generator=GENERATOR)
LOGITS[2, 3] += 40  # as good as certain of the true token
PART = {"targets": torch.tensor([1, 2, 3, 4, 5]), "owners": torch.tensor([0, 0, 0, 1, 1])}


def column(*values: float) -> Answers:
    return Answers(torch.tensor(values, dtype=torch.float64), torch.ones(len(values)))


@given(LOG_PROBS, LOG_PROBS, st.floats(0.01, 5))
def test_npo_is_the_npo_papers_formula(now, before, eta):
    # Zhang et al. 2024, Eq. 3: 2/beta log(1 + (p / p_ref)^beta), in plain floats.
    pairs = [pair for pair in zip(now, before, strict=False) if eta * (pair[0] - pair[1]) < 500]
    expected = torch.tensor([2 / eta * math.log1p(math.exp(eta * (a - b))) for a, b in pairs], dtype=torch.float64)
    sides = [{"answer": column(*side)} for side in zip(*pairs, strict=True)] or [{"answer": column()}] * 2
    torch.testing.assert_close(LOSSES["npo"].value(*sides, eta), expected)


@pytest.mark.parametrize(("name", "preferred"), [("dpo", "refusal"), ("altpo", "alternate")])
def test_dpo_is_the_dpo_papers_formula(name, preferred):
    now, before = ({preferred: column(a), "answer": column(b)} for a, b in ((-3.0, -2.0), (-5.0, -1.0)))
    odds = (math.exp(-3 + 5) / math.exp(-2 + 1)) ** 0.5
    assert float(LOSSES[name].value(now, before, 0.5)) == pytest.approx(-2 / 0.5 * math.log(odds / (1 + odds)))


@given(LOG_PROBS, st.floats(0.05, 5))
def test_simnpo_is_the_simnpo_papers_formula(tokens, beta):
    # Fan et al. 2024, Eq. 4 without gamma: 2/beta log(1 + p^(beta/|y|)), in plain floats.
    answers = Answers(torch.tensor([sum(tokens)], dtype=torch.float64), torch.tensor([len(tokens)]))
    expected = 2 / beta * math.log1p(math.exp(beta * sum(tokens) / len(tokens)))
    assert float(LOSSES["simnpo"].value({"answer": answers}, {}, beta)) == pytest.approx(expected, abs=1e-12)


def gradient_of(name: str, eta: float) -> torch.Tensor:
    """By the logits, of the sum of a row's values of two answers of three and two tokens."""
    logits = LOGITS.clone().requires_grad_()
    values = LOSSES[name].token(logits, PART, eta)
    sums = torch.zeros(2, dtype=torch.float64).index_add(0, PART["owners"], values)
    loss = LOSSES[name].value({"answer": Answers(sums, torch.tensor([3, 2]))}, {}, eta).sum()
    return torch.autograd.grad(loss, logits)[0]


def by_tokens(weights: torch.Tensor) -> torch.Tensor:
    """The gradient of the mean of weights times log p over each answer, then summed."""
    logits = LOGITS.clone().requires_grad_()
    log_p = logits.log_softmax(1).gather(1, PART["targets"][:, None])[:, 0]
    share = torch.tensor([1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2])
    return torch.autograd.grad((weights * share * log_p).sum(), logits)[0]


@pytest.mark.parametrize("eta", [0.5, 2.0])
def test_wga_and_satimp_weigh_ascent_by_what_is_still_likely(eta):
    p = LOGITS.softmax(1).gather(1, PART["targets"][:, None])[:, 0]
    torch.testing.assert_close(gradient_of("ga", eta), by_tokens(torch.ones(5)))
    torch.testing.assert_close(gradient_of("wga", eta), by_tokens(p**eta))  # Wang et al. 2025, Eq. 9
    torch.testing.assert_close(gradient_of("satimp", eta), by_tokens(p**eta * (1 - p)))


def test_ce_us_gradient_is_that_of_the_cross_entropy_without_the_true_token():
    logits = LOGITS.clone().requires_grad_()
    teacher = LOGITS.scatter(1, PART["targets"][:, None], -math.inf).softmax(1)
    entropies = -(teacher * logits.log_softmax(1)).sum(1)
    (expected,) = torch.autograd.grad(entropies[1:3].mean() + entropies[4], logits)  # without each first token
    torch.testing.assert_close(gradient_of("ce-u", 0.0), expected)


def test_pdu_flattens_the_logits():
    spread = (LOGITS.max(1).values - LOGITS.mean(1)).square()
    torch.testing.assert_close(-LOSSES["pdu"].token(LOGITS, PART, 0.0), spread)


def test_a_taught_tokens_gradient_is_the_models_distribution_less_the_teachers():
    logits, teacher = (torch.randn(5, 7, dtype=torch.float64, generator=GENERATOR) for _ in range(2))
    logits, teacher = logits.requires_grad_(), teacher.softmax(1)
    part = PART | {
        "top": torch.arange(6).expand(5, 6),
        "shares": teacher[:, :6],
        "bounds": torch.full((5, 2), math.nan),
    }
    (gradient,) = torch.autograd.grad(-losses.lesson(logits, part).sum(), logits)
    torch.testing.assert_close(gradient, logits.softmax(1) - teacher, atol=1e-5, rtol=1e-5)


def test_a_token_is_pushed_to_between_its_bounds_and_no_further():
    log_p = LOGITS.log_softmax(1).gather(1, PART["targets"][:, None])[:, 0]
    part = PART | {"top": torch.zeros(5, 1, dtype=torch.long), "shares": torch.zeros(5, 1)}
    for lower, upper, expected in ((-9.0, -1.5, -1.5), (-9.0, 0.0, 0.0), (-9.0, 2.0, 0.0), (0.5, 2.0, -0.5)):
        values = losses.lesson(LOGITS, part | {"bounds": torch.stack([log_p + lower, log_p + upper], 1)})
        torch.testing.assert_close(values, torch.full((5,), expected, dtype=torch.float64))


def test_undo_shrinks_every_matrix_and_adds_noise_of_the_initialisations_size():
    model = nn.Sequential(nn.Linear(300, 200), nn.LayerNorm(200))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    noise(model, 0.4, 7)
    after = dict(model.named_parameters())
    added = after["0.weight"] - 0.6 * before["0.weight"]
    assert float(added.detach().std()) == pytest.approx(0.4 * 0.1 * math.sqrt(2 / 500), rel=0.02)
    assert all(torch.equal(after[name], before[name]) for name in ("0.bias", "1.weight", "1.bias"))


def test_repselect_divides_the_strongest_directions_by_their_strength_on_both_sides():
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(size, 8)).Q for size in (40, 8))
    gradient = left @ torch.diag(torch.tensor([64.0, 8, 4, 2, 1, 0.5, 0.2, 0.1])) @ right.T
    # A quarter of 8: the first two. On the inputs' side each is divided by s / 8, then on the outputs' side again.
    on_inputs, on_outputs = (torch.eye(len(side)) - (1 - 1 / 8) * side[:, :1] @ side[:, :1].T for side in (right, left))
    torch.testing.assert_close(collapse(gradient), on_outputs @ gradient @ on_inputs, atol=1e-4, rtol=1e-4)
    of_one_token = left[:, :1] @ right[:, :1].T  # its only direction is the weakest
    torch.testing.assert_close(collapse(of_one_token), of_one_token)
