"""Membership scores against straightforward readings of their papers, in numpy and torch."""

from __future__ import annotations

import math
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_elude.scoring.membership import min_k, min_k_plus_plus, reference_gap, zlib_ratio

log_probs = st.lists(st.floats(-30, 0), min_size=1, max_size=40)


@given(log_probs, st.text(min_size=1))
def test_zlib_is_log_perplexity_over_compressed_bytes(values: list[float], text: str) -> None:
    perplexity = math.exp(-np.mean(values))
    oracle = -math.log(perplexity) / len(zlib.compress(bytes(text, "utf-8")))
    assert zlib_ratio(values, text) == pytest.approx(oracle, abs=1e-12)


@given(log_probs)
def test_min_k_is_the_mean_of_the_lowest_fifth(values: list[float]) -> None:
    k = max(1, math.floor(len(values) * 0.2))
    assert min_k(values) == pytest.approx(np.mean(np.sort(values)[:k]))
    assert min_k(values) <= np.mean(values) + 1e-9


@given(st.integers(2, 12), st.integers(2, 50), st.integers(0, 1000))
def test_min_k_plus_plus_from_the_papers_code(tokens: int, vocabulary: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64)
    chosen = torch.randint(vocabulary, (tokens,), generator=generator)
    # As the authors' repository computes it.
    probs, logs = logits.softmax(-1), logits.log_softmax(-1)
    token_log_probs = logs.gather(-1, chosen[:, None])[:, 0]
    mu = (probs * logs).sum(-1)
    sigma = (probs * torch.square(logs)).sum(-1) - torch.square(mu)
    scores = np.sort(((token_log_probs - mu) / sigma.sqrt()).numpy())[: max(1, int(tokens * 0.2))]
    ours = min_k_plus_plus(token_log_probs.tolist(), mu.tolist(), sigma.sqrt().tolist())
    assert ours == pytest.approx(np.mean(scores), rel=1e-6)


def test_min_k_plus_plus_of_a_certain_model_is_zero() -> None:
    assert min_k_plus_plus([0.0, 0.0], [0.0, 0.0], [0.0, 0.0]) == 0


@given(log_probs, log_probs)
def test_reference_gap_is_a_difference_of_losses(ours: list[float], theirs: list[float]) -> None:
    assert reference_gap(ours, theirs) == pytest.approx(-np.mean(theirs) - -np.mean(ours), abs=1e-9)
    assert reference_gap(ours, ours) == 0
