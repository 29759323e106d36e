"""Small random models of real architectures."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "initializer_range": 0.4, "head_dim": 8,
}  # fmt: skip
# Rows can be shared.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi3": {},
    "phi": {},
    "qwen2": {},
    "qwen3": {"attn_implementation": "eager"},
    "mistral": {"sliding_window": 24},
    "mixtral": {"num_local_experts": 4},
    "gemma2": {"sliding_window": 24, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 24},
    # Widths of heads differ from layer to layer, and reading one for all raises.
    "gemma4_text": {"global_head_dim": 16, "sliding_window": 24, "hidden_size_per_layer_input": 0},
    "gpt2": {},
    "gpt_neox": {},
    "granite": {"logits_scaling": 8.0},
    "olmo2": {},
    "smollm3": {},
    "starcoder2": {},
}
# They cannot: what a token reads depends on what stands before it in the row, or on its place there.
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
STATEFUL: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**LINEAR, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "gpt_neo": {"num_layers": 2, "num_hidden_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4},
}


def make(vocabulary: int, kind: str = "llama", **changes: Any) -> Any:
    """A model of this kind, its weights drawn with seed 0."""
    torch.manual_seed(0)
    options = {**SMALL, **SHAPES.get(kind, {}), **STATEFUL.get(kind, {}), "vocab_size": vocabulary, **changes}
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **options)).eval()
