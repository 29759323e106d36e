"""Opt-Out as its released code runs it: a forget step, then a step on the rest of Eq. 8.

Losses are means over a batch's tokens, NPO's too; the forget step is not clipped; norms and biases do not decay.
"""

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lm_eval_elude.errors import UserError
from optout_train.data import EpochSampler
from optout_train.losses import Answers, nll
from optout_train.trainer import UnlearnTrainer


class Twice(EpochSampler):
    """Each batch twice; the last is filled up with records that weigh 0."""

    def __len__(self) -> int:
        return -(-self.size // self.joint) * self.joint * 2

    def __iter__(self) -> Iterator[tuple[int, int, float]]:
        items = [item for item in super().__iter__() if item[2]]
        for first in range(0, len(items), self.joint):
            batch = items[first : first + self.joint]
            batch += [(*batch[0][:2], 0.0)] * (self.joint - len(batch))
            yield from batch + batch


class Method(UnlearnTrainer):
    sampler = Twice

    def __init__(self, model, args, sets, **others) -> None:
        if args.world_size * args.gradient_accumulation_steps > 1:
            raise UserError("opt-out-released takes the mean of a whole batch: one process, no accumulation")
        super().__init__(model, args, sets, **others)
        self.of_rest = args.max_grad_norm, args.transport_weight

    def training_step(self, *arguments, **named) -> Tensor:
        self.forgets = self.state.global_step % 2 == 0
        self.args.max_grad_norm, self.args.transport_weight = (math.inf, 0.0) if self.forgets else self.of_rest
        return super().training_step(*arguments, **named)

    def passes(self, batch: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        return [(name, batch) for name in self.weights if name in batch and (name == "forget") == self.forgets]

    def term(self, model, batch: dict[str, Any], name: str) -> Tensor:
        there = batch["weight"] > 0

        def mean(answers: Answers, rows: Any = there) -> Answers:
            """One value for a batch: the mean over all its tokens."""
            sums, counts = (column[rows].sum() for column in answers)
            return Answers(sums / counts, counts / counts)

        now = mean(self.answers(model, batch[name]))
        if name != "forget":
            return nll(now)
        before = mean(self.reference["answer"], batch["places"]["answer"][there])
        return self.row.value({"answer": now}, {"answer": before}, self.args.eta)

    def get_decay_parameter_names(self, model) -> list[str]:
        return [name for name, parameter in model.named_parameters() if parameter.ndim > 1]
