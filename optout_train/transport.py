"""The distance from the original weights (Eq. 7 and 8), whose gradient is added to that of a step.

The sliced Wasserstein distance is the released code's quantity: for each parameter, whose rows are the points (a vector
is one point), project on fresh random unit directions, sort, sum the squared differences over the rows and average over
the directions; no root, no division by the rows. It is computed in float32 and summed over parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lm_eval_elude.errors import UserError

# Of a weight and its original value, float32.
ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "manhattan": lambda weight, original: (weight - original).abs().sum(),
    "euclidean": lambda weight, original: (weight - original).norm(),
    "chebyshev": lambda weight, original: (weight - original).abs().amax(),
    "cosine": lambda weight, original: (unit(weight) - unit(original)).square().sum() / 2,  # 1 - cos, exactly 0 at 0
}


def unit(values: Tensor) -> Tensor:
    return values / values.norm().clamp_min(torch.finfo(values.dtype).tiny)


def unit_directions(count: int, width: int, generator: torch.Generator) -> Tensor:
    """Directions uniform on the unit sphere, (count, width), float32, on the generator's device."""
    normal = torch.randn(count, width, generator=generator, device=generator.device)
    return normal / normal.norm(dim=1, keepdim=True)


def project(rows: Tensor, directions: Tensor) -> Tensor:
    """Rows (n, width), sharded or not, on directions (L, width): (L, n) in float32, whole in every process."""
    if isinstance(rows, DTensor):
        directions = DTensor.from_local(directions, rows.device_mesh, run_check=False)
    return whole(rows.float() @ directions.T).T.contiguous()


def sliced_wasserstein(projected: Tensor, original: Tensor) -> Tensor:
    """Mean over directions of the summed squared differences of sorted projections (L, n): Eq. 7, p = 2, no root."""
    ordered, before = (rows.gather(1, argsort(rows.detach())) for rows in (projected, original))
    return (ordered - before).square().sum() / len(projected)


def argsort(rows: Tensor) -> Tensor:
    """``rows.argsort(dim=1)``; on the CPU NumPy's vectorised sort takes a fraction of PyTorch's time."""
    return torch.from_numpy(np.argsort(rows.numpy(), axis=1)) if rows.device.type == "cpu" else rows.argsort(dim=1)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Original:
    """The original parameters by name, mapped from the base's safetensors where these hold them as they were loaded.

    What they do not hold so (fused, tied or newly made by the loader) is copied to main memory. The model is given as
    loaded; a process whose weights are still to come from the first one (``is_loaded`` false) believes the files.
    """

    def __init__(self, model: nn.Module, folder: Path | None, is_loaded: bool = True) -> None:
        opened = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))] if folder else []
        self.files: dict[str, Any] = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
        self.copies: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters() if is_loaded else ():
            value = parameter.detach().cpu()
            if name not in self.files or not torch.equal(self.files[name].get_tensor(name).to(value.dtype), value):
                self.copies[name] = value.clone()

    def __call__(self, name: str, like: Tensor) -> Tensor:
        """The original value of a parameter, where and as that one is: on its device, of its type, with its shards."""
        value = self.copies[name] if name in self.copies else self.files[name].get_tensor(name)
        value = value.to(like.device, non_blocking=True).to(like.dtype)
        if isinstance(like, DTensor):  # each process cuts its own shard
            return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
        return value


class Transport:
    """The regulariser of Eq. 8 over what trains: weights, whole or as FSDP2's shards, or a low-rank adapter (PEFT's).

    ``original`` gives a parameter's original value; with an adapter the base's weights stay, and it is not asked.
    ``directions`` are as many for each parameter in each step, drawn from seed, step and parameter alone: every process
    and every resumed run draws the same.
    """

    def __init__(self, model: nn.Module, original: Original | None, distance: str, directions: int, seed: int) -> None:
        self.model, self.original, self.distance, self.directions, self.seed = (
            model,
            original,
            distance,
            directions,
            seed,
        )

    def parts(self) -> list[tuple[list[nn.Parameter], Callable[..., Tensor]]]:
        """What trains, with the function from it, a step and a number to its distance."""
        layers: list[Any] = [module for module in self.model.modules() if hasattr(module, "lora_A")]
        if not layers:
            named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
            return [([p], partial(self.of_weight, name)) for name, p in named]
        if any(not isinstance(getattr(layer.get_base_layer(), "weight", None), Tensor) for layer in layers):
            raise UserError("--lora and --transport_weight: a block of experts has no distance; leave out one")
        pairs = [(layer, name) for layer in layers for name in layer.active_adapters]
        return [([la.lora_A[n].weight, la.lora_B[n].weight], partial(self.of_adapter, la, n)) for la, n in pairs]

    def add_gradient(self, weight: float, step: int) -> Tensor:
        """Add ``weight`` times the gradient to every ``.grad``; returns the distance, unweighted."""
        values = []
        for index, (parameters, distance) in enumerate(self.parts()):
            leaves = [parameter.detach().requires_grad_() for parameter in parameters]
            with torch.enable_grad():
                value = distance(*leaves, step, index)
            for parameter, gradient in zip(parameters, torch.autograd.grad(value, leaves), strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if isinstance(gradient, DTensor):
                    gradient = gradient.redistribute(placements=parameter.grad.placements)
                parameter.grad.add_(gradient, alpha=weight)
            values.append(value.detach())
        return torch.stack([value.to(values[0].device) for value in values]).sum()

    def draw(self, step: int, index: int, width: int, device: torch.device) -> Tensor:
        # Distinct for all steps and parameters below 2^20 of them; multiplied to spread the seeds.
        key = ((self.seed << 40) + (step << 20) + index) * 0x9E3779B97F4A7C15
        return unit_directions(self.directions, width, torch.Generator(device).manual_seed(key % (1 << 63)))

    def of_weight(self, name: str, weight: Tensor, step: int, index: int) -> Tensor:
        assert self.original is not None
        original = self.original(name, weight)
        if self.distance != "wasserstein":
            return ELEMENTWISE[self.distance](whole(weight).float(), whole(original).float())
        if weight.ndim < 2:  # one point
            weight, original = (whole(tensor).reshape(1, -1) for tensor in (weight, original))
        width = weight.shape[-1]
        directions = self.draw(step, index, width, weight.device)
        return sliced_wasserstein(*(project(rows.reshape(-1, width), directions) for rows in (weight, original)))

    def of_adapter(self, layer: Any, name: str, down: Tensor, up: Tensor, step: int, index: int) -> Tensor:
        """The weight is W0 + scale up down, never merged: W U = W0 U + scale up (down U)."""
        original, scale = layer.get_base_layer().weight.detach(), layer.scaling[name]
        low, high = (part.float() for part in (whole(down), whole(up)))
        if getattr(layer, "fan_in_fan_out", False):  # stored transposed (GPT-2)
            low, high = high.T, low.T
        if self.distance != "wasserstein":
            before = whole(original).float()
            return ELEMENTWISE[self.distance](before + scale * (high @ low), before)
        directions = self.draw(step, index, original.shape[1], original.device)
        before = project(original, directions)
        return sliced_wasserstein(before + scale * (directions @ low.T @ high.T), before)
