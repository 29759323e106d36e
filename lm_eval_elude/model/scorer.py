"""Log-probabilities of answers: the one forward pass of backend, trainer, probe and attacks on weights."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from lm_eval_elude.errors import UserError, reason
from lm_eval_elude.model.packing import Batch, collate
from lm_eval_elude.text.chat import Encoded

Item = TypeVar("Item")
_LOGIT_ROWS = 256  # rows of logits that are in float32 at one time
# Their attention counts by place in a row, which is not a token's position in a tree.
_BY_PLACE = frozenset({"gpt_neo", "openai-gpt"})
_CONVERT = (
    "python -c \"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; [kind.from_pretrained('{0}', "
    "**more).save_pretrained('converted') for kind, more in ((M, dict(use_safetensors=False)), (T, {{}}))]\""
)


def progress(items: Sequence[Item], doing: str, unit: str = "pass") -> Iterable[Item]:
    """The parts of something that may take long, under a bar: on a terminal, in the first process."""
    later = dist.is_available() and dist.is_initialized() and dist.get_rank() > 0
    return tqdm(items, desc=doing, unit=unit, leave=False, disable=later or None)


# ---- models
@contextmanager
def loading(flag: str, name: str) -> Iterator[None]:
    """Around what loads a model: UserError, which names the flag, where it cannot be loaded, and says what to give."""
    from safetensors import SafetensorError

    folder = Path(name)
    if (adapter := folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path") or "BASE"
        raise UserError(
            f"{flag} {name!r} holds an adapter and no model: lm_eval takes --model_args pretrained={base},peft={name}, "
            "and everything else the two merged"
        )
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if isinstance(error, UserError):
            raise
        advice = f"; weights in .bin files are converted by: {_CONVERT.format(name)}" if "tensors" in str(error) else ""
        raise UserError(f"{flag} {name!r} cannot be loaded: {reason(error)}{advice}") from None


def load_model(name: str, revision: str | None = None, dtype: Any = "auto", flag: str = "--model") -> Any:
    """A causal language model of a folder or Hub id, on the CPU; safetensors only, and never a checkpoint's own code.

    UserError where it cannot be loaded (no such folder or Hub id, no weights, damaged weights); it names the flag.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # of reading the weights
    with loading(flag, name):
        return AutoModelForCausalLM.from_pretrained(
            name, revision=revision, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )


def emulates_bfloat16(device: torch.device) -> bool:
    """Whether a device is a processor without bfloat16 arithmetic: there float32 is many times as fast."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return device.type == "cpu"
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def attention_span(config: Any) -> int:
    """The longest sequence in which all tokens see each other and positions are rotated in one way."""
    spans = [getattr(config, "attention_chunk_size", None)]
    if getattr(config, "use_sliding_window", True):
        spans.append(getattr(config, "sliding_window", None))
    rope = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    if "longrope" in rope or "dynamic" in rope:
        spans.append(getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings)
    return min((int(span) for span in spans if span), default=1 << 60)


# ---- the forward pass
def answer_logits(model: Any, batch: Batch) -> Tensor:
    """The model's logits at ``batch.places``, (m, vocabulary); the vocabulary is computed nowhere else."""
    inputs: dict[str, Any] = {"input_ids": batch.tokens}
    if batch.sees is not None:
        inputs |= {"position_ids": batch.depths, "attention_mask": _mask(model, batch.sees)}
    return logits_at(batch.places, model, model, **inputs)


def logits_at(places: Tensor, model: Any, inner: Any, **inputs: Any) -> Tensor:
    """The logits at places (m,) of the flattened input, (m, vocabulary); ``inner`` is the model without a wrapper.

    Its head is given the hidden states of these places only. What the model does to its logits (caps, scales) it still
    does itself.
    """
    selected = []

    def select(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        states = arguments[0].flatten(0, 1)  # on the head's device, where layers lie on several
        selected.append(states[places.to(states.device)].unsqueeze(0))
        return (selected[0], *arguments[1:])

    handle = inner.get_output_embeddings().register_forward_pre_hook(select)
    try:
        logits: Tensor = model(**inputs, use_cache=False).logits.flatten(0, 1)
    finally:
        handle.remove()
    return (logits if selected else logits[places.to(logits.device)]).to(places.device)


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


def token_log_probs(logits: Tensor, batch: Batch) -> Tensor:
    """Log-probabilities of ``batch.targets``, in their shape (n, k), from :func:`answer_logits`."""
    logits = widened(logits)
    return logits[batch.rows[:, None], batch.targets] - logits.logsumexp(-1)[batch.rows, None]


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
    columns = []
    for part in map(widened, logits.split(_LOGIT_ROWS)):
        total, best = part.logsumexp(-1), part.argmax(-1)
        mean = deviation = total
        if moments:
            part = (part - total[:, None]).clamp(min=-1e4)  # 0 x log 0 is 0
            p = part.exp()
            mean = (p * part).sum(-1)
            deviation = (p * (part - mean[:, None]).square()).sum(-1).sqrt()
        columns.append((total, best, mean, deviation))
    total, best, *spread = (torch.cat(column)[batch.rows] for column in zip(*columns, strict=True))
    targets = batch.targets[:, 0]
    found = [logits[batch.rows, targets].to(total.dtype) - total, best == targets, *(spread if moments else ())]
    ends = batch.owners.unique_consecutive(return_counts=True)[1].cumsum(0).tolist()
    lists = [column.tolist() for column in found]
    spans = zip([0, *ends], ends, strict=False)
    return [TokenScores(*(column[start:end] for column in lists)) for start, end in spans]


# ---- many samples
class AnswerLogProbs(NamedTuple):
    """Of each sample: the sum of its answer tokens' log-probabilities (nats) and their number, each (samples,)."""

    sums: Tensor
    counts: Tensor

    @property
    def means(self) -> Tensor:
        """Mean log-probability of an answer token, shape (samples,): the logarithm of P(a|q)^(1/|a|)."""
        return self.sums / self.counts


def answer_sums(values: Tensor, owners: Tensor) -> AnswerLogProbs:
    """What the tokens' values (n,) add up to for each sample; ``owners`` (n,) are the samples 0, 1, ... of a batch."""
    counts = owners.bincount()
    return AnswerLogProbs(values.new_zeros(len(counts)).index_add(0, owners, values), counts)


class Scorer(nn.Module):
    """A causal language model as a module whose forward gives answer tokens' log-probabilities.

    ``span`` is the longest sample that may share a row with others; 0 where the model does not obey mask and positions.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)
        self.span = 0 if packing_fault(model) else attention_span(model.config.get_text_config())

    def forward(self, batch: Batch) -> Tensor:
        """Log-probabilities of ``batch.targets``, in their shape (n, k)."""
        return token_log_probs(answer_logits(self.model, batch), batch)


@torch.no_grad()
def score_all(scorer: Scorer, samples: Sequence[Encoded], batch_size: int, group: int = 1) -> AnswerLogProbs:
    """Log-probabilities of many samples' answers; every process of several computes all of them.

    ``batch_size`` samples go into one forward pass, and ``group`` consecutive ones share a row, if the model can do
    that. Sums (float64) and counts have shape (samples,) and lie on the CPU.
    """
    device, result = next(scorer.parameters()).device, torch.zeros(2, len(samples), dtype=torch.float64)
    if max((len(sample.ids) for sample in samples), default=0) > scorer.span:
        group = 1
    groups = [range(first, min(first + group, len(samples))) for first in range(0, len(samples), group)]
    groups.sort(key=lambda members: sum(len(samples[i].ids) for i in members))
    size = max(1, batch_size // 3) if group > 1 else batch_size  # a group's row is as long as some three samples
    training = scorer.training
    scorer.eval()
    for first in progress(range(0, len(groups), size), "scoring"):
        chosen = [i for members in groups[first : first + size] for i in members]
        batch = collate([samples[i] for i in chosen], device, group)
        for row, values in zip(result, answer_sums(scorer(batch)[:, 0], batch.owners), strict=True):
            row[chosen] = values.cpu().to(row.dtype)
    scorer.train(training)
    return AnswerLogProbs(result[0], result[1].long())


# ---- the check of a model
def probe(model: Any) -> list[Encoded]:
    """Two contexts of different length with three answers each, which share openings: six short samples."""
    draw, size = random.Random(0), model.get_input_embeddings().num_embeddings
    longest = min(3, attention_span(model.config.get_text_config()) // 4)
    words = [draw.choices(range(size), k=max(1, longest)) for _ in range(7)]
    answers = (words[3] + words[4], words[3] + words[5], words[6])
    return [Encoded(c + answer, len(c)) for c in (words[0] + words[1], words[2]) for answer in answers]


NOT_FINITE = "its numbers are not finite"


@torch.no_grad()
def packing_fault(model: Any) -> str:
    """What is wrong with packed rows of this model, "" where they give what rows of single sequences give."""
    training, samples = model.training, probe(model)
    if model.config.get_text_config().model_type in _BY_PLACE:
        return "its attention counts by place in a row"
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
    if off <= allowed:
        return ""
    differ = f"log-probabilities differ by {off:.2g} between packed and plain rows"
    return differ if math.isfinite(off) else NOT_FINITE
