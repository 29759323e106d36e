"""Losses against formulas written another way, in float64, and the limits that are known of them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_elude.model.scorer import AnswerLogProbs
from optout_train import losses

LOG_PROBS = st.lists(st.floats(-60, -0.01), min_size=1, max_size=6)


def random(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [-torch.rand(count, generator=generator, dtype=torch.float64) * 20 - 0.1 for _ in range(4)]


@given(LOG_PROBS, LOG_PROBS, st.floats(0.01, 5))
def test_npo_is_the_npo_papers_formula(now, before, eta):
    # Zhang et al. 2024, Eq. 3: 2/beta log(1 + (p / p_ref)^beta), in plain floats.
    pairs = list(zip(now, before, strict=False))
    expected = [2 / eta * math.log1p(math.exp(eta * (a - b))) for a, b in pairs if eta * (a - b) < 500]
    if len(expected) == len(pairs):
        columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True)]
        torch.testing.assert_close(losses.npo(*columns, eta), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("eta", [0.1, 1.0])
def test_dpo_is_the_dpo_papers_formula(eta):
    win, win_ref, lose, lose_ref = random(7)
    odds = (win.exp() / win_ref.exp()) ** eta / (lose.exp() / lose_ref.exp()) ** eta
    torch.testing.assert_close(losses.dpo(win, win_ref, lose, lose_ref, eta), -2 / eta * (odds / (1 + odds)).log())


@given(LOG_PROBS, st.floats(0.05, 5))
def test_simnpo_is_the_simnpo_papers_formula(tokens, beta):
    # Fan et al. 2024, Eq. 4 without gamma: 2/beta log(1 + p^(beta/|y|)), in plain floats; its gradient ends at 0.
    answers = AnswerLogProbs(torch.tensor([sum(tokens)], dtype=torch.float64), torch.tensor([len(tokens)]))
    expected = 2 / beta * math.log1p(math.exp(beta * sum(tokens) / len(tokens)))
    assert float(losses.simnpo(answers, beta)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_wgas_gradient_is_that_of_ascent_weighted_by_what_is_still_likely(beta):
    log_probs = torch.tensor([-0.1, -1.0, -8.0], dtype=torch.float64, requires_grad=True)
    owners, p = torch.zeros(3), log_probs.exp().detach()
    (gradient,) = torch.autograd.grad(losses.weighted(log_probs, owners, beta).sum(), log_probs)
    torch.testing.assert_close(gradient, p**beta)  # Wang et al. 2025, Eq. 9
    assert losses.weighted(log_probs, owners, 0.0).tolist() == log_probs.tolist()  # gradient ascent
    (gradient,) = torch.autograd.grad(losses.saturated(log_probs, owners, beta).sum(), log_probs)
    torch.testing.assert_close(gradient, p**beta * (1 - p))  # SatImp (Yang et al. 2025)


def test_ce_us_gradient_by_the_logits_is_that_of_the_cross_entropy_without_the_true_token():
    # Two answers of three and two tokens in a vocabulary of seven; each answer's first token is skipped.
    logits = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    true, owners = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 0, 0, 1, 1])
    of_tokens = logits.log_softmax(1).gather(1, true[:, None])[:, 0]
    sums = torch.zeros(2, dtype=torch.float64).index_add(0, owners, losses.unlikelihood(of_tokens, owners, 0.0))
    answers = {"answer": AnswerLogProbs(sums, torch.tensor([3, 2]))}
    (gradient,) = torch.autograd.grad(losses.FORGET["ce-u"].function(answers, {}, 0.0).sum(), logits)
    teacher = logits.detach().scatter(1, true[:, None], -math.inf).softmax(1)
    entropies = -(teacher * logits.log_softmax(1)).sum(1)
    (expected,) = torch.autograd.grad(entropies[1:3].mean() + entropies[4], logits)
    torch.testing.assert_close(gradient, expected)


def test_gradients_in_float64():
    a, b, c, d = (t.requires_grad_() for t in random(5))
    counts = torch.tensor([1, 2, 3, 4, 5])
    assert torch.autograd.gradcheck(lambda a: losses.nll(AnswerLogProbs(a, counts)), (a,))
    assert torch.autograd.gradcheck(lambda a: losses.ga(AnswerLogProbs(a, counts)), (a,))
    assert torch.autograd.gradcheck(lambda a: losses.npo(a, b.detach(), 0.1), (a,))
    assert torch.autograd.gradcheck(lambda a, c: losses.dpo(a, b.detach(), c, d.detach(), 0.1), (a, c))


def test_nll_is_a_mean_over_tokens_and_ga_its_negative():
    answers = AnswerLogProbs(torch.tensor([-6.0, -1.0]), torch.tensor([3, 1]))
    assert losses.nll(answers).tolist() == [2.0, 1.0]
    assert losses.ga(answers).tolist() == [-2.0, -1.0]


def test_npos_gradient_tends_to_that_of_ascent_and_vanishes_once_forgotten():
    answers = torch.tensor([-3.0, -1e4], dtype=torch.float64, requires_grad=True)
    for eta, expected in ((1e-7, [1.0, 1.0]), (0.1, [1.0, 0.0])):  # gradient ascent's is that of the log-probability
        loss = losses.npo(answers, torch.tensor([-3.0, 0.0], dtype=torch.float64), eta)
        (gradient,) = torch.autograd.grad(loss.sum(), answers)
        torch.testing.assert_close(gradient.tolist(), expected, atol=1e-3, rtol=0)
    assert 0 <= float(loss[1].detach()) < 1e-12  # and the loss is bounded below


def test_altpo_moves_alternate_and_answer_against_each_other_as_dpos_gradient_says():
    sides = [torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in (-9.0, -4.0)]
    before = [torch.tensor([value], dtype=torch.float64) for value in (-8.0, -6.0)]
    now, initially = (
        {
            kind: AnswerLogProbs(sums, torch.tensor([5]))
            for kind, sums in zip(("alternate", "answer"), pair, strict=True)
        }
        for pair in (sides, before)
    )
    eta = 0.1
    gradients = torch.autograd.grad(losses.FORGET["altpo"].function(now, initially, eta).sum(), sides)
    weight = 2 / (
        1 + math.exp(eta * ((-9 + 8) - (-4 + 6)))
    )  # 2 sigmoid(-eta margin), Rafailov et al. 2023, after Eq. 7
    assert [float(g) for g in gradients] == pytest.approx([-weight, weight])


def test_dpo_without_a_change_of_the_refusal_is_npo_and_of_the_answer_too_a_constant():
    refused, answered, before, _ = random(4)
    torch.testing.assert_close(losses.dpo(refused, refused, answered, before, 0.3), losses.npo(answered, before, 0.3))
    unmoved = losses.dpo(refused, refused, before, before, 0.1)
    torch.testing.assert_close(unmoved, torch.full_like(unmoved, 20 * math.log(2)))
