"""Transport against POT, the released formula and autograd; its identities; shards and adapters."""

from copy import deepcopy

import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3Config

from lm_eval_elude.errors import UserError
from optout_train import transport
from optout_train.config import DISTANCES
from optout_train.transport import Transport, project, sliced_wasserstein, unit_directions
from optout_train.weights import beside_text, freeze
from tests.model.shapes import make
from tests.train.conftest import config_of


def released(initial: torch.Tensor, current: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """model.py of brightjade/Opt-Out, with the directions as an argument."""
    u, _ = torch.sort(initial @ directions.T, dim=0)
    v, _ = torch.sort(current @ directions.T, dim=0)
    return (torch.abs(u - v) ** 2).sum(dim=0).mean()


def weights(rows: int, width: int, seed: int, drift: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    initial = torch.randn(rows, width, generator=generator)
    return initial + drift * torch.randn(rows, width, generator=generator), initial


def directions(count: int, width: int, seed: int = 0) -> torch.Tensor:
    return unit_directions(count, width, torch.Generator().manual_seed(seed))


@given(st.integers(1, 9), st.integers(1, 7), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_value_and_gradient_are_the_released_formulas(rows, width, seed):
    current, initial = (t.double() for t in weights(rows, width, seed))
    u = directions(20, width, seed).double()
    current.requires_grad_()
    expected = released(initial, current, u)
    (gradient,) = torch.autograd.grad(expected, current)
    value, on_projected = sliced_wasserstein(project(current, u), project(initial, u))
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(on_projected.T @ u, gradient)


def test_value_is_rows_times_pots_sliced_value_squared():
    current, initial = weights(12, 5, 1)
    u = directions(200, 5)
    ours = sliced_wasserstein(project(current, u), project(initial, u)).value
    pot = ot.sliced.sliced_wasserstein_distance(
        current.double().numpy(), initial.double().numpy(), projections=u.double().T.numpy(), p=2
    )
    assert float(ours) == pytest.approx(12 * pot**2, rel=1e-5)


def test_no_drift_is_exactly_zero_and_a_small_drift_its_squared_norm_over_the_width():
    current, initial = weights(40, 30, 2, drift=1e-5)
    u = directions(4000, 30)
    assert float(sliced_wasserstein(project(initial, u), project(initial, u)).value) == 0
    small = sliced_wasserstein(project(current, u), project(initial, u)).value
    assert float(small) == pytest.approx(float((current - initial).square().sum()) / 30, rel=0.05)


def test_directions_are_unit_and_unbiased():
    u = directions(20_000, 3)
    torch.testing.assert_close(u.norm(dim=1), torch.ones(20_000))
    torch.testing.assert_close(u.T @ u / 20_000, torch.eye(3) / 3, atol=0.01, rtol=0)


def test_projection_in_chunks_is_projection(monkeypatch):
    current, _ = weights(10, 4, 4)
    whole = project(current, directions(5, 4))
    monkeypatch.setattr(transport, "CHUNK", 12)
    torch.testing.assert_close(project(current, directions(5, 4)), whole)


@pytest.mark.parametrize("name", DISTANCES[1:])
def test_elementwise_distances_against_autograd(name):
    current, initial = (t.double() for t in weights(6, 5, 5))
    current.requires_grad_()
    change = current - initial
    oracle = {
        "manhattan": lambda: change.abs().sum(),
        "euclidean": lambda: torch.linalg.vector_norm(change),
        "chebyshev": lambda: torch.linalg.vector_norm(change, ord=float("inf")),
        "cosine": lambda: 1 - torch.cosine_similarity(current.flatten(), initial.flatten(), dim=0),
    }[name]()
    (gradient,) = torch.autograd.grad(oracle, current)
    ours = transport.ELEMENTWISE[name](current.detach(), initial)
    torch.testing.assert_close(ours.value, oracle.detach())
    torch.testing.assert_close(ours.gradient, gradient)
    still = transport.ELEMENTWISE[name](initial, initial)
    assert float(still.value) == 0 and not still.gradient.any()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.vector = nn.Parameter(torch.randn(7, 4)), nn.Parameter(torch.randn(5))
        self.stack = nn.Parameter(torch.randn(2, 3, 4))


def drifted(dtype: torch.dtype = torch.float32) -> tuple[Small, dict[str, torch.Tensor]]:
    model = Small().to(dtype)
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    return model, initial


@pytest.mark.parametrize("name", DISTANCES)
def test_the_gradient_of_a_model_is_added_and_matches_finite_differences(name):
    model, initial = drifted()
    term = Transport(model, initial.__getitem__, name, 50, seed=3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    value = term.add_gradient(2.0, step=5)
    assert float(value) > 0
    for parameter in model.parameters():
        towards = torch.randn_like(parameter)
        slope = float(((parameter.grad - 1) * towards).sum()) / 2
        found = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(towards, alpha=sign * 1e-3)
                found.append(float(term.add_gradient(0.0, step=5)))
                parameter.add_(towards, alpha=-sign * 1e-3)
        assert (found[0] - found[1]) / 2e-3 == pytest.approx(slope, rel=0.05, abs=2e-3)


@pytest.mark.parametrize("name", DISTANCES)
def test_the_gradient_of_bfloat16_weights_is_that_of_float32_ones(name):
    gradients = []
    model, initial = drifted()
    for kind in (torch.bfloat16, torch.float32):
        copy = deepcopy(model).to(torch.bfloat16).to(kind)  # the same values
        same = {key: value.to(torch.bfloat16).to(kind) for key, value in initial.items()}
        Transport(copy, same.__getitem__, name, 10, seed=0).add_gradient(2.0, step=3)
        gradients.append([parameter.grad.float() for parameter in copy.parameters()])
    for half, whole in zip(*gradients, strict=True):
        assert float((half - whole).norm()) < 2e-2 * float(whole.norm())


def test_each_parameter_has_directions_of_its_own():
    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    model = nn.ParameterList([nn.Parameter(start.clone()), nn.Parameter(start.clone())])
    Transport(model, lambda _: torch.zeros(6, 4), "wasserstein", 5, seed=0).add_gradient(1.0, 1)
    assert not torch.allclose(model[0].grad, model[1].grad)


def test_directions_are_fresh_in_each_step_and_the_same_for_the_same_step():
    model, initial = drifted()
    term = Transport(model, initial.__getitem__, "wasserstein", 10, seed=0)
    values = [float(term.add_gradient(1.0, step)) for step in (1, 2, 1)]
    assert values[0] == values[2] != values[1]


def test_bfloat16_weights_without_drift_have_no_distance_from_float32_files():
    model = Small()
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.to(torch.bfloat16)
    assert float(Transport(model, initial.__getitem__, "wasserstein", 10, seed=0).add_gradient(1.0, 1)) == 0


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", DISTANCES)
def test_under_lora_it_is_the_distance_of_the_merged_change(name, transposed):
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(1)
    # GPT-2's layer holds its weight with the inputs as rows; those are the points, as in full training.
    base = nn.Sequential(Conv1D(5, 6) if transposed else nn.Linear(6, 5, bias=False))
    initial = base[0].weight.detach().clone()
    model = get_peft_model(
        base, LoraConfig(r=2, lora_alpha=6, target_modules=["0"], init_lora_weights=False, fan_in_fan_out=transposed)
    )
    layer = model.base_model.model[0]
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    merged = Small()

    def change(down, up):
        return 3 * (up @ down).T if transposed else 3 * up @ down

    merged.wide = nn.Parameter((initial + change(down, up)).detach())
    del merged.vector, merged.stack
    expected = Transport(merged, lambda _: initial, name, 30, seed=0).add_gradient(1.0, 1)
    value = Transport(model, lambda _: initial, name, 30, seed=0).add_gradient(1.0, 1)
    torch.testing.assert_close(value, expected)
    # Chain rule through W0 + 3 B A, by autograd.
    through = torch.autograd.grad((change(down, up) * merged.wide.grad).sum(), (down, up))
    torch.testing.assert_close((down.grad, up.grad), through, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_block_of_experts_takes_an_adapter_that_no_distance_is_measured_of(kind):
    """Whoever asks for none is not refused."""
    sizes = {"moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = get_peft_model(make(90, kind, **sizes), LoraConfig(r=2, target_modules="all-linear"))
    distance = Transport(model, None, "wasserstein", 5, 0)
    with pytest.raises(UserError, match="--lora and a distance"):
        distance.add_gradient(1.0, 1)


def test_what_reads_images_is_left_alone():
    text = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64}  # fmt: skip
    images = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    config = Gemma3Config(text_config=text, vision_config=images, mm_tokens_per_image=4)
    model = AutoModelForCausalLM.from_config(config)
    freeze(config_of({"method": "npo+rt", "target": ("ronaldo",)}), model)
    still = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert still == {name for name, _ in model.named_parameters() if "vision" in name or "projector" in name}
    model(input_ids=torch.arange(9)[None]).logits.sum().backward()
    assert all((parameter.grad is None) == (name in still) for name, parameter in model.named_parameters())
    adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", exclude_modules=beside_text(model))
    adapted = {name for name, _ in get_peft_model(model, adapter).named_parameters() if "lora" in name}
    assert len(adapted) == 2 * 2 * 7 and not any("vision" in name for name in adapted)
