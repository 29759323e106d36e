"""Log-probabilities of answers: the one forward pass of backend, trainer, teacher, ``elude probe`` and tiny models."""

from __future__ import annotations

import functools
import inspect
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm

from lm_eval_elude.errors import UserError, reason
from lm_eval_elude.model import limits
from lm_eval_elude.model.packing import Batch, collate
from lm_eval_elude.text.chat import Encoded

Item = TypeVar("Item")
_LOGIT_ROWS = 256  # rows of logits whose float32 log-probabilities exist at one time


def place_among_processes() -> tuple[int, int]:
    """The number of this process, from 0, and how many there are."""
    sharing = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if sharing else (0, 1)


def progress(items: Sequence[Item], doing: str, unit: str = "pass") -> Iterable[Item]:
    """The parts of something that may take long, under a bar: on a terminal, in the first process."""
    return tqdm(items, desc=doing, unit=unit, leave=False, disable=True if place_among_processes()[0] else None)


class AnswerLogProbs(NamedTuple):
    """Of each sample: the sum of its answer tokens' log-probabilities (nats) and their number, each (samples,)."""

    sums: Tensor
    counts: Tensor

    @property
    def means(self) -> Tensor:
        """Mean log-probability of an answer token, shape (samples,): the logarithm of P(a|q)^(1/|a|)."""
        return self.sums / self.counts


def repeatable(device: torch.device) -> None:
    """Let the same command give the same bytes on a CUDA device, too, from now on in this process."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def emulates_bfloat16(device: torch.device) -> bool:
    """Whether a device is a processor without bfloat16 arithmetic: there float32 is many times as fast."""
    return device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def load_model(name: str, revision: str | None = None, dtype: Any = "auto", flag: str = "--model") -> Any:
    """A causal language model of a folder or Hub id, on the CPU; safetensors only, and never a checkpoint's own code.

    UserError where it cannot be loaded (no such folder or Hub id, no weights, damaged weights); it names the flag.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # of reading the weights
    try:
        return AutoModelForCausalLM.from_pretrained(
            name, revision=revision, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"{flag} {name!r} cannot be loaded: {reason(error)}") from None


@functools.cache
def cache_argument() -> str:
    """What transformers' models call their cache: ``cache`` since 5.24, and ``past_key_values`` before."""
    from transformers.masking_utils import create_causal_mask

    return "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


def answer_logits(model: Any, batch: Batch, cache: Any = None) -> Tensor:
    """The model's logits at ``batch.places``, (m, vocabulary); the vocabulary is computed nowhere else.

    The model's head is given the hidden states of these places only. What the model does to its logits (caps, scales)
    it still does itself. A transformers ``cache`` is filled.
    """
    selected = []

    def select(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        states = arguments[0].flatten(0, 1)  # on the head's device, where layers lie on several
        selected.append(states[batch.places.to(states.device)].unsqueeze(0))
        return (selected[0], *arguments[1:])

    inputs: dict[str, Any] = {"input_ids": batch.tokens, "use_cache": cache is not None}
    if batch.sees is not None:
        inputs |= {"position_ids": batch.depths, "attention_mask": _mask(model, batch.sees), cache_argument(): cache}
    handle = model.get_output_embeddings().register_forward_pre_hook(select)
    try:
        logits: Tensor = model(**inputs).logits.flatten(0, 1)
    finally:
        handle.remove()
    return (logits if selected else logits[batch.places.to(logits.device)]).to(batch.places.device)


def _mask(model: Any, sees: Tensor) -> Tensor:
    """(rows, query, key) visibility as the model's attention takes it: bool for SDPA, else added to the scores."""
    sees = sees.unsqueeze(1)
    if model.config.get_text_config()._attn_implementation == "sdpa":
        return sees
    lowest = torch.finfo(model.dtype).min
    return torch.zeros(sees.shape, dtype=model.dtype, device=sees.device).masked_fill(~sees, lowest)


def widened(logits: Tensor) -> Tensor:
    """Logits in float32 (float64 stays float64)."""
    return logits if logits.dtype == torch.float64 else logits.float()


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities over the last axis, in float32 or better."""
    return widened(logits).log_softmax(-1)


def token_log_probs(logits: Tensor, batch: Batch) -> Tensor:
    """Log-probabilities of ``batch.targets``, in their shape (n, k), from :func:`answer_logits`."""
    if torch.is_grad_enabled():
        return log_softmax(logits)[batch.rows[:, None], batch.targets]
    parts = torch.empty(batch.targets.shape, dtype=widened(logits[:0]).dtype, device=logits.device)
    for first in range(0, len(logits), _LOGIT_ROWS):  # not all of the vocabulary at all places in float32 at a time
        table, rows = log_softmax(logits[first : first + _LOGIT_ROWS]), batch.rows - first
        here = (rows >= 0) & (rows < len(table))
        parts[here] = table[rows[here, None], batch.targets[here]]
    return parts


def matrices(model: Any) -> list[Tensor]:
    """The matrices of a model's layers, without those of its vocabulary and of positions.

    Experts that stand in one parameter, (experts, rows, columns), are a matrix each: views of that parameter.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outside = {id(module.weight) for module in [*tables, model.get_output_embeddings()]}
    inside = [parameter for parameter in model.parameters() if id(parameter) not in outside]
    return [matrix for parameter in inside for matrix in slices(parameter)]


def slices(parameter: Tensor) -> Sequence[Tensor]:
    """The matrices in a parameter: itself, those of a block of experts, or none (a kernel of a convolution is none)."""
    if parameter.ndim == 3 and parameter.shape[1] > 1:
        return parameter.unbind()
    return [parameter] if parameter.ndim == 2 else []


def layer_list(model: Any) -> tuple[nn.Module, str]:
    """The module that holds a model's list of layers, and the list's name there (``layers``; ``h`` in GPT-2).

    UserError where there is none.
    """
    decoder, count = model.get_decoder(), model.config.get_text_config().num_hidden_layers
    for name, module in decoder.named_children():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return decoder, name
    raise UserError(f"{type(decoder).__name__} has no list of {count} layers, which this needs: name another model")


def layers_of(model: Any) -> Any:
    return getattr(*layer_list(model))


@contextmanager
def recorded(model: Any) -> Iterator[list[Any]]:
    """What the model's layers put out in the next forward pass, in their order; :func:`layer_state` reads it."""
    outputs: list[Any] = []
    handles = [layer.register_forward_hook(lambda _, __, output: outputs.append(output)) for layer in layers_of(model)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def layer_state(output: Any) -> Tensor:
    """The hidden states in what a layer puts out, (rows, length, width)."""
    state: Tensor = output[0] if isinstance(output, tuple) else output
    return state


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


class Scorer(nn.Module):
    """A causal language model as a module whose forward, seen by DDP and FSDP, gives answer tokens' log-probabilities.

    ``span`` is the longest sample that may share a row with others; 0 where the model does not obey mask and positions.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)
        self.span = 0 if packing_fault(model) else limits.attention_span(model.config.get_text_config())

    def forward(self, batch: Batch, read: Callable[[Any, Batch], Tensor] | None = None) -> Tensor:
        """Log-probabilities of ``batch.targets``, in their shape (n, k), or what ``read`` finds instead."""
        return read(self.model, batch) if read else token_log_probs(answer_logits(self.model, batch), batch)


def answer_sums(values: Tensor, owners: Tensor) -> AnswerLogProbs:
    """What the tokens' values (n,) add up to for each sample; ``owners`` (n,) are the samples 0, 1, ... of a batch."""
    counts = owners.bincount()
    return AnswerLogProbs(values.new_zeros(len(counts)).index_add(0, owners, values), counts)


def widest(device: torch.device) -> torch.dtype:
    """What sums are kept in: float64, which Apple's GPUs lack."""
    return torch.float32 if device.type == "mps" else torch.float64


@torch.no_grad()
def score_all(
    scorer: nn.Module, samples: Sequence[Encoded], batch_size: int, group: int = 1, autocast: bool = False
) -> AnswerLogProbs:
    """Log-probabilities of many samples' answers, computed once and shared over the processes.

    ``batch_size`` samples go into one forward pass of a process, and ``group`` consecutive ones share a row, if the
    model can do that. ``autocast`` computes in bfloat16, as the passes do that are compared with the result. Sums are
    of :func:`widest`; sums and counts have shape (samples,), lie on its device and are the same in every process.
    """
    rank, processes = place_among_processes()
    device = next(scorer.parameters()).device
    result = torch.zeros(2, len(samples), dtype=widest(device), device=device)
    span: Any = getattr(scorer, "module", scorer).span
    if max((len(sample.ids) for sample in samples), default=0) > span:
        group = 1
    groups = [samples[first : first + group] for first in range(0, len(samples), group)]
    lengths = [sum(len(sample.ids) for sample in members) for members in groups]
    order = sorted(range(len(groups)), key=lambda i: (lengths[i], i))
    size = max(1, batch_size // 3) if group > 1 else batch_size  # a group's row is as long as some three samples
    size = max(1, min(size, -(-len(groups) // processes)))
    batches = [order[first : first + size] for first in range(0, len(order), size)]
    training = scorer.training
    scorer.eval()
    # Every process makes the same number of passes, or collectives would hang; what comes again adds nothing.
    for number in progress(range(rank, -(-len(batches) // processes) * processes, processes), "scoring"):
        chosen = [i * group + k for i in batches[number % len(batches)] for k in range(len(groups[i]))]
        batch = collate([samples[i] for i in chosen], device, group)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            log_probs = scorer(batch)[:, 0]
        if number < len(batches):
            for row, values in zip(result, answer_sums(log_probs, batch.owners), strict=True):
                row[chosen] = values.to(row.dtype)
    if isinstance(scorer, FSDPModule):  # it leaves the root whole after a forward pass without a backward pass
        scorer.reshard()
    if processes > 1:
        dist.all_reduce(result)
    scorer.train(training)
    return AnswerLogProbs(result[0], result[1].long())


# ---- what is read of each token
class TokenScores(NamedTuple):
    """Of each token of an answer: its log-probability (nats), whether greedy decoding chooses it there, and mean and
    standard deviation of the log-probability of a token drawn from the model there (the mu and sigma of Min-K%++;
    empty unless asked for)."""

    log_probs: list[float]
    greedy: list[bool]
    means: Sequence[float] = ()
    stds: Sequence[float] = ()


def token_scores(logits: Tensor, batch: Batch, moments: bool = False) -> list[TokenScores]:
    """Scores of a batch's answers in float32 or better, one for each run of ``batch.owners``.

    ``logits`` are those of :func:`answer_logits`; ``moments`` asks for mean and standard deviation, too.
    """
    totals, likeliest, spread = [], [], []
    for part in logits.split(_LOGIT_ROWS):
        part = widened(part)
        likeliest.append(part.argmax(-1))
        totals.append(part.logsumexp(-1))
        if moments:
            part = (part - totals[-1][:, None]).clamp(min=-1e4)  # 0 x log 0 is 0
            p = part.exp()
            mean = (p * part).sum(-1, keepdim=True)
            deviation = (p * (part - mean).square()).sum(-1).sqrt()
            spread.append(torch.stack([mean[:, 0], deviation]))
    total, best, targets = torch.cat(totals), torch.cat(likeliest), batch.targets[:, 0]
    columns = [
        (logits[batch.rows, targets].to(total.dtype) - total[batch.rows]).tolist(),
        (best[batch.rows] == targets).tolist(),
        *(torch.cat(spread, 1)[:, batch.rows].tolist() if moments else ()),
    ]
    ends = batch.owners.unique_consecutive(return_counts=True)[1].cumsum(0).tolist()
    spans = zip([0, *ends], ends, strict=False)
    return [TokenScores(*(column[start:end] for column in columns)) for start, end in spans]


# ---- the check of a model
def probe(model: Any, longest: int) -> list[Encoded]:
    """Two contexts of different length with three answers each, which share openings: six short samples."""
    draw, size = random.Random(0), model.get_input_embeddings().num_embeddings
    words = [draw.choices(range(size), k=max(1, min(3, longest // 4))) for _ in range(7)]
    answers = (words[3] + words[4], words[3] + words[5], words[6])
    return [Encoded(c + answer, len(c)) for c in (words[0] + words[1], words[2]) for answer in answers]


@torch.no_grad()
def packing_fault(model: Any) -> str:
    """What is wrong with packed rows of this model, "" where they give what rows of single sequences give."""
    config, training = model.config.get_text_config(), model.training
    if config.model_type in limits.BY_PLACE:
        return "its attention counts by place in a row"
    samples = probe(model, limits.attention_span(config))
    device = model.get_input_embeddings().weight.device
    model.eval()
    try:
        alone, packed = (collate(samples, device, group) for group in (1, 3))
        whole = model(input_ids=alone.tokens, use_cache=False).logits.flatten(0, 1)[alone.places]
        logits = answer_logits(model, packed)
        expected = answer_sums(token_log_probs(whole, alone)[:, 0], alone.owners).sums
        sums = answer_sums(token_log_probs(logits, packed)[:, 0], packed.owners).sums
    except Exception as error:  # whatever an architecture makes of the probe, plain rows are still open
        return f"{type(error).__name__}: {reason(error)}"
    finally:
        model.train(training)
    differences = (sums - expected).abs()
    off, allowed = float(differences.max()), 1e-4
    if logits.dtype.itemsize == 2:  # the probe's single tokens are as noisy as any batch's
        off, allowed = float(differences.mean()), 2 * torch.finfo(logits.dtype).eps * float(expected.abs().mean())
    return "" if off <= allowed else f"log-probabilities differ by {off:.2g} between packed and plain rows"
