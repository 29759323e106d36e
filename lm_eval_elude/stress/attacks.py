"""The attacks on a model's weights: each changes a model in place and yields the steps at which it is measured.

Rates of relearning are given times the model's width: 0.1 is 5.2e-4 for the bundled model (width 192) and 2.4e-5 for a
width of 4,096.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lm_eval_elude.text.chat import Encoded

BATCH = 8  # questions of a step of relearning
LORA_FROM = 1_000_000_000  # parameters from which on an adapter is trained in the place of all weights
RANK = 64  # of that adapter
GROUP = 32  # weights of a row that are rounded together


def relearn(model: Any, examples: Sequence[Encoded], rate: float, steps: Sequence[int], seed: int) -> Iterator[int]:
    """Fine-tune on answers: AdamW without decay, constant rate, batches of eight, gradients clipped to norm 1.

    ``rate`` is the learning rate times the width. All weights are trained, or what requires a gradient where there is
    an adapter. Yields each of ``steps`` when so many have been taken.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate / model.config.get_text_config().hidden_size, weight_decay=0.0)
    order, draw = [], random.Random(seed)
    torch.manual_seed(seed)
    for step in range(1, max(steps) + 1):
        while len(order) < BATCH:
            order += draw.sample(range(len(examples)), len(examples))
        chosen, order = order[:BATCH], order[BATCH:]
        model.train()
        answer_loss(model, [examples[i] for i in chosen]).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step in steps:
            model.eval()
            yield step


def answer_loss(model: Any, examples: Sequence[Encoded]) -> Tensor:
    """Mean negative log-likelihood (nats) over the answer tokens of a batch, padded on the right."""
    longest = max(len(example.ids) for example in examples)
    ids = torch.tensor([example.ids + [0] * (longest - len(example.ids)) for example in examples])
    places = torch.arange(longest)
    starts, ends = (torch.tensor([[n] for n in column]) for column in
                    ([e.answer_start for e in examples], [len(e.ids) for e in examples]))  # fmt: skip
    labels = ids.masked_fill((places < starts) | (places >= ends), -100)
    device = model.get_input_embeddings().weight.device
    loss: Tensor = model(
        input_ids=ids.to(device), attention_mask=(places < ends).long().to(device), labels=labels.to(device)
    ).loss
    return loss


def with_adapter(model: Any, whole: bool) -> Any:
    """The model with a LoRA adapter to train where it has a billion parameters or more, unless ``whole``."""
    if whole or sum(parameter.numel() for parameter in model.parameters()) < LORA_FROM:
        model.requires_grad_(True)
        return model
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, settings)


def matrices(model: nn.Module) -> list[nn.Linear]:
    """The linear layers without the head: what quantisers and pruning change."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]


@torch.no_grad()
def round_weights(model: Any, bits: int) -> Iterator[int]:
    """Round every matrix to that many bits, symmetric, with a scale for each 32 weights of a row."""
    levels = 2 ** (bits - 1) - 1
    for module in matrices(model):
        weight = module.weight
        rows = nn.functional.pad(weight.float(), (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
        scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-12) / levels
        weight.copy_(((rows / scale).round() * scale).flatten(1)[:, : weight.shape[1]])
    yield 0


@torch.no_grad()
def prune(model: Any, share: float) -> Iterator[int]:
    """Set the smallest weights of every matrix to 0 (``torch.nn.utils.prune``, by magnitude)."""
    from torch.nn.utils import prune as pruning

    for module in matrices(model):
        pruning.l1_unstructured(module, "weight", amount=share)
        pruning.remove(module, "weight")
    yield 0
