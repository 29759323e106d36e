"""RepSelect (https://arxiv.org/abs/2606.17168): descend along what the forget gradient does not share with other texts.

An epoch is a step. A low-rank adapter on the MLPs learns the forget set in one pass; the gradient of the negated loss
by their matrices is summed over the set with it in place; the adapter is taken off. The gradient's strongest directions
are those that many texts use, so each is divided by its strength on both sides. The authors stop where answers on other
text have moved by .01 nats; here early stopping does.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lm_eval_elude.errors import UserError
from optout_train.losses import nll
from optout_train.trainer import UnlearnTrainer

SHARE = 1 / 4  # of a matrix's directions that are divided: the authors' 512 of 2,048
RANK, RATE = 8, 0.1  # of the adapter, and of its steps


class Method(UnlearnTrainer):
    def __init__(self, model: Any, args: Any, sets: Any, **others: Any) -> None:
        self.mlps = [m for name, m in model.named_modules() if ".mlp." in name and isinstance(m, nn.Linear)]
        if not self.mlps:
            raise UserError("--method repselect changes linear layers under '.mlp.', and this model has none")
        model.requires_grad_(False)
        for module in self.mlps:
            module.weight.requires_grad_(True)
        super().__init__(model, args, sets, **others)
        self.optimizer_cls_and_kwargs = (torch.optim.SGD, {"lr": args.learning_rate})

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        inputs = self._prepare_inputs(inputs)
        size = inputs["forget"]["size"]
        batches = [inputs["forget"] | {"parts": [part]} for part in inputs["forget"]["parts"]]
        weights = [module.weight for module in self.mlps]
        factors = [adapter(weight, self.args.seed) for weight in weights]
        handles = [
            m.register_forward_hook(lambda _, x, y, f=f: y + x[0] @ f[0].T @ f[1].T)
            for m, f in zip(self.mlps, factors, strict=True)
        ]
        low_rank = [factor for pair in factors for factor in pair]
        for batch in batches:
            for factor, gradient in zip(
                low_rank, torch.autograd.grad(self.mean(model, batch)[0], low_rank), strict=True
            ):
                factor.data -= RATE * gradient
        total = torch.zeros((), device=weights[0].device)
        sums = [torch.zeros_like(weight) for weight in weights]
        for batch in batches:
            value, rows = self.mean(model, batch)
            for whole, gradient in zip(sums, torch.autograd.grad(value, weights), strict=True):
                whole -= rows * gradient
            total += rows / size * value.detach()
        for handle in handles:
            handle.remove()
        directions = [collapse(whole) for whole in sums]
        norm = torch.stack([direction.norm() for direction in directions]).norm()
        for weight, direction in zip(weights, directions, strict=True):
            weight.grad = self.weights["forget"] * direction / norm
        self.note("forget", total)
        return total

    def mean(self, model: Any, batch: Any) -> tuple[Tensor, int]:
        """The mean loss of a batch's records, and how many they are."""
        answers = self.answers(model, batch)
        there = answers.counts > 0
        return nll(answers)[there].mean(), int(there.sum())


def adapter(weight: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """The factors down (rank, in) and up (out, rank) of an adapter that changes nothing yet."""
    down = torch.empty(RANK, weight.shape[1])
    nn.init.kaiming_uniform_(down, a=5**0.5, generator=torch.Generator().manual_seed(seed))
    return down.to(weight).requires_grad_(), weight.new_zeros(weight.shape[0], RANK).requires_grad_()


def collapse(gradient: Tensor) -> Tensor:
    """A matrix with its strongest directions divided by their strengths, in units of the weakest of them.

    With gradient = sum_k s_k u_k v_k^T that is s_k / (s_k / s_last)^2 in the place of s_k for the first of them. Of a
    gradient that has fewer directions, all but the weakest are divided: beyond them there is only rounding.
    """
    count = max(1, round(SHARE * min(gradient.shape)))
    left, strengths, right = torch.svd_lowrank(gradient.float(), q=count, niter=8)
    rounding = strengths[0] * max(gradient.shape) * torch.finfo(strengths.dtype).eps
    rank = max(1, int((strengths > rounding).sum()))
    left, strengths, right = left[:, :rank], strengths[:rank], right[:, :rank]
    weaker = strengths * (strengths[-1] / strengths) ** 2
    return gradient - (left * (strengths - weaker) @ right.T).to(gradient.dtype)
