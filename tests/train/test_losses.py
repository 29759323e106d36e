"""Losses against formulas written another way, in float64, and the limits that are known of them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_elude.model.packing import collate
from lm_eval_elude.model.scorer import AnswerLogProbs, Scorer, load_model
from lm_eval_elude.text.chat import Encoded
from optout_train import losses
from optout_train.config import BUNDLED_MODEL
from optout_train.data import Steered
from optout_train.gradients import answer_values
from optout_train.repselect import collapse
from optout_train.weights import noise

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
    sums = answers.sums.requires_grad_()
    (gradient,) = torch.autograd.grad(losses.simnpo(answers, beta).sum(), sums)
    odds = math.exp(beta * sum(tokens) / len(tokens))
    assert float(gradient) == pytest.approx(2 * odds / (1 + odds) / len(tokens), rel=1e-9, abs=1e-15)


def test_undials_gradient_by_the_logits_is_the_models_distribution_less_the_adjusted_one():
    generator = torch.Generator().manual_seed(4)
    logits, initial = (torch.randn(3, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    true = torch.tensor([0, 2, 4])
    adjusted = (initial - 10 * torch.nn.functional.one_hot(true, 6)).softmax(1)  # Dong et al. 2025, b = 10
    log_probs = logits.requires_grad_().log_softmax(1)
    columns = torch.cat([log_probs.gather(1, true[:, None]), log_probs[:, :5]], 1)  # the sixth token is the rest
    values = losses.lesson(columns, torch.full((3, 2), math.nan, dtype=torch.float64), adjusted[:, :5])
    (gradient,) = torch.autograd.grad(-values.sum(), logits)
    torch.testing.assert_close(gradient, logits.softmax(1) - adjusted)


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
    logits = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    logits[2, 3] += 40  # as good as certain of the true token
    logits.requires_grad_()
    true, owners = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 0, 0, 1, 1])
    of_tokens = losses.rest(logits, true[:, None])[:, 0]
    assert of_tokens[0].exp().item() == pytest.approx(1 - logits[0].softmax(0)[1].item())
    sums = torch.zeros(2, dtype=torch.float64).index_add(0, owners, losses.after_first(of_tokens, owners, 0.0))
    answers = {"answer": AnswerLogProbs(sums, torch.tensor([3, 2]))}
    (gradient,) = torch.autograd.grad(losses.FORGET["ce-u"].function(answers, {}, 0.0).sum(), logits)
    teacher = logits.detach().scatter(1, true[:, None], -math.inf).softmax(1)
    entropies = -(teacher * logits.log_softmax(1)).sum(1)
    (expected,) = torch.autograd.grad(entropies[1:3].mean() + entropies[4], logits)
    torch.testing.assert_close(gradient, expected)


@pytest.fixture(scope="module")
def asked():
    """The bundled model, two samples of different length, and what a plain forward gives for the answers' tokens."""
    model = load_model(str(BUNDLED_MODEL))
    samples = [Encoded([*range(20, 20 + length)], 4) for length in (9, 6)]
    plain = [model(torch.tensor([sample.ids]), output_hidden_states=True) for sample in samples]
    logits = torch.cat([out.logits[0, 3 : len(sample.ids) - 1] for out, sample in zip(plain, samples, strict=True)])
    after = losses.steered_layer(5) + 1  # the first are the embeddings
    states = [out.hidden_states[after][0, 3 : len(s.ids) - 1] for out, s in zip(plain, samples, strict=True)]
    return model, samples, logits, states


@pytest.mark.parametrize("name", ["wga", "satimp", "ce-u", "pdu"])
def test_what_a_method_minimises_is_its_papers_formula_of_the_plain_models_logits(name, asked):
    """Through the row of the table, as training calls it; eta is the exponent of the first two."""
    model, samples, logits, _ = asked
    row, eta = losses.FORGET[name], 2.0
    values = answer_values(Scorer(model), samples, row, eta)
    true = torch.tensor([token for sample in samples for token in sample.ids[4:]])
    log_p = logits.log_softmax(1).gather(1, true[:, None])[:, 0]
    p, spread = log_p.exp(), (logits.max(1).values - logits.mean(1)) ** 2
    of_tokens = {"wga": p**eta * log_p, "satimp": p**eta * (1 - p) * log_p, "ce-u": -(-p).log1p(), "pdu": spread}[name]
    of_answers = of_tokens.split([len(sample.ids) - 4 for sample in samples])
    expected = torch.stack([part[1:].mean() if name == "ce-u" else part.mean() for part in of_answers])
    torch.testing.assert_close(row.function({"answer": values}, {}, eta), expected, rtol=1e-4, atol=1e-5)


def by_first_layer(model, value):
    """The gradient of a value by the matrices of the model's first layer."""
    return torch.autograd.grad(value, [p for p in model.model.layers[0].parameters() if p.dim() > 1], retain_graph=True)


def test_gradients_of_pdu_and_rmu_are_those_of_autograd_through_the_plain_model(asked):
    model, samples, logits, states = asked
    spread = -((logits.max(1).values - logits.mean(1)) ** 2).sum()
    ours = losses.margins(model, collate(samples)).sum()
    wanted = torch.ones(1, model.config.hidden_size)
    distance = sum(((rows - wanted) ** 2).mean() for rows in states)
    steered = answer_values(Scorer(model), [Steered(*sample, wanted) for sample in samples])
    for value, expected in ((ours, spread), (losses.nll(steered).sum(), distance)):
        for gradient, other in zip(*(by_first_layer(model, each) for each in (value, expected)), strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def test_rmus_states_are_those_of_the_plain_model_after_its_layer_and_its_loss_their_mean_square(asked):
    model, samples, _, rows = asked
    assert [losses.steered_layer(layers) for layers in (1, 4, 5, 16, 32)] == [0, 1, 1, 7, 15]
    torch.testing.assert_close(losses.states(model, collate(samples)), torch.cat(rows), rtol=1e-4, atol=1e-4)
    wanted = torch.randn(1, rows[0].shape[1])
    drawn = answer_values(Scorer(model), [Steered(*sample, wanted) for sample in samples])
    expected = [((row - wanted) ** 2).mean() for row in rows]
    torch.testing.assert_close(losses.nll(drawn), torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_undo_shrinks_every_matrix_and_adds_noise_of_the_initializations_size():
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.LayerNorm(200))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    noise(model.parameters(), 0.4, 7)
    after = dict(model.named_parameters())
    added = after["0.weight"] - 0.6 * before["0.weight"]
    assert float(added.detach().std()) == pytest.approx(0.4 * 0.1 * math.sqrt(2 / 500), rel=0.02)
    assert all(torch.equal(after[name], before[name]) for name in ("0.bias", "1.weight", "1.bias"))
    again = torch.nn.Linear(300, 200)
    again.load_state_dict({name: before[f"0.{name}"] for name in ("weight", "bias")})
    noise(again.parameters(), 0.4, 7)
    assert torch.equal(again.weight, after["0.weight"])


def test_repselect_divides_the_strongest_directions_by_their_strength_on_both_sides():
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(size, 8)).Q for size in (40, 8))
    gradient = left @ torch.diag(torch.tensor([64.0, 8, 4, 2, 1, 0.5, 0.2, 0.1])) @ right.T
    # A quarter of 8: the first two. On the inputs' side each is divided by s / 8, then on the outputs' side again.
    on_inputs, on_outputs = (torch.eye(len(side)) - (1 - 1 / 8) * side[:, :1] @ side[:, :1].T for side in (right, left))
    torch.testing.assert_close(collapse(gradient), on_outputs @ gradient @ on_inputs, atol=1e-4, rtol=1e-4)
    of_one_token = left[:, :1] @ right[:, :1].T  # its only direction is the weakest
    torch.testing.assert_close(collapse(of_one_token), of_one_token)
