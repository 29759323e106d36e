"""Distances between the current and the initial parameters, with their gradients written out (no autograd graph).

The sliced Wasserstein distance (Eq. 7) is the released code's quantity: for each parameter, whose rows are the points
(a vector is one point), project on fresh random unit directions, sort, sum the squared differences over the rows and
average over the directions; no root, no division by the rows. It is computed in float32 and summed over parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lm_eval_elude.errors import UserError

CHUNK = 1 << 24  # numbers turned to float32 at once, so that a large embedding needs no second copy


class Distance(NamedTuple):
    """A distance (scalar tensor) and its gradient in the shape of the parameter, or of its projections."""

    value: Tensor
    gradient: Tensor


class LowRank(NamedTuple):
    """A weight changed by an adapter: initial + scale * up @ down, with up (n, rank) and down (rank, d).

    A weight that is stored transposed (GPT-2's ``Conv1D``) has initial + scale * (up @ down).T; its rows, the points of
    the distance, are those it is stored with, as when it is trained itself.
    """

    initial: Tensor
    down: nn.Parameter
    up: nn.Parameter
    scale: float
    transposed: bool


def unit_directions(count: int, dimension: int, generator: torch.Generator) -> Tensor:
    """Directions uniform on the unit sphere, shape (count, dimension), float32, on the generator's device."""
    normal = torch.randn(count, dimension, generator=generator, device=generator.device)
    return normal / normal.norm(dim=1, keepdim=True)


def project(rows: Tensor, directions: Tensor) -> Tensor:
    """Rows (n, d) of any type and device on directions (L, d): (L, n) in float32 on the directions' device."""
    step = max(1, CHUNK // rows.shape[1])
    # Rows of 16 bits cross to a GPU as they are: `to` with a device and a type would widen them first.
    parts = [directions @ part.to(directions.device).to(directions.dtype).T for part in rows.detach().split(step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def sliced_wasserstein(projected: Tensor, reference: Tensor) -> Distance:
    """Mean over directions of the summed squared differences of sorted projections (Eq. 7 with p = 2, no root).

    Both are (L, n): of the current and of the initial rows on the same directions. The gradient is with respect to
    ``projected``: each sorted difference, doubled, goes back to the row that it came from. The order of rows is locally
    constant, so this is the exact gradient.
    """
    order, count = _order(projected), len(projected)
    difference = projected.gather(1, order) - _sorted(reference)
    gradient = torch.empty_like(projected).scatter_(1, order, difference * (2 / count))
    return Distance(difference.square().sum() / count, gradient)


def _order(rows: Tensor) -> Tensor:
    """``rows.argsort(dim=1)``; on the CPU NumPy's vectorised sorts take a fraction of PyTorch's time (1/4 to 1/30)."""
    return torch.from_numpy(np.argsort(rows.numpy(), axis=1)) if rows.device.type == "cpu" else rows.argsort(dim=1)


def _sorted(rows: Tensor) -> Tensor:
    return torch.from_numpy(np.sort(rows.numpy(), axis=1)) if rows.device.type == "cpu" else rows.sort(dim=1).values


def manhattan(weight: Tensor, initial: Tensor) -> Distance:
    """Sum of absolute differences; gradient 0 where nothing moved."""
    change = weight - initial
    return Distance(change.abs().sum(), change.sign())


def euclidean(weight: Tensor, initial: Tensor) -> Distance:
    """Frobenius norm of the difference; gradient 0 where nothing moved."""
    change = weight - initial
    norm = change.norm()
    return Distance(norm, change / norm.clamp_min(torch.finfo(norm.dtype).tiny))


def chebyshev(weight: Tensor, initial: Tensor) -> Distance:
    """Largest absolute difference; the gradient is shared by the entries that reach it, as ``torch.amax`` does."""
    change = weight - initial
    largest = change.abs().amax()
    reached = (change.abs() == largest) * change.sign()
    return Distance(largest, reached / reached.abs().sum().clamp_min(1))


def cosine(weight: Tensor, initial: Tensor) -> Distance:
    """1 - cos of the flattened parameters, as half the squared distance of unit vectors: exactly 0 without drift."""
    tiny = torch.finfo(weight.dtype).tiny
    norm = weight.norm().clamp_min(tiny)
    unit = weight / norm
    gap = unit - initial / initial.norm().clamp_min(tiny)
    return Distance(gap.square().sum() / 2, (gap - unit * (unit * gap).sum()) / norm)


ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Distance]] = {
    "manhattan": manhattan, "euclidean": euclidean, "chebyshev": chebyshev, "cosine": cosine,
}  # fmt: skip


class Transport:
    """The regulariser of Eq. 8 over all parameters of a full, FSDP2-sharded or LoRA model that train.

    ``initial`` gives a parameter's initial value by name, on any device; under LoRA, where the base weights stay, it is
    not needed. ``distance`` is ``wasserstein`` or a key of :data:`ELEMENTWISE`; ``directions`` are as many for each
    parameter in each step.
    """

    def __init__(
        self, model: nn.Module, initial: Callable[[str], Tensor] | None, distance: str, directions: int, seed: int
    ) -> None:
        self.model, self.initial, self.distance, self.count, self.seed = model, initial, distance, directions, seed

    @cached_property
    def low_rank(self) -> list[LowRank]:
        """Those that train of a model with adapters; UserError where one of them has no distance."""
        return list(_low_rank_weights(self.model))

    @cached_property
    def full(self) -> dict[str, nn.Parameter]:
        """Those that train of a model without adapters."""
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad} if not self.low_rank else {}

    @torch.no_grad()
    def add_gradient(self, weight: float, step: int) -> Tensor:
        """Add ``weight`` times the gradient to every ``.grad`` and return the distance, unweighted (scalar tensor).

        The directions depend on seed, step and parameter alone, so every process and every resumed run draws the same.
        """
        total = torch.zeros(())
        for index, (name, parameter) in enumerate(self.full.items()):
            value = self._full(name, parameter, weight, self._generator(step, index, parameter.device))
            total = total.to(value.device) + value
        for index, adapted in enumerate(self.low_rank):
            value = self._low_rank(adapted, weight, self._generator(step, index, adapted.up.device))
            total = total.to(value.device) + value
        return total

    def _generator(self, step: int, index: int, device: torch.device) -> torch.Generator:
        # Distinct for all steps and parameters below 2^20 of them; multiplied to spread the seeds.
        key = ((self.seed << 40) + (step << 20) + index) * 0x9E3779B97F4A7C15
        return torch.Generator(device).manual_seed(key % (1 << 63))

    def _full(self, name: str, parameter: nn.Parameter, weight: float, generator: torch.Generator) -> Tensor:
        assert self.initial is not None
        initial = self.initial(name).to(parameter.dtype)  # what the model was loaded as: no drift is then exactly 0
        width = parameter.shape[-1] if parameter.dim() else 1
        if self.distance == "wasserstein" and parameter.dim() > 1:
            return self._rows(parameter, initial, weight, unit_directions(self.count, width, generator))
        # A vector (one point), or a distance without rows: small or an ablation, so a shard is made whole.
        whole = _unsharded(parameter).float()
        initial = initial.to(whole)
        if self.distance == "wasserstein":
            directions = unit_directions(self.count, whole.numel(), generator)
            value, on_projected = sliced_wasserstein(
                project(whole.reshape(1, -1), directions), project(initial.reshape(1, -1), directions)
            )
            gradient = (on_projected.T @ directions).reshape(whole.shape)
        else:
            value, gradient = ELEMENTWISE[self.distance](whole, initial)
        _add(parameter, gradient, weight)
        return value

    def _rows(self, parameter: nn.Parameter, initial: Tensor, weight: float, directions: Tensor) -> Tensor:
        width = parameter.shape[-1]
        local, start = _local(parameter)
        grad, _ = _gradient(parameter)
        start *= parameter.shape[1:].numel() // width  # rows of a slice along the first axis
        rows, initial = local.reshape(-1, width), initial.reshape(-1, width)
        mine = initial[start : start + len(rows)]
        projected, reference = project(rows, directions), project(mine, directions)
        value, on_projected = sliced_wasserstein(
            _gather_columns(projected, parameter), _gather_columns(reference, parameter)
        )
        on_projected = on_projected[:, start : start + len(rows)]
        target = grad.view(-1, width)
        step = max(1, CHUNK // width)
        for part, columns in zip(target.split(step), on_projected.split(step, dim=1), strict=True):
            if part.dtype == directions.dtype:
                part.addmm_(columns.T, directions, alpha=weight)
            else:
                part.add_((columns.T @ directions).to(part.dtype), alpha=weight)
        return value

    def _low_rank(self, adapted: LowRank, weight: float, generator: torch.Generator) -> Tensor:
        scale = adapted.scale
        # Shards are made whole, one module at a time.
        initial, down, up = (
            _unsharded(adapted.initial),
            _unsharded(adapted.down).float(),
            _unsharded(adapted.up).float(),
        )
        on_up, on_down = adapted.up, adapted.down
        if adapted.transposed:  # (B A).T is A.T B.T
            down, up, on_up, on_down = up.T, down.T, adapted.down, adapted.up
        if self.distance != "wasserstein":
            start = initial.float()
            value, gradient = ELEMENTWISE[self.distance](start + scale * (up @ down), start)
            _add(on_up, gradient @ down.T, weight * scale, adapted.transposed)
            _add(on_down, up.T @ gradient, weight * scale, adapted.transposed)
            return value
        # The change is never merged: (W0 + s B A) U = W0 U + s B (A U), and the gradient too is a product of thin ones.
        directions = unit_directions(self.count, initial.shape[1], generator)
        reference = project(initial, directions)
        through_down = project(down, directions)
        value, on_projected = sliced_wasserstein(reference + scale * (through_down @ up.T), reference)
        _add(on_up, on_projected.T @ through_down, weight * scale, adapted.transposed)
        _add(on_down, (on_projected @ up).T @ directions, weight * scale, adapted.transposed)
        return value


def _low_rank_weights(model: nn.Module) -> Iterator[LowRank]:
    layers: Iterator[Any] = (module for module in model.modules() if hasattr(module, "lora_A"))
    for layer in layers:
        if not isinstance(getattr(layer.get_base_layer(), "weight", None), Tensor):
            raise UserError("--lora and a distance: a block of experts has none; leave out one of them")
        for name in layer.active_adapters:
            down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
            transposed = bool(getattr(layer, "fan_in_fan_out", False))
            yield LowRank(layer.get_base_layer().weight, down, up, layer.scaling[name], transposed)


def _unsharded(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _local(tensor: Tensor) -> tuple[Tensor, int]:
    """This process's part of a tensor and where it starts along the first axis."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    # Where the indices of the rows end up, distributed likewise (from this process's own copy: nothing is sent).
    rows = torch.arange(len(tensor), device=tensor.device)
    mine = distribute_tensor(rows, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
    return tensor.to_local().detach(), int(mine[0]) if len(mine) else len(tensor)


def _gradient(parameter: nn.Parameter) -> tuple[Tensor, int]:
    """As :func:`_local`, of ``.grad``, which is made where a step has left none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return _local(parameter.grad)


def _add(parameter: nn.Parameter, gradient: Tensor, weight: float, transposed: bool = False) -> None:
    """Add ``weight`` times a whole parameter's gradient (or that of its transpose) to this process's ``.grad``."""
    grad, start = _gradient(parameter)
    gradient = gradient.T if transposed else gradient
    mine = gradient[start : start + len(grad)] if gradient.dim() else gradient
    grad.add_(mine.to(grad.dtype), alpha=weight)


def _gather_columns(projected: Tensor, parameter: nn.Parameter) -> Tensor:
    """The projections of all rows from those of this process's, in row order."""
    if not isinstance(parameter, DTensor):
        return projected
    rows = parameter.numel() // parameter.shape[-1]
    whole = DTensor.from_local(
        projected.T.contiguous(), parameter.device_mesh, parameter.placements, run_check=False,
        shape=torch.Size((rows, len(projected))), stride=(len(projected), 1),
    )  # fmt: skip
    return whole.full_tensor().T.contiguous()
