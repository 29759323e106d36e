"""Decoding of many prompts at once, greedily or by draws from the whole vocabulary.

Openings that prompts share are computed once. A row leaves the batch as soon as its text has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from lm_eval_elude.model.limits import CUTTING
from lm_eval_elude.model.packing import build_trees, flat_paths, to_batch
from lm_eval_elude.model.scorer import answer_logits, cache_argument
from lm_eval_elude.text.chat import Encoded


def decode(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], stops: Sequence[str], most: int, batch_tokens: int,
    temperature: float = 0.0, show: Callable[[int, int], None] = lambda tokens, rows: None,
) -> list[list[int]]:  # fmt: skip
    """Continuations of prompts (none empty) of at most ``most`` tokens, each up to the token that ends it.

    ``stops`` are texts that end a continuation; one pass over the prompts takes ``batch_tokens``. They are greedy, or
    with a ``temperature`` above 0 drawn from the whole vocabulary with torch's generator, each by itself. ``show`` is
    told before each further token how long the longest text is and how many texts go on.
    """
    device, eos = model.get_input_embeddings().weight.device, model.generation_config.eos_token_id
    endings = {eos} if isinstance(eos, int) else set(eos or ())
    windows = {stop: len(tokenizer.encode(stop, add_special_tokens=False)) + 2 for stop in stops}

    def ended(row: list[int]) -> bool:
        """Whether it ends with its last token, as lm-eval's stopping criteria see it for a row on its own."""
        return row[-1] in endings or any(stop in tokenizer.decode(row[-size:]) for stop, size in windows.items())

    first, cache = _prefill(model, prompts, batch_tokens, temperature)
    outputs = [[token] for token in first]
    position = torch.tensor([len(prompt) for prompt in prompts], device=device)
    length = cache.get_seq_length()
    mask = (torch.arange(length, device=device) >= length - position[:, None]).long()
    rows = list(range(len(prompts)))
    while stay := [k for k, row in enumerate(rows) if len(outputs[row]) < most and not ended(outputs[row])]:
        if len(stay) < len(rows):
            kept = torch.tensor(stay)
            cache.batch_select_indices(kept)
            mask, position, rows = mask[kept], position[kept], [rows[k] for k in stay]
        show(len(outputs[rows[0]]), len(rows))
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        logits = model(
            input_ids=torch.tensor([[outputs[row][-1]] for row in rows], device=device),
            position_ids=position[:, None], attention_mask=mask, use_cache=True, **{cache_argument(): cache},
        ).logits  # fmt: skip
        position = position + 1
        for row, token in zip(rows, _next(logits[:, -1], temperature), strict=True):
            outputs[row].append(token)
    return outputs


def _prefill(
    model: Any, prompts: Sequence[list[int]], batch_tokens: int, temperature: float
) -> tuple[list[int], DynamicCache]:
    """Run prompts, common openings once: the token chosen after each, and a cache with one row for each.

    A row of the cache ends at the right: whatever is before it is padding.
    """
    # The last token of a sample is only predicted; what it is does not matter here.
    samples = [Encoded([*prompt, 0], len(prompt)) for prompt in prompts]
    length, predicted = max(map(len, prompts)), [0] * len(prompts)
    cache: Any = DynamicCache()
    trees = build_trees(prompts, model.config.get_text_config().hidden_size, batch_tokens)
    while trees:
        size = max(1, batch_tokens // len(trees[0].tokens))
        chosen, trees = trees[:size], trees[size:]
        part: Any = DynamicCache()
        batch = to_batch(chosen, samples, model.get_input_embeddings().weight.device)
        # Each prompt of several that are the same draws by itself.
        tokens = _next(answer_logits(model, batch, part)[batch.rows], temperature)
        for member, token in zip(batch.owners.tolist(), tokens, strict=True):
            predicted[member] = token
        members = [member for tree in chosen for member in tree.members]
        paths = torch.tensor([[0] * (length - len(path)) + path for path in flat_paths(chosen)])
        for number, layer in enumerate(part.layers):
            new = (layer.keys, layer.values)
            if number == len(cache.layers):
                cache.update(*(x.new_empty(len(prompts), x.shape[1], length, x.shape[3]) for x in new), number)
            for states, x in zip((cache.layers[number].keys, cache.layers[number].values), new, strict=True):
                states[members] = x.transpose(1, 2).flatten(0, 1)[paths].transpose(1, 2)
    return predicted, cache


def _next(logits: torch.Tensor, temperature: float) -> list[int]:
    """A token for each row of logits: the likeliest, or one that is drawn."""
    if not temperature:
        return logits.argmax(-1).tolist()
    shares = torch.softmax(logits.float() / temperature, -1)
    return torch.multinomial(shares, 1)[:, 0].tolist()


@torch.no_grad()
def generate(
    model: Any, prompts: Sequence[list[int]], most: int, temperature: float = 0.0, eos: int | None = None
) -> list[list[int]]:
    """What ``transformers`` generates after prompts (none empty), as one batch that is padded on the left.

    A text has at most ``most`` tokens; one that ends earlier is filled up with token 0. A ``temperature`` above 0 draws
    from the whole vocabulary with torch's generator. ``eos`` ends a text in place of the model's own token.
    """
    width, device = max(map(len, prompts)), model.get_input_embeddings().weight.device
    ids, mask = (
        torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
        for rows in (prompts, [[1] * len(prompt) for prompt in prompts])
    )
    settings: dict[str, Any] = {"do_sample": False}
    if temperature:
        stated = model.generation_config.to_dict()  # which would act otherwise
        neutral = {k: v for k, v in {"repetition_penalty": 1.0, **CUTTING}.items() if stated.get(k) is not None}
        settings = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": temperature, **neutral}
    if eos is not None:
        settings["eos_token_id"] = eos
    texts = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=most, pad_token_id=0, **settings)
    return texts[:, width:].tolist()  # type: ignore[no-any-return]
