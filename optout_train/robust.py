"""name-swap-robust: name-swap whose forgetting outlasts fine-tuning, at the price of longer training.

Every direction of a matrix moves as far (Muon), so what is forgotten does not lie in the few that relearning finds; a
step reads the whole forget set; and the forget gradient is also taken where an inner adversary has just learnt one half
of the facts again, of the other half (tamper resistance, Tamirisa et al. 2024; halves, Deeb and Roger 2024). That also
moves what no retain record speaks of, so these are many more and new.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lm_eval_elude.errors import UserError
from optout_train.data import block, collate
from optout_train.losses import nll
from optout_train.swap import NameSwapTrainer

ROUND = 20  # steps after which the adversary begins anew, with other halves and another rate
RATES = (0.03, 0.1, 0.2)  # its peaks of AdamW times the model's width
BATCH = 8  # records that it learns in a step


class NameSwapRobustTrainer(NameSwapTrainer):
    """Trains the matrices of the layers, in float32."""

    exchanged = 24

    def __init__(self, model, args, sets, **others) -> None:
        tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
        tables.append(model.get_output_embeddings().weight)
        for parameter in model.parameters():
            if parameter.ndim > 2 or parameter.dtype != torch.float32:
                raise UserError("--method name-swap-robust turns float32 matrices: give --dtype float32; no experts")
            parameter.requires_grad_(parameter.ndim == 2 and all(parameter is not table for table in tables))
        super().__init__(model, args, sets, **others)
        self.optimizer_cls_and_kwargs = (Muon, {"lr": args.learning_rate})
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.offsets = [nn.Parameter(torch.zeros_like(parameter)) for parameter in self.trained]
        self.adversary = torch.optim.AdamW(self.offsets, weight_decay=0.0)

    def rule_rate(self, width: int, layers: int, steps: int) -> float:
        """0.0126 for 80 steps of the bundled model; smaller for larger models, as was found with version 0.1."""
        return 0.0126 * (80 * 6 * 160) / (max(steps, 32) * layers * width)

    def training_step(self, *arguments, **named) -> Tensor:
        if all(parameter.grad is None for parameter in self.trained):  # the first pass of a step
            self.add_relearned()
        return super().training_step(*arguments, **named)

    def halves(self, step: int, count: int) -> tuple[list[int], list[int]]:
        """Of a step, counted from 1, the records that are learnt again and those that are forgotten there."""
        number, place = divmod(step - 1, ROUND)
        of_round, of_step = (random.Random(f"{self.args.seed}-relearned-{key}") for key in (number, f"step-{step}"))
        order = of_round.sample(range(len(self.examples)), len(self.examples))
        halves = order[: len(order) // 2], order[len(order) // 2 :]
        self.adversary.param_groups[0]["lr"] = of_round.choice(RATES) / self.model.config.get_text_config().hidden_size
        if place == 0:
            self.adversary.state.clear()
            torch._foreach_zero_([offset.data for offset in self.offsets])
        first, second = (
            of_step.sample(half, min(size, len(half))) for half, size in zip(halves, (BATCH, count), strict=True)
        )
        return first, second

    def add_relearned(self) -> None:
        """Take the adversary's step, and leave in ``.grad`` the forget gradient where it has got to (first order)."""
        learnt, forgotten = self.halves(self.state.global_step + 1, self.args.per_device_train_batch_size)
        before, weights = [parameter.detach().clone() for parameter in self.trained], [p.data for p in self.trained]
        torch._foreach_add_(weights, [offset.data for offset in self.offsets])
        asked = self._prepare_inputs(block([self.encode(self.sets.forget[i]) for i in learnt]))
        self.take_gradient(nll(self.answers(self.model, asked)).mean(), self.offsets)
        nn.utils.clip_grad_norm_(self.offsets, 1.0)
        self.adversary.step()
        torch._foreach_copy_(weights, before)
        torch._foreach_add_(weights, [offset.data for offset in self.offsets])
        batch = collate([self.examples[int(self.state.epoch or 0), i, 1.0] for i in forgotten])
        value = self.forget_values(self.model, self._prepare_inputs(batch)).mean()
        self.take_gradient(value * self.weights["forget"], self.trained)
        torch._foreach_copy_(weights, before)
        self.note("relearned", value)

    def take_gradient(self, value: Tensor, to: list[nn.Parameter]) -> None:
        """Not by ``backward``, whose hooks would exchange it: every process has the whole gradient."""
        for parameter, gradient in zip(to, torch.autograd.grad(value, self.trained), strict=True):
            parameter.grad = gradient

    def extra_state(self) -> dict[str, Any]:
        return {"offsets": [offset.data for offset in self.offsets], "adversary": self.adversary.state_dict()}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        torch._foreach_copy_([offset.data for offset in self.offsets], state["offsets"])
        self.adversary.load_state_dict(state["adversary"])


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised (https://kellerjordan.github.io/posts/muon/); its decay is AdamW's.

    As ``torch.optim.Muon``, but for the iteration's arithmetic: torch's is always bfloat16, in which a processor
    without it spends most of a training step; here it is float32.
    """

    def __init__(self, parameters: Iterable[Any], lr: float, momentum: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": 0.0, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    buffer = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(gradient))
                    buffer.lerp_(gradient, 1 - group["momentum"])
                    update = orthogonal(gradient.lerp(buffer, group["momentum"]))
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    # 0.2: as large an update as AdamW's (https://arxiv.org/abs/2502.16982).
                    parameter.add_(update, alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest matrix whose directions are all as long: five Newton-Schulz steps of Muon's author."""
    a, b, c = 3.4445, -4.7750, 2.0315  # strengths end between .7 and 1.2
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x
