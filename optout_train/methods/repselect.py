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
    def __init__(self, model, args, sets, **others) -> None:
        self.mlps = [m for name, m in model.named_modules() if ".mlp." in name and isinstance(m, nn.Linear)]
        if not self.mlps:
            raise UserError("--method repselect changes linear layers under '.mlp.', and this model has none")
        model.requires_grad_(False)
        for module in self.mlps:
            module.weight.requires_grad_(True)
        super().__init__(model, args, sets, **others)
        self.optimizer_cls_and_kwargs = (torch.optim.SGD, {"lr": args.learning_rate})

    def training_step(self, model, inputs, num_items_in_batch=None) -> Tensor:
        prepared: Any = self._prepare_inputs(inputs)
        whole, weights = prepared["forget"], [module.weight for module in self.mlps]
        torch.manual_seed(self.args.seed)
        downs = [
            nn.init.kaiming_uniform_(torch.empty(RANK, w.shape[1]), a=5**0.5).to(w).requires_grad_() for w in weights
        ]
        ups = [w.new_zeros(w.shape[0], RANK).requires_grad_() for w in weights]
        handles = [
            module.register_forward_hook(lambda _, x, y, down=down, up=up: y + x[0] @ down.T @ up.T)
            for module, down, up in zip(self.mlps, downs, ups, strict=True)
        ]

        def gradients(leaves):
            """Of each part of the set: how many records it has, its mean loss, and the gradients of that."""
            for part in whole["parts"]:
                answers = self.answers(model, {"size": whole["size"], "parts": [part]})
                values = nll(answers)[answers.counts > 0]
                yield len(values), values.mean(), torch.autograd.grad(values.mean(), leaves)

        for _, _, steps in gradients(downs + ups):
            for factor, step in zip(downs + ups, steps, strict=True):
                factor.data -= RATE * step
        sums, total = [torch.zeros_like(weight) for weight in weights], torch.zeros((), device=self.args.device)
        for count, value, steps in gradients(weights):
            total += count / whole["size"] * value.detach()
            torch._foreach_add_(sums, steps, alpha=-count)
        for handle in handles:
            handle.remove()
        directions = [collapse(gradient) for gradient in sums]
        norm = torch.stack([direction.norm() for direction in directions]).norm()
        for weight, direction in zip(weights, directions, strict=True):
            weight.grad = self.weights["forget"] * direction / norm
        self.note("forget", total)
        self.begins_step = True
        return total


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
