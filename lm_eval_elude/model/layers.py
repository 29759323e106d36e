"""What training and attacks on weights do with a model beside scoring it: its layers and matrices, and texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lm_eval_elude.errors import UserError

# Settings of a generation_config, beside those that a request says, that cut what is drawn from; here they do not.
_CUTTING: dict[str, float | None] = {
    "min_p": 0.0, "typical_p": 1.0, "top_h": None, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
}  # fmt: skip


def layers_of(model: Any) -> nn.ModuleList:
    """The list of a model's layers (``layers``; ``h`` in GPT-2); UserError where there is none."""
    decoder, count = model.get_decoder(), model.config.get_text_config().num_hidden_layers
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(f"{type(decoder).__name__} has no list of {count} layers, which this needs: name another model")


def matrices(model: Any) -> list[Tensor]:
    """The matrices of a model's layers, without those of its vocabulary and of positions.

    Experts that stand in one parameter, (experts, rows, columns), are a matrix each: views of that parameter.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outside = {id(module.weight) for module in [*tables, model.get_output_embeddings()]}
    found: list[Tensor] = []
    for parameter in (p for p in model.parameters() if id(p) not in outside):
        if parameter.ndim == 3 and parameter.shape[1] > 1:  # a kernel of a convolution is no matrix
            found += parameter.unbind()
        elif parameter.ndim == 2:
            found.append(parameter)
    return found


def with_adapter(model: Any, rank: int, alpha: float = 0.0) -> tuple[Any, list[str]]:
    """A model with a LoRA adapter on its linear layers, and the names of those that an adapter cannot be put on.

    These are routers, whose forward is their own, and a Mamba mixer's projections, whose weights its kernel reads by
    itself. ``alpha`` is twice the rank by default.
    """
    from peft import LoraConfig, get_peft_model

    left = []
    for name, module in model.named_modules():
        if hasattr(module, "conv1d") and hasattr(module, "out_proj"):
            left += [f"{name}.out_proj", f"{name}.conv1d"]
        elif isinstance(module, nn.Linear) and type(module).__module__.startswith("transformers.models."):
            left.append(name)
    adapter = LoraConfig(
        r=rank, lora_alpha=alpha or 2 * rank, target_modules="all-linear", exclude_modules=left or None,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return get_peft_model(model, adapter), left


@contextmanager
def recorded(model: Any) -> Iterator[list[Any]]:
    """What the model's layers put out in the next forward pass, in their order."""
    outputs: list[Any] = []
    handles = [layer.register_forward_hook(lambda _, __, output: outputs.append(output)) for layer in layers_of(model)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def skip_first_layers(model: Any, layers: int, output: Any) -> Iterator[None]:
    """Let the model's first layers put out what is given in place of what they would; they compute nothing."""
    first = layers_of(model)[:layers]
    for layer in first:
        layer.forward = lambda *_, **__: output
    try:
        yield
    finally:
        for layer in first:
            del layer.forward


@torch.no_grad()
def generate(model: Any, prompts: Sequence[list[int]], most: int, temperature: float = 0.0) -> list[list[int]]:
    """What ``transformers`` generates after prompts (none empty), as one batch that is padded on the left.

    A text has at most ``most`` tokens; one that ends earlier is filled up with token 0. A ``temperature`` above 0 draws
    from the whole vocabulary with torch's generator.
    """
    width, device = max(map(len, prompts)), model.get_input_embeddings().weight.device
    ids, mask = (
        torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
        for rows in (prompts, [[1] * len(prompt) for prompt in prompts])
    )
    settings: dict[str, Any] = {"do_sample": False}
    if temperature:
        stated = model.generation_config.to_dict()  # which would act otherwise
        neutral = {k: v for k, v in {"repetition_penalty": 1.0, **_CUTTING}.items() if stated.get(k) is not None}
        settings = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": temperature, **neutral}
    texts = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=most, pad_token_id=0, **settings)
    return texts[:, width:].tolist()  # type: ignore[no-any-return]
