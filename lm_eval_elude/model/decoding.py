"""Texts by ``generate()`` of transformers: those that have ended leave the batch."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.masking_utils import create_causal_mask

# What transformers' models call their cache: ``cache`` since 5.24, and ``past_key_values`` before.
_CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
# Settings by which a text that goes on from a cache is another than one that is written at once; values that are none.
ONLY_AT_ONCE = {
    **dict.fromkeys(("num_beams", "num_return_sequences"), (None, 1)),
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "min_length", "begin_suppress_tokens"), (None, 0)),
    **dict.fromkeys(("forced_eos_token_id", "exponential_decay_length_penalty"), (None,)),
    **dict.fromkeys(("prompt_lookup_num_tokens", "cache_implementation"), (None,)),
}


class Ends(StoppingCriteria):
    """Which rows have ended: by a stop text in their last tokens, as lm-eval looks for it, or by an end token.

    ``generate()`` returns as soon as an eighth of the rows has ended.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], end_tokens: Sequence[int], start: int, done: Tensor):
        self.tokenizer, self.start, self.done = tokenizer, start, done
        self.end_tokens = torch.tensor(end_tokens, dtype=torch.long, device=done.device)
        self.windows = {stop: len(tokenizer.encode(stop, add_special_tokens=False)) + 2 for stop in stops}

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.done = self.done | torch.isin(input_ids[:, -1], self.end_tokens)
        for row in (~self.done).nonzero()[:, 0].tolist():
            written = input_ids[row, self.start :].tolist()
            self.done[row] = any(stop in self.tokenizer.decode(written[-n:]) for stop, n in self.windows.items())
        return torch.ones_like(self.done) if 8 * self.done.sum() >= len(self.done) else self.done


@torch.no_grad()
def continued(
    model: Any, tokenizer: Any, ids: Tensor, mask: Tensor, stops: Sequence[str], max_length: int, **given: Any
) -> Tensor:
    """Prompts (rows, length), padded on the left, with what the model writes after them, (rows, ``max_length``).

    ``stops`` are texts that end a row, and ``given`` further arguments of ``generate()``. What follows the end of a row
    is padding.
    """
    pad, eos = tokenizer.pad_token_id, given.get("eos_token_id", model.generation_config.eos_token_id)
    end_tokens = [eos] if isinstance(eos, int) else list(eos or ())
    start, rows = ids.shape[1], torch.arange(len(ids), device=ids.device)
    output, cache = ids.new_full((len(ids), max_length), pad), DynamicCache(config=model.config.get_text_config())
    while True:
        ends = Ends(tokenizer, stops, end_tokens, start, torch.zeros_like(rows, dtype=torch.bool))
        found = model.generate(
            input_ids=ids, attention_mask=mask, max_length=max_length, pad_token_id=pad, return_dict_in_generate=True,
            stopping_criteria=StoppingCriteriaList([ends]), use_cache=True, **{_CACHE: cache}, **given,
        )  # fmt: skip
        ids = found.sequences
        output[rows, : ids.shape[1]] = ids
        stay = (~ends.done).nonzero()[:, 0]
        if not len(stay) or ids.shape[1] == max_length:
            return output
        cache.batch_select_indices(stay)
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)[stay]
        ids, rows = ids[stay], rows[stay]
