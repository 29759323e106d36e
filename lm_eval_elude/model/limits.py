"""What a model, its checkpoint and the machine allow: span of attention, generation settings, memory."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

# Their attention counts by place in a row, which is not a token's position in a tree.
BY_PLACE = frozenset({"gpt_neo", "openai-gpt"})
# Settings of a generation_config, beside those that a request says, that cut what is drawn from; here they do not.
CUTTING: dict[str, float | None] = {
    "min_p": 0.0, "typical_p": 1.0, "top_h": None, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
}  # fmt: skip
# Settings of a generation_config that leave greedy decoding as it is; any other may only be absent or neutral.
_INERT = frozenset({
    "do_sample", "temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "bos_token_id", "eos_token_id", "pad_token_id", "max_length", "max_new_tokens", "use_cache", "transformers_version",
    "cache_implementation", "cache_config", "return_legacy_cache", "early_stopping", "length_penalty",
    "renormalize_logits", "output_attentions", "output_hidden_states", "output_scores", "output_logits",
    "compile_config", "disable_compile", "_from_model_config",
})  # fmt: skip
_NEUTRAL = {
    "repetition_penalty": 1, "encoder_repetition_penalty": 1, "num_beams": 1, "num_beam_groups": 1, "guidance_scale": 1,
    "num_return_sequences": 1, "min_length": 0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "diversity_penalty": 0,
}  # fmt: skip


def device() -> str:
    """Where a model runs that nobody placed: hf's own default is CUDA, also on a machine without it."""
    return str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"


def acting_settings(generation_config: Any) -> list[str]:
    """The settings of a checkpoint's ``generation_config`` that act on greedy decoding."""
    settings = generation_config.to_dict().items()
    return [k for k, v in settings if k not in _INERT and v not in (None, False, [], {}) and v != _NEUTRAL.get(k)]


def other_decoding(generation_config: Any, base: str) -> tuple[list[str], bool]:
    """Settings that act on greedy decoding, and whether the base model is known to have them otherwise.

    Of a model with the base's own settings, and of one without any, there are none.
    """
    from transformers import AutoConfig, GenerationConfig

    if not (names := acting_settings(generation_config)):
        return [], True
    try:
        of_base = GenerationConfig.from_pretrained(base)
    except OSError:  # it has no such file
        try:
            of_base = GenerationConfig.from_model_config(AutoConfig.from_pretrained(base, trust_remote_code=False))
        except (OSError, ValueError):
            return names, False
    return [name for name in names if getattr(generation_config, name) != getattr(of_base, name, None)], True


def cuts_draws(generation_config: Any) -> bool:
    """Whether a checkpoint's ``generation_config`` does not draw from the whole vocabulary, whatever a request says."""
    return any(getattr(generation_config, name, None) not in (None, neutral) for name, neutral in CUTTING.items())


def attention_span(config: Any) -> int:
    """The longest sequence in which all tokens see each other and positions are rotated in one way."""
    spans = [getattr(config, "attention_chunk_size", None)]
    if getattr(config, "use_sliding_window", True):
        spans.append(getattr(config, "sliding_window", None))
    rope = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    if "longrope" in rope or "dynamic" in rope:
        spans.append(getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings)
    return min((int(span) for span in spans if span), default=1 << 60)


def batch_tokens(config: Any, dtype: torch.dtype, device: torch.device) -> tuple[int, float]:
    """Tokens of a batch that half of the free memory holds, and the weight of a token that is only in the cache.

    From the sizes of hidden states, cache and vocabulary; the weight is at least 1/8.
    """

    def count(name: str, default: int) -> int:
        value = getattr(config, name, None)
        return value if isinstance(value, int) else default

    width, heads = count("hidden_size", 1), count("num_attention_heads", 32)
    element = dtype.itemsize if dtype.is_floating_point else 2
    token = element * (16 * width + 4 * count("intermediate_size", 4 * width) + count("vocab_size", 0))
    # Whether attention scores exist, of rows of about 512.
    if scored := getattr(config, "_attn_implementation", "sdpa") != "sdpa":
        token += 2 * 512 * heads * max(4, element)
    free, most = free_memory(device) // 2, 1024 if device.type == "cpu" else 65536  # more brings no speed
    if scored:  # a tree is one row
        most = min(most, math.isqrt(free // (2 * heads * max(4, element))))
    kept = 2 * count("num_hidden_layers", 32) * count("num_key_value_heads", heads) * count("head_dim", width // heads)
    return max(1, min(most, free // token)), max(0.125, kept * element / token)


def free_memory(device: torch.device) -> int:
    """Bytes that new tensors on a device can take."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    import psutil  # type: ignore[import-untyped]

    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")  # a container's own limit
    with suppress(OSError, ValueError, KeyError):
        # The kernel gives up files that it has read and nobody reads any more, a model's weights among them.
        files = int(dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"])
        used = int((group / "memory.current").read_text()) - files
        free = min(free, int((group / "memory.max").read_text()) - used)
    return max(0, free)
