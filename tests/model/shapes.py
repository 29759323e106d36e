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
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {"attn_implementation": "eager"},
    "mistral": {"sliding_window": 24},
    "gemma2": {"sliding_window": 24, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 24},
}


def make(vocabulary: int, kind: str = "llama", **changes: Any) -> Any:
    """A model of this kind, its weights drawn with seed 0."""
    torch.manual_seed(0)
    options = {**SMALL, **SHAPES.get(kind, {}), "vocab_size": vocabulary, **changes}
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **options)).eval()
