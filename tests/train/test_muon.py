"""The optimizer of whole matrices against torch's own, whose arithmetic is bfloat16 everywhere, and against the SVD."""

import pytest
import torch
from torch import nn

from optout_train import muon
from optout_train.muon import Muon, orthogonal

SHAPES = [(24, 24), (48, 24), (24, 48)]


def after(make, steps: int = 4) -> list[torch.Tensor]:
    """The weights of matrices after some steps along the same random gradients."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = make(weights)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape)
        optimizer.step()
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize("emulated", [False, True])
def test_a_step_is_torchs_and_in_float32_what_bfloat16_rounds(emulated, monkeypatch):
    monkeypatch.setattr(muon, "emulates_bfloat16", lambda device: emulated)
    settings = {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.9}
    initial = after(lambda weights: Muon(weights, **settings), steps=0)
    mine = after(lambda weights: Muon(weights, **settings))
    torchs = after(lambda weights: torch.optim.Muon(weights, **settings, adjust_lr_fn="match_rms_adamw"))
    for was, of_mine, of_torch in zip(initial, mine, torchs, strict=True):
        if emulated:
            assert 0 < float((of_mine - of_torch).norm() / (of_torch - was).norm()) < 0.03
        else:
            assert torch.equal(of_mine, of_torch)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_all_directions_of_a_matrix_stay_and_end_about_as_long(shape, size, monkeypatch):
    monkeypatch.setattr(muon, "emulates_bfloat16", lambda device: True)
    matrix = size * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    left, strengths, right = torch.linalg.svd(matrix, full_matrices=False)
    turned = left.T @ orthogonal(matrix) @ right.T
    large = strengths > strengths.max() / 50  # what is far smaller is not there yet after five iterations
    assert float((turned - turned.diagonal().diag()).abs().max()) < 1e-3
    assert large.sum() > len(strengths) / 2 and ((turned.diagonal()[large] - 1).abs() < 0.35).all()


def test_a_matrix_without_a_gradient_stays():
    weights = [nn.Parameter(torch.ones(3, 3)) for _ in range(2)]
    weights[0].grad = torch.eye(3)
    Muon(weights, lr=0.1, weight_decay=0.1, momentum=0.9).step()
    assert torch.equal(weights[1], torch.ones(3, 3)) and not torch.equal(weights[0], weights[1])
