"""``lm_eval --model elude``: stock ``hf`` (every argument, every task), with the work that requests share done once.

Log-likelihoods. Requests are sorted by their tokens and written into trees (``packing.py``): an opening that several
share (a question, the head of a chat template, the start of two answers) is one run of nodes. A tree is one row of a
batch; a token's position is its depth and it sees its ancestors only, so each branch reads as if it stood alone. The
vocabulary is computed where an answer token is predicted and nowhere else (``scorer.py``).

Generation. Greedy decoding, and draws from the whole vocabulary, fill their cache from trees too and drop a row as soon
as it has ended (``decoding.py``). A greedy text is the one that stock ``hf`` gives with batch size 1. (In larger
batches stock lets a row run on after its stop text until all rows have theirs, which shows where that text is a special
token.)

At load both are compared with the plain way on this very model; what differs goes the stock way, with a line that says
so. So do requests beyond a sliding window, draws from less than the whole vocabulary, and checkpoints whose generation
settings act on greedy decoding.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils.memory import should_reduce_batch_size
from lm_eval.api.instance import Instance
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.models.utils_hf import clear_torch_cache
from tqdm import tqdm

from lm_eval_elude.errors import UserError, reason
from lm_eval_elude.model import limits
from lm_eval_elude.model.decoding import decode
from lm_eval_elude.model.packing import Tree, build_trees, collate, to_batch
from lm_eval_elude.model.scorer import TokenScores, answer_logits, emulates_bfloat16, packing_fault, probe, token_scores
from lm_eval_elude.text.chat import Encoded, check_place

log = logging.getLogger("lm_eval.elude")
T = TypeVar("T")
R = TypeVar("R")


class Rank(int):
    """A rank that also says what its model serves: of the model, the harness hands a task the rank and nothing else."""

    serves = ("token_logprobs",)


class EludeLM(HFLM):
    """Stock ``HFLM``, with every argument of it, that runs shared work once (see the module's text).

    ``batch_tokens`` is the tokens of one batch, padding included; by default what the memory allows, else a positive
    whole number (or UserError). ``batch_size`` holds for what goes the stock way.
    """

    softmax_dtype: torch.dtype | None

    def __init__(self, pretrained: Any, batch_tokens: int | str | None = None, **kwargs: Any) -> None:
        if batch_tokens is not None and (not str(batch_tokens).isdecimal() or int(batch_tokens) < 1):
            raise UserError(f"batch_tokens={batch_tokens!r} in --model_args must be a positive whole number")
        # Stock hf divides the requests among GPUs only; on CPU each rank would score everything. Accelerate counts the
        # ranks of a CPU only if told that it is one, before anything else asks for its state (then this does nothing).
        on_cpu = not torch.accelerator.is_available() or str(kwargs.get("device")).startswith("cpu")
        if on_cpu and isinstance(pretrained, str) and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            # Gloo's threads hold tensors: a rank that ends before they do may abort (SIGABRT) after its last result.
            atexit.register(PartialState(cpu=True, timeout=timedelta(weeks=52)).destroy_process_group)
        if isinstance(pretrained, str):
            check_place(pretrained)
        kwargs.setdefault("device", limits.device())
        super().__init__(pretrained, **kwargs)
        self._arguments = kwargs
        if self.softmax_dtype is None and (self.mixed_precision_dtype or self.model.dtype).itemsize < 4:
            self.softmax_dtype = torch.float32  # what goes the stock way would be summed in 16 bits
        if torch.bfloat16 in (self.mixed_precision_dtype, self.model.dtype) and emulates_bfloat16(self.device):
            log.warning("ELUDe: this processor has no bfloat16 arithmetic, and is many times as fast by dtype=float32")
        accelerator = getattr(self, "accelerator", None)
        if self.world_size == 1 and accelerator is not None and not kwargs.get("parallelize"):
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes
        config = self.config.get_text_config()
        self._width = int(getattr(config, "hidden_size", 0) or 0)
        self._span = min(self.max_length, limits.attention_span(config))
        self._packs = self._decodes = False
        if self.backend == "causal" and self._width:
            fitting, self._cache_weight = limits.batch_tokens(config, self.model.dtype, self.device)
            self.batch_tokens = int(batch_tokens) if batch_tokens else fitting
            log.info("ELUDe: up to %d tokens a batch", self.batch_tokens)
            self._packs, self._decodes = self._check()
            if self._packs or self._scores_rows():
                self._rank = Rank(self._rank)

    # ---- log-likelihoods
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
        samples = [Encoded(context + answer, len(context)) for _, context, answer in map(requests.__getitem__, fast)]

        def keep(place: int, score: TokenScores) -> None:
            asked = requests[fast[place]][0]
            results[fast[place]] = result = (sum(score.log_probs), all(score.greedy))
            if asked is not None:  # at once, for who is cut off and goes on with --use_cache
                self.cache_hook.add_partial("loglikelihood", asked, result)

        self._score(samples, disable_tqdm=disable_tqdm, keep=keep)
        rest = [i for i, result in enumerate(results) if result is None]
        with self._fixed_batches():
            left = [requests[i] for i in rest]
            stock = super()._loglikelihood_tokens(left, disable_tqdm, override_bs) if rest else []
        return _filled(results, rest, stock)

    def token_logprobs(self, requests: list[Instance], disable_tqdm: bool = False) -> list[TokenScores]:
        """Log-probabilities of each token of a continuation, with their expected value and spread.

        A request type of ELUDe's own; :class:`Rank` announces it. Arguments of a request are (context, continuation),
        which are cut where they meet (``loglikelihood`` moves white space from the one to the other), or (context,
        continuation, model): a model folder or Hub id that scores the same text instead. It is loaded as this one was,
        and let go afterwards.
        """
        results: list[Any] = [None] * len(requests)
        groups: dict[str | None, list[int]] = {}  # numbers of the requests by the model that is asked; None: this one
        for i, (_, _, *name) in enumerate(request.args for request in requests):
            groups.setdefault(name[0] if name else None, []).append(i)
        for name, chosen in groups.items():
            model = self if name is None else self._other(name)
            samples = [model._encode(*requests[i].args[:2]) for i in chosen]
            for i, (ids, start) in zip(chosen, samples, strict=True):
                if not 0 < len(ids) - start <= model.max_length:
                    raise ValueError(
                        f"token_logprobs: no tokens, or more than the model takes, in {requests[i].args[1]!r}"
                    )
            _filled(results, chosen, model._score(samples, True, disable_tqdm))
        return results

    def _other(self, name: str) -> EludeLM:
        """Another model with this one's arguments, less those that say which model this one is."""
        naming = ("peft", "delta", "revision", "subfolder", "tokenizer", "gguf_file")
        log.info("ELUDe: loading the reference model %s", name)
        return type(self)(name, **{key: value for key, value in self._arguments.items() if key not in naming})

    def _encode(self, context: str, continuation: str) -> Encoded:
        if context:
            return Encoded(self.tok_encode(context + continuation), len(self.tok_encode(context)))
        ids, prefix = self.tok_encode(context + continuation, add_special_tokens=False), self.prefix_token_id
        return Encoded(ids if ids[:1] == [prefix] else [prefix, *ids], 1)

    def _score(
        self, samples: Sequence[Encoded], moments: bool = False, disable_tqdm: bool = True,
        keep: Callable[[int, TokenScores], None] = lambda place, score: None,
    ) -> list[TokenScores]:  # fmt: skip
        """Token scores of answers, each also given to ``keep`` as soon as its batch is done.

        What exceeds the model's length is cut on the left, with a line.
        """
        longest, most = max((len(sample.ids) for sample in samples), default=0), self.max_length + 1
        if longest > most:
            log.warning("ELUDe: up to %d tokens, the model takes %d: cut on the left", longest - 1, self.max_length)
            samples = [Encoded(ids[-most:], start - max(0, len(ids) - most)) for ids, start in samples]
        packs = self._packs and longest - 1 <= self._span
        results: list[Any] = [None] * len(samples)

        def trees_of(members: Sequence[int]) -> list[Tree]:
            trees = build_trees([samples[m].ids[:-1] for m in members], self._width if packs else 0, self.batch_tokens)
            for tree in trees:
                tree.members = [members[m] for m in tree.members]
            return trees

        def run(chosen: list[Tree]) -> list[TokenScores]:
            batch = to_batch(chosen, samples, self.device, masked=packs)
            return token_scores(answer_logits(self.model, batch), batch, moments)

        with self._bar(len(samples), "token_logprobs" if moments else "loglikelihood", disable_tqdm) as bar:
            trees = trees_of(range(len(samples)))
            for chosen, scores in self._batched(
                trees, lambda tree: len(tree.tokens), run, apart=lambda tree: trees_of(tree.members)
            ):
                members = [member for tree in chosen for member in tree.members]
                _filled(results, members, scores)
                for member, score in zip(members, scores, strict=True):
                    keep(member, score)
                bar.update(len(scores))
        return results

    # ---- generation
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        results: list[Any] = [None] * len(requests)
        work: dict[tuple[int, tuple[str, ...], float], dict[str, list[int]]] = {}  # -> their numbers, by context
        for i, (context, given) in enumerate(request.args for request in requests):
            kwargs: dict[str, Any] = dict(normalize_gen_kwargs(given, self.max_gen_toks))
            until = handle_stop_sequences(kwargs.pop("until", None), eos=self.tok_decode([self.eot_token_id], False))
            most = int(kwargs.pop("max_gen_toks"))
            drawn, temperature = kwargs.pop("do_sample"), float(kwargs.pop("temperature", 0) or 0)
            if drawn and kwargs.get("top_k") == 0 and kwargs.get("top_p") == 1:
                kwargs = {name: value for name, value in kwargs.items() if name not in ("top_k", "top_p")}
                ours = temperature > 0 and not kwargs and not limits.cuts_draws(self.model.generation_config)
            else:
                ours = not (drawn or temperature or kwargs)
            if self._decodes and ours and 0 < most < self.max_length and not self.think_end_token:
                work.setdefault((most, tuple(until), temperature), {}).setdefault(context, []).append(i)
        total = sum(len(numbers) for contexts in work.values() for numbers in contexts.values())
        with self._bar(total, "generate_until", disable_tqdm) as bar:
            for (most, stops, temperature), contexts in work.items():
                each = [c for c, numbers in contexts.items() for _ in (numbers if temperature else numbers[:1])]
                for context, text in self._texts(each, stops, most, temperature, bar):
                    numbers = [contexts[context].pop()] if temperature else contexts[context]
                    for i in numbers:
                        results[i] = text
                        if not temperature:
                            self.cache_hook.add_partial("generate_until", requests[i].args, text)
                    bar.update(len(numbers))
        rest = [i for i, result in enumerate(results) if result is None]
        with self._fixed_batches() if self._decodes else nullcontext():
            stock = super().generate_until([requests[i] for i in rest], disable_tqdm) if rest else []
        return _filled(results, rest, stock)

    def _texts(
        self, contexts: Sequence[str], stops: Sequence[str], most: int, temperature: float, bar: Any
    ) -> Iterator[tuple[str, str]]:
        """Texts after contexts, the longest context first; those beyond the model's window are left out."""

        def show(tokens: int, rows: int) -> None:
            bar.set_postfix_str(f"token {tokens} of at most {most}, {rows} texts under way", refresh=tokens % 8 == 0)

        room = {"left_truncate_len": self.max_length - most, "truncation": self.truncation}
        ids_of = {c: self.tok_batch_encode([c], **room)[0][0].tolist() for c in dict.fromkeys(contexts)}
        prompts = [(context, ids_of[context]) for context in contexts]
        short = sorted((p for p in prompts if p[1] and len(p[1]) + most <= self._span), key=lambda p: -len(p[1]))
        for batch, outputs in self._batched(
            short,
            lambda prompt: int((len(prompt[1]) + most) * self._cache_weight) + 1,
            lambda batch: decode(
                self.model, self.tokenizer, [ids for _, ids in batch], stops, most, self.batch_tokens, temperature, show
            ),
        ):
            for (context, _), ids in zip(batch, outputs, strict=True):
                yield context, postprocess_generated_text(self.tok_decode(ids), list(stops), None)

    # ---- precision and memory
    @contextmanager
    def _precision(self) -> Iterator[None]:
        """Compute as stock hf does: without gradients, in the number format that was asked for."""
        kind = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, dtype=kind, enabled=kind is not None):
            yield

    def _batched(
        self, items: Sequence[T], size: Callable[[T], int], run: Callable[[list[T]], R],
        apart: Callable[[T], list[T]] = lambda item: [item],
    ) -> Iterator[tuple[list[T], R]]:  # fmt: skip
        """Run items, the longest first, in batches of ``batch_tokens``; out of memory halves that, with a line.

        Where one item is too much, it and those after it are taken ``apart``, if that makes it smaller.
        """
        at = 0
        while at < len(items):
            rows = max(1, min(self.batch_tokens // size(items[at]), len(items) - at))
            batch = list(items[at : at + rows])
            try:
                with self._precision():
                    output = run(batch)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
                self.batch_tokens = max(1, min(self.batch_tokens, rows * size(items[at])) // 2)
                if rows == 1:
                    parts = sorted(chain.from_iterable(map(apart, items[at:])), key=size, reverse=True)
                    if size(parts[0]) >= size(items[at]):
                        raise
                    items = [*items[:at], *parts]
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

    @contextmanager
    def _fixed_batches(self) -> Iterator[None]:
        """For a rest that goes the stock way, one size in place of auto: stock would find it with all ranks together,
        of which some may have no rest."""
        before = self.batch_size_per_gpu
        if before == "auto":
            self.batch_size_per_gpu = max(1, self.batch_tokens // self.max_length)
        try:
            yield
        finally:
            self.batch_size_per_gpu = before

    def _bar(self, total: int, kind: str, disable: bool) -> Any:
        off = disable or self.rank != 0 or not total or None  # None: where there is no terminal
        return tqdm(total=total, disable=off, desc=f"Running {kind} requests")

    # ---- the check at load
    def _check(self) -> tuple[bool, bool]:
        """Whether packed rows can be used for log-likelihoods, and for generation; a line says why not."""
        with self._precision():
            fault, what = packing_fault(self.model), "log-likelihoods and generation"
            packs = not fault
            if packs:
                fault, what = self._generation_fault(), "generation"
        if fault:
            log.warning("ELUDe: %s of this model go the stock way: %s", what, fault)
        return packs, not fault

    def _scores_rows(self) -> bool:
        """Whether single tokens of plain rows can be scored, where packed rows cannot be used."""
        try:
            with self._precision():
                batch = collate(probe(self.model, self._span)[:1], self.device)
                answer_logits(self.model, batch)
                if self.model(input_ids=batch.tokens).logits.shape[1] != batch.tokens.shape[1]:
                    raise ValueError("it puts tokens of its own before a text")
        except Exception as error:  # whatever an architecture makes of the probe, plain log-likelihoods are still open
            log.warning("ELUDe: no log-probabilities of single tokens: %s: %s", type(error).__name__, reason(error))
            return False
        return True

    def _generation_fault(self) -> str:
        """What is wrong with :func:`decode` for this model, "" where it writes what ``generate`` writes."""
        if acting := limits.acting_settings(self.model.generation_config):
            return f"its generation_config sets {', '.join(acting)}"
        prompts = [sample.ids for sample in probe(self.model, self._span)[1:4:2]]
        expected = []
        try:
            for prompt in prompts:
                ids = torch.tensor([prompt], device=self.device)
                whole = self._model_generate(
                    ids, len(prompt) + 4, [], attention_mask=torch.ones_like(ids), do_sample=False
                )
                expected.append(whole[0, len(prompt) :].tolist())
            same = decode(self.model, self.tokenizer, prompts, (), 4, self.batch_tokens) == expected
        except Exception as error:  # whatever an architecture makes of the probe, the stock way is still open
            return f"{type(error).__name__}: {reason(error)}"
        return "" if same else "the probe's tokens differ from those of generate()"


def _filled(results: list[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """The results, with these values put in their places."""
    for place, value in zip(places, values, strict=True):
        results[place] = value
    return results


if "elude" not in model_registry:  # mostly the harness holds a place for it already (hook.py)
    model_registry.register("elude", target=EludeLM)
