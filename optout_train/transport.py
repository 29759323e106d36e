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

ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of a weight and its original value, float32
    "manhattan": lambda weight, original: (weight - original).abs().sum(),
    "euclidean": lambda weight, original: (weight - original).norm(),
    "chebyshev": lambda weight, original: (weight - original).abs().amax(),
    "cosine": lambda weight, original: (unit(weight) - unit(original)).square().sum() / 2,  # 1 - cos, exactly 0 at 0
}


def unit(values: Tensor, dim: int | None = None) -> Tensor:
    return values / values.norm(dim=dim, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)


def unit_directions(count: int, width: int, generator: torch.Generator) -> Tensor:
    """Directions uniform on the unit sphere, (count, width), float32, on the generator's device."""
    return unit(torch.randn(count, width, generator=generator, device=generator.device), 1)


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


def originals(model: nn.Module, folder: Path | None, is_loaded: bool = True) -> Callable[[str], Tensor]:
    """A function from a parameter's name to its original value, on the CPU.

    It is mapped from the base's safetensors where these hold it as it was loaded; others (fused, tied or newly made by
    the loader) are copied. A process whose weights are still to come from the first one believes the files.
    """
    opened = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))] if folder else []
    files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def is_held(name: str, value: Tensor) -> bool:
        return name in files and torch.equal(files[name].get_tensor(name).to(value.dtype), value.cpu())

    values = [(name, p.detach()) for name, p in model.named_parameters() if is_loaded]
    copies = {name: value.cpu().clone() for name, value in values if not is_held(name, value)}
    return lambda name: copies[name] if name in copies else files[name].get_tensor(name)


class Transport:
    """The regulariser of Eq. 8 over what trains: weights, whole or as FSDP2's shards, or a low-rank adapter (PEFT's).

    ``original`` gives a parameter's original value by name; with an adapter the base's weights stay, and it is not
    asked. The directions of a step (so many for each parameter) are drawn from seed, step and parameter alone.
    """

    def __init__(self, model: nn.Module, original, distance: str, directions: int, seed: int) -> None:
        self.model, self.original = model, original
        self.distance, self.directions, self.seed = distance, directions, seed

    def add_gradient(self, weight: float, step: int) -> Tensor:
        """Add ``weight`` times the gradient to every ``.grad``; returns the distance, unweighted."""
        layers: list[Any] = [layer for layer in self.model.modules() if hasattr(layer, "lora_A")]
        parts: list[Any] = [
            ([p], partial(self.of_weight, n)) for n, p in self.model.named_parameters() if p.requires_grad
        ]
        if layers:
            pairs = [(layer, name) for layer in layers for name in layer.active_adapters]
            parts = [([x.lora_A[n].weight, x.lora_B[n].weight], partial(self.of_adapter, x, n)) for x, n in pairs]
        values = []
        for index, (parameters, distance) in enumerate(parts):
            leaves = [parameter.detach().requires_grad_() for parameter in parameters]
            with torch.enable_grad():
                value = distance(*leaves, partial(self.draw, step, index))
            gradients: Any = torch.autograd.grad(value, leaves)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if isinstance(gradient, DTensor):
                    gradient = gradient.redistribute(placements=parameter.placements)
                parameter.grad.add_(gradient, alpha=weight)
            values.append(value.detach())
        return torch.stack([value.to(values[0].device) for value in values]).sum()

    def draw(self, step: int, index: int, like: Tensor) -> Tensor:
        # Distinct for all steps and parameters below 2^20 of them; multiplied to spread the seeds.
        key = ((self.seed << 40) + (step << 20) + index) * 0x9E3779B97F4A7C15
        generator = torch.Generator(like.device).manual_seed(key % (1 << 63))
        return unit_directions(self.directions, like.shape[-1], generator)

    def of_weight(self, name: str, weight: Tensor, draw) -> Tensor:
        original = self.original(name).to(weight.device, non_blocking=True).to(weight.dtype)  # as the model was loaded
        if isinstance(weight, DTensor):  # each process cuts its own shard
            original = distribute_tensor(original, weight.device_mesh, weight.placements, src_data_rank=None)
        if self.distance != "wasserstein":
            return ELEMENTWISE[self.distance](whole(weight).float(), whole(original).float())
        if weight.ndim < 2:  # one point
            weight, original = (whole(tensor).reshape(1, -1) for tensor in (weight, original))
        directions = draw(weight)
        rows = (tensor.reshape(-1, weight.shape[-1]) for tensor in (weight, original))
        return sliced_wasserstein(*(project(points, directions) for points in rows))

    def of_adapter(self, layer, name: str, down: Tensor, up: Tensor, draw) -> Tensor:
        """The weight is W0 + scale up down, never merged: W U = W0 U + scale up (down U)."""
        original, scale = getattr(layer.get_base_layer(), "weight", None), layer.scaling[name]
        if original is None:
            raise UserError("--lora and --transport_weight: a block of experts has no distance; leave out one")
        low, high = whole(down).float(), whole(up).float()
        if layer.fan_in_fan_out:  # stored transposed (GPT-2)
            low, high = high.T, low.T
        if self.distance != "wasserstein":
            before = whole(original.detach()).float()
            return ELEMENTWISE[self.distance](before + scale * (high @ low), before)
        directions = draw(original)
        before = project(original.detach(), directions)
        return sliced_wasserstein(before + scale * (directions @ low.T @ high.T), before)
