"""The one label shift: against a plain loop, and against transformers' own loss."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_elude.core.logprobs import IGNORE, answer_log_probs, shifted_labels, token_log_probs
from tests.support import make_model, make_tokenizer


@given(st.integers(1, 3), st.integers(2, 7), st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_sums_and_counts_against_a_loop_over_positions(batch, length, seed):
    torch.manual_seed(seed)
    hidden, head = torch.randn(batch, length, 5, dtype=torch.float64), torch.nn.Linear(5, 11, dtype=torch.float64)
    labels = torch.randint(0, 11, (batch, length))
    labels[torch.rand(batch, length) < 0.4] = IGNORE
    got = answer_log_probs(hidden, head, labels)
    probabilities = head(hidden).softmax(-1)
    for row in range(batch):
        scored = [t for t in range(1, length) if labels[row, t] != IGNORE]
        expected = sum(probabilities[row, t - 1, labels[row, t]].log().item() for t in scored)
        assert got.sums[row].item() == pytest.approx(expected, abs=1e-12)
        assert got.counts[row].item() == len(scored)


def test_the_mean_is_transformers_loss():
    tokenizer = make_tokenizer("chatml")
    model = make_model(tokenizer)
    ids = torch.tensor([tokenizer("Cristiano Ronaldo was born in Funchal.")["input_ids"]])
    labels = ids.clone()
    labels[:, :3] = IGNORE
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state
        got = answer_log_probs(hidden, model.lm_head, labels)
        loss = model(ids, labels=labels).loss
    assert got.means.item() == pytest.approx(-loss.item(), rel=1e-6)


def test_the_last_position_predicts_nothing():
    assert shifted_labels(torch.tensor([[5, 6, 7]])).tolist() == [[6, 7, IGNORE]]


@pytest.mark.parametrize(
    ("given_type", "result_type"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]
)
def test_half_precision_is_summed_in_float32(given_type, result_type):
    logits = torch.randn(4, 9).to(given_type)
    got = token_log_probs(logits, torch.tensor([0, 1, 2, 3]))
    assert got.dtype == result_type and (got <= 0).all()


def test_gradients_reach_the_answer_only():
    hidden = torch.randn(1, 4, 3, requires_grad=True)
    labels = torch.tensor([[IGNORE, IGNORE, 2, IGNORE]])
    answer_log_probs(hidden, torch.nn.Linear(3, 5), labels).sums.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().sum(-1).ne(0).tolist() == [[False, True, False, False]]
