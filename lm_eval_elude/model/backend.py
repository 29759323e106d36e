"""``lm_eval --model elude``: stock ``hf`` (every argument, every task), with the work that requests share done once.

Log-likelihoods. Requests are sorted by their tokens and written into trees (``packing.py``): an opening that several
share (a question, the head of a chat template, the start of two answers) is one run of nodes. A tree is one row of a
batch; a token's position is its depth and it sees its ancestors only, so each branch reads as if it stood alone. The
vocabulary is computed where an answer token is predicted and nowhere else (``scorer.py``). What cannot share a row is
scored in rows of its own.

Generation. ``generate()`` of transformers, in batches that the memory allows. A text ends where it would end in a batch
of its own (stock ``hf`` lets a row run on until all rows have their stop text, which shows where that text is a special
token), and texts that have ended leave the batch (``decoding.py``).

At load both are compared with the plain way on this very model; what differs goes the plain way, with a line that says
so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size
from lm_eval.api.instance import Instance
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import clear_torch_cache
from tqdm import tqdm

from lm_eval_elude.errors import UserError, reason
from lm_eval_elude.model.decoding import DEPENDS_ON_LENGTH, continued
from lm_eval_elude.model.packing import Batch, build_trees, collate, to_batch
from lm_eval_elude.model.scorer import (
    NOT_FINITE,
    TokenScores,
    answer_logits,
    attention_span,
    emulates_bfloat16,
    loading,
    packing_fault,
    probe,
    token_scores,
)  # fmt: skip
from lm_eval_elude.text.chat import Encoded, check_place

log = logging.getLogger("lm_eval.elude")
LONGEST_TREE = 4096  # tokens: its mask has a square of them


class EludeLM(HFLM):
    """Stock ``HFLM``, with every argument of it, that runs shared work once (see the module's text).

    A batch has ``batch_tokens`` tokens, padding included: what the memory allows. ``batch_size`` holds for what goes
    stock ``hf``'s way. Weights are read from safetensors; ``use_safetensors=False`` also takes others.
    """

    softmax_dtype: torch.dtype | None

    def __init__(self, pretrained: Any, **kwargs: Any) -> None:
        kwargs.setdefault("device", default_device())
        if isinstance(pretrained, str):
            check_place(pretrained)
            if not any(kwargs.get(other) for other in ("autogptq", "gptqmodel", "gguf_file")):
                kwargs.setdefault("use_safetensors", True)
        with loading("pretrained", pretrained) if isinstance(pretrained, str) else nullcontext():
            super().__init__(pretrained, **kwargs)
        dtype = self.mixed_precision_dtype or self.model.dtype
        if self.softmax_dtype is None and dtype.itemsize < 4:
            self.softmax_dtype = torch.float32  # what goes the stock way would be summed in 16 bits
        if dtype == torch.bfloat16 and emulates_bfloat16(self.device):
            log.warning("ELUDe: this processor has no bfloat16 arithmetic, and is many times as fast by dtype=float32")
        config = self.config.get_text_config()
        self._width = int(getattr(config, "hidden_size", 0) or 0)
        self._span = min(self.max_length, attention_span(config))
        self._rows_of_vocabulary = self.model.get_input_embeddings().num_embeddings
        self._finite = True  # all numbers so far
        self._packs = self._scores = self._drops = False
        if self.backend == "causal" and self._width:
            self.batch_tokens = fitting_tokens(self.model, dtype, self.device)
            log.info("ELUDe: up to %d tokens a batch", self.batch_tokens)
            with self._precision():
                self._check()

    # ---- tokens
    def tok_encode(self, string: str, *args: Any, **kwargs: Any) -> list[int]:
        """As stock; UserError where the model has no embedding for a token."""
        return self._embedded(super().tok_encode(string, *args, **kwargs))

    def tok_batch_encode(self, strings: list[str], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """As stock; UserError where the model has no embedding for a token."""
        ids, mask = super().tok_batch_encode(strings, *args, **kwargs)
        self._embedded([int(ids[mask.bool()].max())])
        return ids, mask

    def _embedded(self, ids: list[int]) -> list[int]:
        if (most := max(ids, default=0)) >= self._rows_of_vocabulary:
            raise UserError(
                f"the tokenizer writes {self.tokenizer.convert_ids_to_tokens(most)!r} as token {most}, and the model's "
                f"embedding has {self._rows_of_vocabulary}: give the tokenizer of this model as --model_args tokenizer="
            )
        return ids

    # ---- log-likelihoods
    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, override_bs: Any = None
    ) -> list[tuple[float, bool]]:
        if not self._scores or not all(context and answer for _, context, answer in requests):
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        samples = [Encoded(context + answer, len(context)) for _, context, answer in requests]

        def keep(place: int, score: TokenScores) -> tuple[float, bool]:
            result = (sum(score.log_probs), all(score.greedy))
            if (asked := requests[place][0]) is not None:  # at once, for who is cut off and goes on with --use_cache
                self.cache_hook.add_partial("loglikelihood", asked, result)
            return result

        return self._score(samples, "loglikelihood", disable_tqdm, keep)

    @property
    def token_logprobs(self) -> Callable[..., list[TokenScores]]:
        """The request type of ELUDe's own: log-probabilities of each token of a continuation, and their moments.

        Arguments of a request are (context, continuation), which are cut where they meet (``loglikelihood`` moves white
        space from the one to the other). AttributeError where the model cannot be asked for single tokens, so that
        ``hasattr(model, "token_logprobs")`` says whether it can.
        """
        if not self._scores:
            raise AttributeError("this model gives no log-probabilities of single tokens")
        return self._token_logprobs

    def _token_logprobs(self, requests: list[Instance], disable_tqdm: bool = False) -> list[TokenScores]:
        samples = [self._encoded(*request.args) for request in requests]
        for (ids, start), request in zip(samples, requests, strict=True):
            if not 0 < len(ids) - start <= self.max_length:
                raise ValueError(f"token_logprobs: no tokens, or more than the model takes, in {request.args[1]!r}")
        return self._score(samples, "token_logprobs", disable_tqdm, lambda _, score: score, moments=True)

    def _encoded(self, context: str, continuation: str) -> Encoded:
        if context:
            return Encoded(self.tok_encode(context + continuation), len(self.tok_encode(context)))
        ids, prefix = self.tok_encode(context + continuation, add_special_tokens=False), self.prefix_token_id
        return Encoded(ids if ids[:1] == [prefix] else [prefix, *ids], 1)

    def _score(
        self, samples: Sequence[Encoded], kind: str, disable_tqdm: bool, keep: Callable[[int, TokenScores], Any],
        moments: bool = False,
    ) -> list[Any]:  # fmt: skip
        """What ``keep`` makes of each answer's number and token scores, as soon as its batch is done.

        What exceeds the model's length is cut on the left, with a line.
        """
        longest, most = max((len(sample.ids) for sample in samples), default=0), self.max_length + 1
        if longest > most:
            log.warning("ELUDe: up to %d tokens, the model takes %d: cut on the left", longest - 1, self.max_length)
            samples = [Encoded(ids[-most:], start - max(0, len(ids) - most)) for ids, start in samples]
        results: list[Any] = [None] * len(samples)
        packed = [self._packs and len(ids) - 1 <= self._span for ids, _ in samples]
        off = disable_tqdm or self.rank != 0 or not samples or None  # None: where there is no terminal
        with tqdm(total=len(samples), disable=off, desc=f"Running {kind} requests") as bar, self._precision():
            for shared in (True, False):
                chosen = [i for i, fits in enumerate(packed) if fits == shared]
                for batch, logits in self._batches(chosen, samples, shared):
                    scores = token_scores(logits, batch, moments)
                    for place, score in zip(batch.owners.unique_consecutive().tolist(), scores, strict=True):
                        self._check_finite(score)
                        results[place] = keep(place, score)
                    bar.update(len(scores))
        return results

    def _batches(
        self, chosen: Sequence[int], samples: Sequence[Encoded], shared: bool
    ) -> Iterator[tuple[Batch, torch.Tensor]]:
        """The chosen samples in batches of ``batch_tokens``, with their logits; out of memory halves that, with a line.

        They share rows, or each has one of its own.
        """
        limit = min(LONGEST_TREE, self.batch_tokens)
        trees = build_trees({i: samples[i].ids[:-1] for i in chosen}, self._width if shared else 0, limit)
        while trees:
            length = len(trees[0].tokens)
            rows = min(len(trees), max(1, self.batch_tokens // length))
            batch = to_batch(trees[:rows], samples, self.device, masked=shared)
            try:
                logits = answer_logits(self.model, batch)
            except Exception as error:
                if rows == 1 or not should_reduce_batch_size(error):
                    raise
                self.batch_tokens = rows * length // 2
                log.warning("ELUDe: out of memory with %d rows; now %d tokens a batch", rows, self.batch_tokens)
            else:
                trees = trees[rows:]
                yield batch, logits
                continue
            clear_torch_cache()  # outside of the handler, whose error holds on to the batch

    def _check_finite(self, score: TokenScores) -> None:
        if self._finite and not math.isfinite(sum(score.log_probs)):
            self._finite = False
            log.warning(
                "ELUDe: the model's numbers are not finite in %s, and this run says nothing of it: its weights are "
                "broken, or need --model_args dtype=float32", self.mixed_precision_dtype or self.model.dtype,
            )  # fmt: skip

    # ---- generation
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """As stock, in batches that the memory allows."""
        if not self._drops:
            return super().generate_until(requests, disable_tqdm)
        before = self.batch_size_per_gpu
        longest = max((len(self.tok_encode(text)) for text in {request.args[0] for request in requests}), default=0)
        longest += max((int(request.args[1].get("max_gen_toks", self.max_gen_toks)) for request in requests), default=1)
        on_cpu = self.device.type == "cpu"  # where few texts reach their limit, and 64 are as fast as more
        rows = min(64, 16 * self.batch_tokens // longest) if on_cpu else self.batch_tokens // longest
        self.batch_size_per_gpu = max(1, rows)
        try:
            return super().generate_until(requests, disable_tqdm)
        finally:
            self.batch_size_per_gpu = before

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **given: Any) -> torch.Tensor:
        settings = self.model.generation_config.to_dict() | given
        if not self._drops or any(settings.get(name) not in (None, 0, 1) for name in DEPENDS_ON_LENGTH):
            return super()._model_generate(context, max_length, stop, **given)
        if not given.get("do_sample"):  # as stock
            given = {name: value for name, value in given.items() if name != "temperature"} | {"do_sample": False}
        with self._precision():
            return continued(
                self.model, self.tokenizer, context, given.pop("attention_mask"), stop, max_length, **given
            )

    # ---- precision, and the check at load
    @contextmanager
    def _precision(self) -> Iterator[None]:
        """Compute as stock hf does: without gradients, in the number format that was asked for."""
        kind = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, dtype=kind, enabled=kind is not None):
            yield

    def _check(self) -> None:
        """Find out what this model can do; a line says what goes the plain way, and why."""
        fault = packing_fault(self.model)
        self._packs = not fault
        if fault and fault != NOT_FINITE:  # that is said once, with the dtype, where it is first scored
            log.warning("ELUDe: answers to one question do not share a row on this model: %s", fault)
        samples = probe(self.model)
        try:
            batch = collate(samples, self.device)
            for score in token_scores(answer_logits(self.model, batch), batch):
                self._check_finite(score)
            if self.model(input_ids=batch.tokens).logits.shape[1] != batch.tokens.shape[1]:
                raise ValueError("it puts tokens of its own before a text")
            self._scores = True
        except Exception as error:  # whatever an architecture makes of the probe, plain log-likelihoods are still open
            log.warning("ELUDe: no log-probabilities of single tokens: %s: %s", type(error).__name__, reason(error))
        self._drops = True
        if fault := self._generation_fault([sample.ids for sample in samples[2:]]):
            self._drops = False
            log.warning("ELUDe: generation of this model goes the stock way: %s", fault)

    def _generation_fault(self, prompts: list[list[int]]) -> str:
        """What is wrong with :func:`continued` for this model, "" where it writes what ``generate`` writes.

        The first text ends with its first token and leaves the batch.
        """
        width, plain = max(map(len, prompts)), super()._model_generate

        def alone(prompt: list[int], **given: Any) -> list[int]:
            ids = torch.tensor([prompt], device=self.device)
            whole = plain(ids, len(prompt) + 5, [], attention_mask=torch.ones_like(ids), do_sample=False, **given)
            return whole[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

        try:
            end = alone(prompts[0])[0]
            expected = [alone(prompt, eos_token_id=end) for prompt in prompts]
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=self.device)
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
            settings = {"attention_mask": mask.to(self.device), "do_sample": False, "eos_token_id": end}
            found = self._model_generate(ids, width + 5, [], **settings)[:, width:].tolist()
        except Exception as error:  # whatever an architecture makes of the probe, the stock way is still open
            return f"{type(error).__name__}: {reason(error)}"
        same = all(row[: len(tokens)] == tokens for row, tokens in zip(found, expected, strict=True))
        return "" if same else "the probe's tokens differ from those of generate()"


def default_device() -> str:
    """Where a model runs that nobody placed: hf's own default is CUDA, also on a machine without it."""
    return str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"


def fitting_tokens(model: Any, dtype: torch.dtype, device: torch.device) -> int:
    """Tokens of a batch that half of a GPU's free memory holds, with logits and cache; on other devices 1024.

    More brings no speed on a CPU, and more than 65,536 none anywhere.
    """
    if device.type != "cuda":
        return 1024
    config = model.config.get_text_config()
    of_layers = (32 + 2 * config.num_hidden_layers) * config.hidden_size  # states in one layer, keys and values in all
    token = max(2, dtype.itemsize) * (of_layers + model.get_input_embeddings().num_embeddings)
    return max(1, min(65536, torch.cuda.mem_get_info(device)[0] // 2 // token))


if "elude" not in model_registry:  # mostly the harness holds a place for it already
    model_registry.register("elude", target=EludeLM)
