"""Muon: momentum, with every direction of a matrix's update made as long (https://kellerjordan.github.io/posts/muon/).

As ``torch.optim.Muon``, step for step, but for the arithmetic of the Newton-Schulz iteration. Torch's is always
bfloat16, and a processor without it takes most of a training step for that. Here it is float32 there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lm_eval_elude.model.scorer import emulates_bfloat16

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the iteration, whose strengths end between .7 and 1.2
ITERATIONS = 5
RMS = 0.2  # of an update's entries: that of AdamW, whose rates it so can take (https://arxiv.org/abs/2502.16982)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalized; its parameters are matrices in float32, its decay is AdamW's."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
                update = orthogonal(gradient.lerp(state["momentum_buffer"], group["momentum"]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * RMS * max(parameter.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest matrix whose directions are all as long, by the Newton-Schulz iteration of Muon's author."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix if emulates_bfloat16(matrix.device) else matrix.bfloat16()
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
