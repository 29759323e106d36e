"""RepSelect (https://arxiv.org/abs/2606.17168): the forget set's gradient without what it shares with everything else.

The gradient of the MLP's matrices is taken once over the whole forget set, in a model that has been trained on it for
one pass (a low-rank adapter, which is taken off again). Its strongest directions are those that many texts use, so
each of them is divided by its strength, on the side of the inputs and on the side of the outputs. What is left is
followed in every step. The authors stop where the model's answers on other text have moved by .01 nats; here early
stopping does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lm_eval_elude.errors import UserError
from lm_eval_elude.model.packing import collate
from lm_eval_elude.model.scorer import Scorer, answer_sums
from lm_eval_elude.text.chat import Encoded
from optout_train.config import TrainConfig
from optout_train.data import TrainingData
from optout_train.losses import nll

COLLAPSED = 1 / 4  # share of a matrix's directions that are divided: the authors' 512 of 2,048
ADAPTER_RANK, ADAPTER_RATE = 8, 0.1  # of the pass over the forget set before the gradient is taken


def collapsed_gradient(config: TrainConfig, data: TrainingData, model: Any) -> dict[str, Tensor]:
    """By name of each MLP matrix the direction that raises the forget set's likelihood, all together of norm 1."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(config.seed)
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    weights = {f"{name}.weight": module.weight for name, module in linear.items() if ".mlp." in name}
    if not weights:
        raise UserError(
            f"--method {config.method} is for models with linear layers under '.mlp.', and --model has none"
        )
    samples = data.forget.encode_all()
    batches = [samples[start : start + config.batch_size] for start in range(0, len(samples), config.batch_size)]
    modules = [name.removesuffix(".weight") for name in weights]
    adapter = LoraConfig(r=ADAPTER_RANK, lora_alpha=ADAPTER_RANK, target_modules=modules, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, adapter)
    low_rank = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    for gradients in _gradients(adapted, batches, low_rank):
        with torch.no_grad():
            for weight, gradient in zip(low_rank, gradients, strict=True):
                weight -= ADAPTER_RATE * gradient
    for weight in weights.values():
        weight.requires_grad_(True)
    sums = [torch.zeros_like(weight) for weight in weights.values()]
    for samples, gradients in zip(batches, _gradients(adapted, batches, [*weights.values()]), strict=True):
        for total, gradient in zip(sums, gradients, strict=True):
            total -= len(samples) * gradient
    adapted.unload()
    model.requires_grad_(True)
    directions = [collapse(total) for total in sums]
    norm = torch.stack([direction.norm() for direction in directions]).norm()
    return {name: direction / norm for name, direction in zip(weights, directions, strict=True)}


def _gradients(
    model: Any, batches: Sequence[Sequence[Encoded]], parameters: Sequence[Tensor]
) -> Iterator[Sequence[Tensor]]:
    """The gradient of each batch's mean NLL."""
    scorer = Scorer(model)
    for samples in batches:
        batch = collate(samples, parameters[0].device)
        yield torch.autograd.grad(nll(answer_sums(scorer(batch)[:, 0], batch.owners)).mean(), parameters)


def collapse(gradient: Tensor) -> Tensor:
    """A matrix with its strongest directions divided by their strengths, in units of the weakest of them.

    With gradient = sum_k s_k u_k v_k^T that is s_k / (s_k / s_last)^2 in the place of s_k for the first of them:
    what most texts use counts least. Of a gradient that has fewer directions (of a few short answers), all but the
    weakest one are divided: beyond them there is only rounding.
    """
    count = max(1, round(COLLAPSED * min(gradient.shape)))
    left, strengths, right = torch.svd_lowrank(gradient.float(), q=count, niter=8)
    rounding = strengths[0] * max(gradient.shape) * torch.finfo(strengths.dtype).eps
    rank = max(1, int((strengths > rounding).sum()))
    left, strengths, right = left[:, :rank], strengths[:rank], right[:, :rank]
    weaker = strengths * (strengths[-1] / strengths.clamp(min=1e-30)) ** 2
    return gradient - (left * (strengths - weaker) @ right.T).to(gradient.dtype)
