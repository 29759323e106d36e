"""``lm_eval --model elude``: stock ``hf`` (every argument, every task), with the work that requests share done once.

Log-likelihoods. Requests are sorted by their tokens and written into trees: an opening that several share (a question,
the head of a chat template, the start of two answers) is one run of nodes. A tree is one row of a batch; a token's
position is its depth and it sees its ancestors only, so each branch reads as if it stood alone. The vocabulary is
computed where an answer token is predicted and nowhere else.

Generation. Plain greedy decoding fills its cache from trees too and drops a row as soon as it has ended. What the
log-likelihoods showed of a prompt's greedy continuation is its draft: fed with the prompt, and kept as far as the model
confirms it. A text is the one that stock ``hf`` gives with batch size 1. (In larger batches stock lets a row run on
after its stop text until all rows have theirs, which shows where that text is a special token.)

At load both are compared with the plain way on this very model (``checked.py``: once for a model and these versions);
what differs goes the stock way, with a line that says so. So do requests beyond a sliding window, sampling, and
checkpoints whose generation settings act on greedy decoding.
"""

from __future__ import annotations

import logging
import os
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils.memory import should_reduce_batch_size
from lm_eval.api.instance import Instance
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.models.utils_hf import clear_torch_cache
from tqdm import tqdm
from transformers import DynamicCache

from lm_eval_elude.backend import checked, limits
from lm_eval_elude.backend.packing import TokenScores, Tree, lay_out, places, plant, read

log = logging.getLogger("lm_eval.elude")
T = TypeVar("T")
R = TypeVar("R")
Encoded = tuple[list[int], list[int]]  # token ids of a context and of its continuation


class Rank(int):
    """A rank that also says what its model serves: of the model, the harness hands a task the rank and nothing else."""

    serves = ("token_logprobs",)


class EludeLM(HFLM):
    """Stock ``HFLM`` that runs shared work once (see the module's text).

    Args:
        pretrained: as for ``hf``.
        batch_tokens: tokens of one batch, padding included; by default what the memory allows. ``batch_size`` holds for
            what goes the stock way.
        kwargs: every argument of ``hf``.

    Raises:
        ValueError: ``batch_tokens`` is not a positive whole number.
    """

    softmax_dtype: torch.dtype | None

    def __init__(self, pretrained: Any, batch_tokens: int | str | None = None, **kwargs: Any) -> None:
        if batch_tokens is not None and (not str(batch_tokens).isdigit() or int(batch_tokens) < 1):
            raise ValueError(f"batch_tokens={batch_tokens!r} in --model_args must be a positive whole number")
        # Stock hf divides the requests among GPUs only; on CPU each rank would score everything. Accelerate counts the
        # ranks of a CPU only if told that it is one, before anything else asks for its state (then this does nothing).
        accelerated = torch.accelerator.is_available()
        on_cpu = not accelerated or str(kwargs.get("device")).startswith("cpu")
        several = isinstance(pretrained, str) and int(os.environ.get("WORLD_SIZE", 1)) > 1
        if on_cpu and several:
            PartialState(cpu=True, timeout=timedelta(weeks=52))
        # hf's own default is "cuda", which the Python API does not replace on a machine without it.
        kwargs.setdefault("device", str(torch.accelerator.current_accelerator()) if accelerated else "cpu")
        super().__init__(pretrained, **kwargs)
        self._arguments = kwargs
        if self.softmax_dtype is None and (self.mixed_precision_dtype or self.model.dtype).itemsize < 4:
            self.softmax_dtype = torch.float32  # what goes the stock way would be summed in 16 bits
        accelerator = getattr(self, "accelerator", None)
        if self.world_size == 1 and accelerator is not None and not kwargs.get("parallelize"):
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes
        config = self.config.get_text_config()
        self._width = int(getattr(config, "hidden_size", 0) or 0)
        self._span = min(self.max_length, limits.attention_span(config))
        self._drafts: dict[bytes, list[int]] = {}
        self._packs = self._decodes = False
        if self.backend == "causal" and self._width:
            fitting, self._cache_weight = limits.batch_tokens(config, self.model.dtype, self.device)
            self.batch_tokens = int(batch_tokens) if batch_tokens else fitting
            log.info("ELUDe: up to %d tokens a batch", self.batch_tokens)
            passed = checked.record(self.model, kwargs) if isinstance(pretrained, str) else None
            known = passed is not None and passed.exists()
            self._packs = known or self._agrees("log-likelihoods and generation", self._check_scores)
            self._decodes = known or (self._packs and self._agrees("generation", self._check_generation))
            if passed and self._decodes:
                checked.remember(passed)
            self._rank = Rank(self._rank)

    # ---- log-likelihoods
    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        if getattr(self, "enable_thinking", False) or not self._packs:  # no attribute of lm-eval 0.5
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        pairs = [request.args[:2] for request in requests]
        new = [(pair, *ids) for pair, ids in zip(pairs, self._encode(pairs), strict=True)]
        return self._loglikelihood_tokens(new, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, override_bs: Any = None
    ) -> list[tuple[float, bool]]:
        if not self._packs:
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        results: list[Any] = [None] * len(requests)
        fast = [
            i for i, (_, context, answer) in enumerate(requests)
            if context and answer and len(context) + len(answer) - 1 <= self._span
        ]  # fmt: skip
        scores = self._score([requests[i][1:] for i in fast], disable_tqdm=disable_tqdm)
        for i, score in zip(fast, scores, strict=True):
            results[i] = (sum(score.log_probs), all(score.greedy))
            if requests[i][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[i][0], results[i])
        rest = [i for i, result in enumerate(results) if result is None]
        stock = super()._loglikelihood_tokens([requests[i] for i in rest], disable_tqdm, override_bs) if rest else []
        return _filled(results, rest, stock)

    def token_logprobs(self, requests: list[Instance], disable_tqdm: bool = False) -> list[TokenScores]:
        """Log-probabilities of each token of a continuation, with their expected value and spread.

        A request type of ELUDe's own; :class:`Rank` announces it. Texts are split as ``loglikelihood`` splits them.

        Args:
            requests: with arguments (context, continuation), or (context, continuation, model): a model folder or Hub
                id that scores the same text instead. It is loaded as this one was, and let go afterwards.
            disable_tqdm: no progress bar.
        """
        results: list[Any] = [None] * len(requests)
        groups: dict[str | None, list[int]] = {}
        for i, (_, _, *name) in enumerate(request.args for request in requests):
            groups.setdefault(name[0] if name else None, []).append(i)
        for name, chosen in groups.items():
            model = self if name is None else self._other(name)
            encoded = model._encode([requests[i].args[:2] for i in chosen])
            if bad := [i for i, (_, ids) in zip(chosen, encoded, strict=True) if not 0 < len(ids) <= model.max_length]:
                raise ValueError(
                    f"token_logprobs: no tokens, or more than the model takes, in {requests[bad[0]].args[1]!r}"
                )
            _filled(results, chosen, model._score(encoded, True, disable_tqdm))
        return results

    def _other(self, name: str) -> EludeLM:
        """Another model with this one's arguments, less those that say which model this one is."""
        own = ("peft", "delta", "revision", "subfolder", "tokenizer", "gguf_file")
        log.info("ELUDe: loading the reference model %s", name)
        return type(self)(name, **{key: value for key, value in self._arguments.items() if key not in own})

    def _encode(self, pairs: Sequence[tuple[str, str]]) -> list[Encoded]:
        """Token ids of contexts and continuations, split as ``TemplateLM.loglikelihood`` splits them."""
        spaced = [(c.rstrip(), c[len(c.rstrip()) :] + a) for c, a in pairs]
        contexts = list(dict.fromkeys(c for c, _ in spaced if c))
        known = dict(zip(contexts, self._tokenize(contexts), strict=True))
        wholes = iter(self._tokenize([c + a for c, a in spaced if c]))
        encoded = []
        for context, answer in spaced:
            if context:
                encoded.append((known[context], next(wholes)[len(known[context]) :]))
            else:
                ids, prefix = self.tok_encode(answer, add_special_tokens=False), self.prefix_token_id
                encoded.append((ids[:1], ids[1:]) if ids[:1] == [prefix] else ([prefix], ids))
        return encoded

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        """``tok_encode`` for many texts; at once where they are all encoded by the same rule."""
        start = self.tokenizer.decode(self.prefix_token_id)
        rules = {has_bos_prefix(text, start) for text in texts}
        if self.add_bos_token is None and len(rules) == 1:
            return self.tokenizer(texts, add_special_tokens=rules == {False})["input_ids"]
        return [self.tok_encode(text) for text in texts]

    def _score(self, pairs: Sequence[Encoded], moments: bool = False, disable_tqdm: bool = True) -> list[TokenScores]:
        """Token scores of continuations; cut on the left, with a line, where they exceed the model's length."""
        whole = [(context + answer)[-(self.max_length + 1) :] for context, answer in pairs]
        longest = max((len(context) + len(answer) for context, answer in pairs), default=0)
        if longest > self.max_length + 1:
            log.warning("ELUDe: up to %d tokens, the model takes %d: cut on the left", longest, self.max_length)
        packs = self._packs and longest - 1 <= self._span
        trees = plant([ids[:-1] for ids in whole], self._width if packs else 0, self.batch_tokens)
        results: list[Any] = [None] * len(pairs)

        def run(batch: list[Tree]) -> list[TokenScores]:
            chosen = [pairs[member] for tree in batch for member in tree.members]
            answers = [answer for _, answer in chosen]
            logits, rows = self._forward(batch, [len(answer) for answer in answers], packs)
            scores, best = read(logits, rows, answers, moments)
            if packs and not moments:
                self._remember(chosen, rows, best)
            return scores

        with self._bar(len(pairs), "token_logprobs" if moments else "loglikelihood", disable_tqdm) as bar:
            for batch, scores in self._batched(trees, lambda tree: len(tree.tokens), run):
                _filled(results, [member for tree in batch for member in tree.members], scores)
                bar.update(len(scores))
        return results

    def _forward(
        self, trees: Sequence[Tree], counts: Sequence[int], packs: bool = True, cache: Any = None
    ) -> tuple[torch.Tensor, list[list[int]]]:
        """One forward pass over trees, with the vocabulary at so many last tokens of each of their sequences only.

        Returns:
            Logits (n, vocabulary), and of each sequence the rows of these tokens.
        """
        asked = [path[-count:] for path, count in zip(places(trees), counts, strict=True)]
        row_of = {place: row for row, place in enumerate(sorted({place for path in asked for place in path}))}
        rows, needed = [[row_of[place] for place in path] for path in asked], torch.tensor(list(row_of))
        layout = lay_out(trees, self.device)
        if not packs:  # single branches, as stock hf runs them
            return self._model_call(layout.tokens).flatten(0, 1)[needed], rows

        def select(_: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            return (arguments[0].flatten(0, 1)[needed].unsqueeze(0), *arguments[1:])

        # The head is given these hidden states only; what the model does to logits (caps, scales) it still does itself.
        handle = self.model.get_output_embeddings().register_forward_pre_hook(select)
        try:
            logits = self._call(
                input_ids=layout.tokens, position_ids=layout.depths, attention_mask=self._mask(layout.sees),
                past_key_values=cache, use_cache=cache is not None,
            )  # fmt: skip
        finally:
            handle.remove()
        return logits[0], rows

    def _mask(self, sees: torch.Tensor) -> torch.Tensor:
        """(batch, query, key) visibility as the model's attention takes it: bool for SDPA, else added to the scores."""
        sees = sees.unsqueeze(1)
        if self.model.config.get_text_config()._attn_implementation == "sdpa":
            return sees
        lowest = torch.finfo(self.model.dtype).min
        return torch.zeros(sees.shape, dtype=self.model.dtype, device=sees.device).masked_fill(~sees, lowest)

    def _call(self, **inputs: Any) -> torch.Tensor:
        """Logits, as stock hf's ``_model_call`` gives them, for any input."""
        kind = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, dtype=kind, enabled=kind is not None):
            return self.model(**inputs).logits

    def _remember(self, pairs: Sequence[Encoded], rows: Sequence[list[int]], best: Sequence[int]) -> None:
        """Keep what a batch shows of the greedy continuations of contexts, by their token ids.

        Args:
            pairs, rows: contexts and continuations, and the rows of logits that predict each continuation's tokens.
            best: the likeliest token of each row.
        """
        follows = {
            (row, token): after
            for (_, answer), own in zip(pairs, rows, strict=True)
            for row, token, after in zip(own, answer, own[1:], strict=False)  # nothing is known after the last
        }
        seen: set[int] = set()
        for (context, answer), own in zip(pairs, rows, strict=True):
            # A prompt may go on for a token or two of white space that is scored as part of the continuation.
            for i, row in enumerate(own[:3]):
                if row not in seen:
                    seen.add(row)
                    draft, at = [best[row]], follows.get((row, best[row]))
                    while at is not None:
                        draft.append(best[at])
                        at = follows.get((at, best[at]))
                    self._drafts[_key(context + answer[:i])] = draft

    # ---- generation
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        results: list[Any] = [None] * len(requests)
        work: dict[tuple[int, tuple[str, ...]], dict[str, list[int]]] = {}  # -> numbers of the requests, by context
        for i, (context, given) in enumerate(request.args for request in requests):
            kwargs: dict[str, Any] = dict(normalize_gen_kwargs(given, self.max_gen_toks))
            until = handle_stop_sequences(kwargs.pop("until", None), eos=self.tok_decode([self.eot_token_id], False))
            most = int(kwargs.pop("max_gen_toks"))
            sampled = kwargs.pop("do_sample") or kwargs.pop("temperature", 0) or kwargs
            if self._decodes and not sampled and 0 < most < self.max_length and not self.think_end_token:
                work.setdefault((most, tuple(until)), {}).setdefault(context, []).append(i)
        total = sum(len(own) for contexts in work.values() for own in contexts.values())
        with self._bar(total, "generate_until", disable_tqdm) as bar:
            for (most, stops), contexts in work.items():
                for context, text in self._texts(list(contexts), stops, most, bar):
                    for i in contexts[context]:
                        results[i] = text
                        self.cache_hook.add_partial("generate_until", requests[i].args, text)
                    bar.update(len(contexts[context]))
        self._drafts.clear()
        rest = [i for i, result in enumerate(results) if result is None]
        return _filled(results, rest, super().generate_until([requests[i] for i in rest], disable_tqdm) if rest else [])

    def _texts(self, contexts: Sequence[str], stops: Sequence[str], most: int, bar: Any) -> Iterator[tuple[str, str]]:
        """Greedy texts of contexts, the longest context first; those beyond the model's window are left out."""

        def show(tokens: int, rows: int) -> None:
            bar.set_postfix_str(f"token {tokens} of at most {most}, {rows} texts under way", refresh=tokens % 8 == 0)

        room = {"left_truncate_len": self.max_length - most, "truncation": self.truncation}
        prompts = [(c, self.tok_batch_encode([c], **room)[0][0].tolist()) for c in contexts]
        short = sorted((p for p in prompts if p[1] and len(p[1]) + most <= self._span), key=lambda p: -len(p[1]))
        for batch, outputs in self._batched(
            short,
            lambda prompt: int((len(prompt[1]) + most) * self._cache_weight) + 1,
            lambda batch: self._greedy([ids for _, ids in batch], stops, most, show),
        ):
            for (context, _), ids in zip(batch, outputs, strict=True):
                yield context, postprocess_generated_text(self.tok_decode(ids), list(stops), None)

    def _greedy(
        self, prompts: Sequence[list[int]], stops: Sequence[str], most: int,
        show: Callable[[int, int], None] = lambda tokens, rows: None,
    ) -> list[list[int]]:  # fmt: skip
        """Greedy continuations of prompts, each up to the token that ends it.

        Args:
            prompts: token ids, none empty.
            stops: texts that end a continuation.
            most: largest number of new tokens.
            show: told before each further token how many the longest text has, and how many texts go on.
        """
        ending = _Ending(self.tokenizer, stops, self.model.generation_config.eos_token_id)
        drafts = [self._drafts.get(_key(prompt), [])[: most - 1] for prompt in prompts]
        told, cache = self._prefill(prompts, drafts)
        length, masks, outputs = cache.get_seq_length(), [], []
        for prompt, draft, best in zip(prompts, drafts, told, strict=True):
            right = next((i for i, token in enumerate(draft) if best[i] != token), len(draft))
            own = [1] * (len(prompt) + right) + [0] * (len(draft) - right)  # less what the model does not confirm
            masks.append([0] * (length - len(own)) + own)
            new = best[: right + 1]
            outputs.append(new[: next((i for i in range(1, len(new)) if ending.reached([new[:i]])[0]), len(new))])
        mask = torch.tensor(masks, device=self.device)
        place, rows = mask.sum(1), list(range(len(prompts)))
        while True:
            ended = ending.reached([outputs[row] for row in rows])
            stay = [k for k, row in enumerate(rows) if not ended[k] and len(outputs[row]) < most]
            if not stay:
                return outputs
            if len(stay) < len(rows):
                kept = torch.tensor(stay)
                cache.batch_select_indices(kept)
                mask, place, rows = mask[kept], place[kept], [rows[k] for k in stay]
            show(max(len(outputs[row]) for row in rows), len(rows))
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            fed = torch.tensor([[outputs[row][-1]] for row in rows], device=self.device)
            logits = self._call(
                input_ids=fed, position_ids=place[:, None], attention_mask=mask, past_key_values=cache, use_cache=True
            )
            place = place + 1
            for row, token in zip(rows, logits[:, -1].argmax(-1).tolist(), strict=True):
                outputs[row].append(token)

    def _prefill(
        self, prompts: Sequence[list[int]], drafts: Sequence[list[int]]
    ) -> tuple[list[list[int]], DynamicCache]:
        """Run prompts, each followed by its draft, with common openings run once.

        Returns:
            By prompt, the likeliest tokens after it and after each token of its draft; and a cache with one row for
            each prompt, which ends at the right: whatever is before it is padding.
        """
        whole = [prompt + draft for prompt, draft in zip(prompts, drafts, strict=True)]
        length = max(map(len, whole))
        told: list[list[int]] = [[] for _ in prompts]
        cache: Any = DynamicCache()
        trees = plant(whole, self._width, self.batch_tokens)
        while trees:
            size = max(1, self.batch_tokens // len(trees[0].tokens))
            batch, trees = trees[:size], trees[size:]
            members = [member for tree in batch for member in tree.members]
            part: Any = DynamicCache()
            logits, rows = self._forward(batch, [len(drafts[member]) + 1 for member in members], cache=part)
            best = logits.argmax(-1).tolist()
            _filled(told, members, [[best[row] for row in own] for own in rows])
            paths = torch.tensor([[0] * (length - len(path)) + path for path in places(batch)])
            for number, layer in enumerate(part.layers):
                new = (layer.keys, layer.values)
                if number == len(cache.layers):
                    cache.update(*(x.new_empty(len(prompts), x.shape[1], length, x.shape[3]) for x in new), number)
                for states, x in zip((cache.layers[number].keys, cache.layers[number].values), new, strict=True):
                    states[members] = x.transpose(1, 2).flatten(0, 1)[paths].transpose(1, 2)
        return told, cache

    # ---- memory
    def _batched(
        self, items: Sequence[T], size: Callable[[T], int], run: Callable[[list[T]], R]
    ) -> Iterator[tuple[list[T], R]]:
        """Run items, the longest first, in batches of ``batch_tokens``; out of memory halves that, with a line."""
        at = 0
        while at < len(items):
            rows = max(1, min(self.batch_tokens // size(items[at]), len(items) - at))
            batch = list(items[at : at + rows])
            try:
                output = run(batch)
            except Exception as error:
                if rows == 1 or not should_reduce_batch_size(error):
                    raise
                self.batch_tokens = max(1, min(self.batch_tokens, rows * size(items[at])) // 2)
                log.warning("ELUDe: out of memory with %d rows; now %d tokens a batch", rows, self.batch_tokens)
            else:
                yield batch, output
                at += rows
                continue
            clear_torch_cache()  # outside of the handler, whose error holds on to the batch

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        """As stock, but not by trial on a CPU, where a batch that is too large is killed rather than refused."""
        if self.device.type != "cpu" or not self._packs:
            return super()._detect_batch_size(requests, pos)
        longest = len(requests[pos][1]) + len(requests[pos][2]) if requests else self.max_length
        return max(1, min(self.max_batch_size or 64, self.batch_tokens // min(longest, self.max_length)))

    def _bar(self, total: int, kind: str, disable: bool) -> Any:
        off = disable or self.rank != 0 or not total or None  # None: where there is no terminal
        return tqdm(total=total, disable=off, desc=f"Running {kind} requests")

    # ---- the check at load
    def _agrees(self, what: str, check: Callable[[], str]) -> bool:
        try:
            problem = check()
        except Exception as error:  # whatever an architecture makes of the probe, the stock way is still open
            problem = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if problem:
            log.warning("ELUDe: %s of this model go the stock way: %s", what, problem)
        self._drafts.clear()
        return not problem

    def _probe(self) -> list[Encoded]:
        """Two contexts of different length with answers that share openings, of ordinary tokens: a few, and short."""
        size = min(len(self.tokenizer), self.model.get_input_embeddings().num_embeddings)
        special = set(self.tokenizer.all_special_ids)
        ordinary = [token for token in range(size) if token not in special] or list(range(size))
        draw = random.Random(0)
        words = [draw.choices(ordinary, k=max(1, min(3, self._span // 5))) for _ in range(7)]
        answers = (words[3] + words[4], words[3] + words[5], words[6])
        return [(context, answer) for context in (words[0] + words[1], words[2]) for answer in answers]

    def _check_scores(self) -> str:
        probe = self._probe()
        self._packs = True
        packed = self._score(probe)
        self._packs = False
        plain = self._score(probe)
        ours, stock = (torch.tensor([v for s in scores for v in s.log_probs]) for scores in (packed, plain))
        error, kind = (ours - stock).abs(), self.mixed_precision_dtype or self.model.dtype
        if kind in (torch.bfloat16, torch.float16):  # the probe's single tokens are as noisy as any batch's
            off, allowed = error.mean(), 2 * torch.finfo(kind).eps * stock.abs().mean()
        else:
            off, allowed = error.max(), torch.tensor(1e-4)
        return "" if off <= allowed else f"log-probabilities differ by {off:.2g} between packed and plain rows"

    def _check_generation(self) -> str:
        if acting := limits.acting_settings(self.model.generation_config):
            return f"its generation_config sets {', '.join(acting)}"
        prompts = [context + answer for context, answer in self._probe()[1:4:2]]
        wanted = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device=self.device)
            whole = self._model_generate(ids, len(prompt) + 4, [], attention_mask=torch.ones_like(ids), do_sample=False)
            wanted.append(whole[0, len(prompt) :].tolist())
        # One prompt has a draft, of which two tokens are right and the third is not; the other has none.
        self._drafts = {_key(prompts[0]): [*wanted[0][:2], int(wanted[0][2:3] == [0]), 0]}
        same = self._greedy(prompts, (), 4) == wanted
        return "" if same else "the probe's tokens differ from those of generate()"


class _Ending:
    """When a continuation ends, as ``generate`` with lm-eval's stopping criteria sees it for a row on its own."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], eos: int | list[int] | None) -> None:
        self._tokenizer = tokenizer
        self._eos = {eos} if isinstance(eos, int) else set(eos or ())
        self._windows: dict[int, list[str]] = {}  # stop texts by the number of last tokens that are searched for them
        for stop in stops:
            self._windows.setdefault(len(tokenizer.encode(stop, add_special_tokens=False)) + 2, []).append(stop)

    def reached(self, rows: Sequence[list[int]]) -> list[bool]:
        """Whether each row, which had not ended a token earlier, ends with its last token."""
        ended = [row[-1] in self._eos for row in rows]
        for length, stops in self._windows.items():
            tails = self._tokenizer.batch_decode([row[-length:] for row in rows])
            ended = [e or any(stop in tail for stop in stops) for e, tail in zip(ended, tails, strict=True)]
        return ended


def _filled(results: list[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    for place, value in zip(places, values, strict=True):
        results[place] = value
    return results


def _key(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


if "elude" not in model_registry:  # mostly the harness holds a place for it already (_autoload.py)
    model_registry.register("elude", target=EludeLM)
