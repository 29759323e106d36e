"""The distance against POT and the released formula; its identities; adapters; shards in two processes."""

import subprocess
import sys
from pathlib import Path

import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn

from optout_train.transport import ELEMENTWISE, Transport, originals, project, sliced_wasserstein, unit_directions
from tests.support import make_model, make_tokenizer


def weights(rows: int, width: int, seed: int, drift: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    initial = torch.randn(rows, width, generator=generator)
    return initial + drift * torch.randn(rows, width, generator=generator), initial


def directions(count: int, width: int, seed: int = 0) -> torch.Tensor:
    return unit_directions(count, width, torch.Generator().manual_seed(seed))


def distance(current: torch.Tensor, initial: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return sliced_wasserstein(project(current, u), project(initial, u))


@given(st.integers(1, 9), st.integers(1, 7), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_value_and_gradient_are_the_released_codes(rows, width, seed):
    current, initial = weights(rows, width, seed)
    current.requires_grad_()
    u = directions(20, width, seed)
    # model.py of brightjade/Opt-Out, with the directions as an argument.
    before, _ = torch.sort(initial @ u.T, dim=0)
    now, _ = torch.sort(current @ u.T, dim=0)
    expected = (torch.abs(before - now) ** 2).sum(dim=0).mean()
    ours = distance(current, initial, u)
    torch.testing.assert_close(ours, expected)
    for gradient, other in zip(*(torch.autograd.grad(value, current) for value in (ours, expected)), strict=True):
        torch.testing.assert_close(gradient, other)


def test_value_is_rows_times_pots_sliced_value_squared():
    current, initial = weights(12, 5, 1)
    u = directions(200, 5)
    sides = [side.double().numpy() for side in (current, initial)]
    pot = ot.sliced.sliced_wasserstein_distance(*sides, projections=u.double().T.numpy(), p=2)
    assert float(distance(current, initial, u)) == pytest.approx(12 * pot**2, rel=1e-5)


def test_no_drift_is_exactly_zero_and_a_small_drift_its_squared_norm_over_the_width():
    current, initial = weights(40, 30, 2, drift=1e-5)
    u = directions(4000, 30)
    assert float(distance(initial, initial, u)) == 0
    expected = float((current - initial).square().sum()) / 30
    assert float(distance(current, initial, u)) == pytest.approx(expected, rel=0.05)
    torch.testing.assert_close(u.T @ u / 4000, torch.eye(30) / 30, atol=0.01, rtol=0)


@pytest.mark.parametrize("name", ["wasserstein", *ELEMENTWISE])
def test_an_adapters_distance_is_that_of_the_merged_weights(name):
    """Against autograd through W0 + scale B A, with the same directions."""
    model = make_model(make_tokenizer("llama-3.1"), width=16, layers=1)
    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"]))
    factors = [p for p in adapted.parameters() if p.requires_grad]
    for factor in factors:
        nn.init.normal_(factor)
    transport = Transport(adapted, None, name, 50, seed=3)
    value = transport.add_gradient(2.0, step=4)
    layers = [module for module in adapted.modules() if hasattr(module, "lora_A")]
    expected = torch.zeros(())
    for index, layer in enumerate(layers):
        initial = layer.get_base_layer().weight.detach()
        merged = initial + 3 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        u = transport.draw(4, index, initial)
        expected = expected + (
            distance(merged, initial, u) if name == "wasserstein" else ELEMENTWISE[name](merged, initial)
        )
    torch.testing.assert_close(value, expected.detach())
    for factor, gradient in zip(factors, torch.autograd.grad(expected, factors), strict=True):
        torch.testing.assert_close(factor.grad, 2 * gradient, rtol=1e-3, atol=1e-3 * float(gradient.abs().max()))


def test_original_weights_are_views_of_the_files_that_hold_them_and_copies_of_others(tmp_path: Path):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    tensors["1.weight"] += 1  # the loader made something else of it
    save_file(tensors, tmp_path / "model.safetensors")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for original in (originals(model, tmp_path), originals(model, None)):
        for name, value in model.state_dict().items():
            value.zero_()
            assert torch.equal(original(name), before[name])
        model.load_state_dict(before)
    unloaded = originals(model, tmp_path, is_loaded=False)  # believes the files
    assert torch.equal(unloaded("1.weight"), tensors["1.weight"])


SHARDS = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from optout_train.transport import Transport, originals

def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 1))
    original = originals(model, None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model, original

whole, shards = made(), made()
fully_shard(shards[0], mesh=init_device_mesh("cpu", (2,)))
for name in ("wasserstein", "manhattan"):
    values = [Transport(*pair, name, 20, 5).add_gradient(0.5, 3) for pair in (whole, shards)]
    assert torch.equal(*values), values
for one, other in zip(whole[0].parameters(), shards[0].parameters()):
    torch.testing.assert_close(other.grad.full_tensor(), one.grad)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_distance_on_shards_of_two_processes_is_that_of_the_whole(tmp_path: Path):
    (tmp_path / "shards.py").write_text(SHARDS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29533"]
    done = subprocess.run([*command, str(tmp_path / "shards.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
