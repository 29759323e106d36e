"""The adversary of ``--relearn``: the weights as they are where one half of the facts has just been learnt again.

A few steps of fine-tuning on some facts bring the others back, because one change hides them all. So one half of the
forget records is learnt again while the model trains, in steps of AdamW as who attacks it takes them. The gradient of
the forget loss on the other half is also taken there, and moves the model's own weights (first order). After
:data:`ROUND` steps all begins anew, with other halves and another rate.

Sources: tamper-resistant training is Tamirisa et al. 2024 (https://arxiv.org/abs/2408.00761), the halves are Deeb and
Roger 2024 (https://arxiv.org/abs/2410.08827).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from optout_train.weights import moments, put_moments

ROUND = 20  # steps
RATES = (0.03, 0.1, 0.2)  # peaks of AdamW times the model's width, as of the attacks of ``elude stress``
BATCH = 8  # records that a step learns again
OFFSET = "offset"


class Halves(NamedTuple):
    """What is learnt again in a step, and what is forgotten there: places of forget records."""

    learnt: list[int]
    forgotten: list[int]


class Relearned:
    """How far the trained parameters of a model lie from where one half of the facts is known again.

    What trains is read from the model's parameters; ``width`` is that of its hidden states; ``records`` is the number
    of forget records, at least two; ``seed`` is of the halves, the rates and the order.
    """

    def __init__(self, model: nn.Module, width: int, records: int, seed: int) -> None:
        self.width, self.records, self.seed = width, records, seed
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # Steps as small as these would be lost in 16 bits.
        zeros = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in self.trained.items()}
        self.offsets = {name: nn.Parameter(zero) for name, zero in zeros.items()}
        fused = True if next(iter(zeros.values())).is_cuda else None  # another form has a copy of all in each step
        self.optimizer = torch.optim.AdamW(self.offsets.values(), weight_decay=0.0, fused=fused)

    def begin(self, step: int, batch_size: int) -> Halves:
        """Of a step, counted from 1, what is learnt again and what is forgotten; the first of a round begins anew."""
        number, place = divmod(step - 1, ROUND)
        of_round, of_step = (random.Random(f"{self.seed}-relearned-{key}") for key in (number, f"step-{step}"))
        order = of_round.sample(range(self.records), self.records)
        halves = order[: self.records // 2], order[self.records // 2 :]
        for group in self.optimizer.param_groups:
            group["lr"] = of_round.choice(RATES) / self.width
        if place == 0:
            self.optimizer.state.clear()
            with torch.no_grad():
                for offset in self.offsets.values():
                    offset.zero_()
        learnt, forgotten = (
            of_step.sample(half, min(size, len(half))) for half, size in zip(halves, (BATCH, batch_size), strict=True)
        )
        return Halves(learnt, forgotten)

    @contextmanager
    def in_place(self) -> Iterator[dict[str, Tensor]]:
        """Put these weights into the model for the block; yields the original ones, which are restored after it."""
        before = {name: p.detach().clone() for name, p in self.trained.items()}
        self._set(before)
        yield before
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(before[name])

    def learn(self, before: Mapping[str, Tensor]) -> None:
        """Take the step of the gradient that the model holds, within :meth:`in_place`; the gradient is gone then."""
        torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        for name, parameter in self.trained.items():
            if parameter.grad is not None:
                self.offsets[name].grad, parameter.grad = parameter.grad.float(), None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._set(before)

    @torch.no_grad()
    def _set(self, before: Mapping[str, Tensor]) -> None:
        for name, parameter in self.trained.items():
            parameter.copy_(before[name] + self.offsets[name])

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, as ``parameter/entry``."""
        kept = {f"{name}/{OFFSET}": offset.detach() for name, offset in self.offsets.items()}
        return kept | moments(self.offsets, self.optimizer)

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`tensors` gave."""
        for name, offset in self.offsets.items():
            offset.copy_(tensors[f"{name}/{OFFSET}"])
        others = {entry: tensor for entry, tensor in tensors.items() if not entry.endswith(f"/{OFFSET}")}
        put_moments(self.offsets, self.optimizer, others)
