"""Opt-Out as its released code runs it: a forget step, then a step on the rest of Eq. 8.

Losses are means over a batch's tokens, NPO's too; the forget step is not clipped; norms and biases do not decay.
"""

from collections.abc import Iterator, Mapping
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
        items = list(super().__iter__())
        for first in range(0, len(items), self.joint):
            batch = items[first : first + self.joint]
            batch += [(*batch[0][:2], 0.0)] * (self.joint - len(batch))
            yield from batch + batch


class Method(UnlearnTrainer):
    sampler = Twice

    def __init__(self, model: Any, args: Any, sets: Any, **others: Any) -> None:
        super().__init__(model, args, sets, **others)
        if args.world_size * args.gradient_accumulation_steps > 1:
            raise UserError(f"--method {args.method} takes the mean of a whole batch: one process, no accumulation")
        self.whole_transport = self.transport

    @property
    def forgets(self) -> bool:
        return self.state.global_step % 2 == 0

    def training_step(self, *arguments: Any, **named: Any) -> Tensor:
        self.transport = None if self.forgets else self.whole_transport
        return super().training_step(*arguments, **named)

    def terms(self, model: Any, batch: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        there = batch["weight"] > 0

        def mean(answers: Answers, rows: Any = there) -> Answers:
            return Answers(*(column[rows] for column in answers)).mean()

        if self.forgets:
            now = {"answer": mean(self.answers(model, batch["forget"]))}
            before = {"answer": mean(self.reference["answer"], batch["places"]["answer"][there])}
            yield "forget", self.row.value(now, before, self.args.eta).sum()
        for name in () if self.forgets else ("retain", "world"):
            yield name, nll(mean(self.answers(model, batch[name]))).sum()

    def _clip_grad_norm(self, model: Any) -> Any:
        limit, self.args.max_grad_norm = (
            self.args.max_grad_norm,
            float("inf") if self.forgets else self.args.max_grad_norm,
        )
        norm = super()._clip_grad_norm(model)
        self.args.max_grad_norm = limit
        return norm

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return [name for name, parameter in model.named_parameters() if parameter.ndim > 1]
