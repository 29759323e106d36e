"""One step: the gradient of Eq. 8 in passes that fit, clipped, and one update (two where they alternate)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lm_eval_elude.core.chat import Encoded
from lm_eval_elude.core.logprobs import AnswerLogProbs
from optout_train import losses
from optout_train.data import Lesson, StepIndices, collate, share
from optout_train.setup import Setup

# Tokens of one pass on a CPU: enough for its matrix products, few enough to pad little and stay near the caches.
CPU_PASS = 768


class Part(NamedTuple):
    """One forward and backward pass of a step: which loss, its weight, and the samples with their weights."""

    name: str
    weight: float
    samples: tuple[Encoded | Lesson, ...]
    weights: tuple[float, ...]
    records: tuple[int, ...]


def take_step(run: Setup, step: int, total: int, indices: StepIndices) -> dict[str, float]:
    """Update the weights once; returns what the log shows.

    Args:
        run: the run; its model and optimizer change.
        step: number of the step, from 1.
        total: steps of the whole plan, for the learning rate.
        indices: the records it reads.

    Returns:
        The loss of Eq. 8, its terms unweighted, the gradient norm before clipping (of the last update), and the rate.
        Where a norm is not finite nothing is updated.
    """
    config = run.config
    forget, retain = passes(run, indices)
    rounds = [forget + retain] if config.updates == "joint" else [part for part in (forget, retain) if part]
    rate = run.learning_rate * (1 - (step - 1) / total)
    values = {"loss": 0.0}
    for number, parts in enumerate(rounds, 1):
        # Of dropout and stochastic rounding; torch takes 64 bits.
        torch.manual_seed((config.seed * 1_000_003 + step * 2 + number) % (1 << 63))
        values |= backward(run, parts)
        if config.transport_weight and number == len(rounds):
            values["transport"] = float(run.transport.add_gradient(config.transport_weight, step))
        clipped = config.max_grad_norm and (config.clip_forget or number == len(rounds))
        norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), config.max_grad_norm if clipped else math.inf)
        values["grad_norm"] = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not math.isfinite(values["grad_norm"]):
            break
        for group in run.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)
    weights = config.set_weights | {"transport": config.transport_weight}
    values["loss"] = sum(weights[name] * values[name] for name in weights if name in values)
    return values | {"learning_rate": rate}


def backward(run: Setup, parts: Sequence[Part]) -> dict[str, float]:
    """Accumulate the gradient of all parts; returns each set's mean loss over the whole step, unweighted."""
    processes = run.accelerator.num_processes
    means = {
        name: torch.zeros((), dtype=torch.float64, device=run.device) for name in dict.fromkeys(p.name for p in parts)
    }
    for number, part in enumerate(parts, 1):
        with _sync(run, number == len(parts)):
            with torch.autocast(run.device.type, torch.bfloat16, enabled=run.config.autocast):
                answers = AnswerLogProbs(*run.scorer(*collate(part.samples, run.device)))
            per_example = _loss(run, part, answers)
            weights = torch.tensor(part.weights, device=run.device)
            if len(per_example) != len(weights):  # the batch-mean form is one value
                weights = torch.ones(1, device=run.device)
            mean = (per_example * weights).sum()
            # DDP and FSDP average gradients over processes; the weights already sum to 1 over all of them.
            (mean * part.weight * processes).backward()
            means[part.name] += mean.detach()
    totals = torch.stack(list(means.values()))
    if processes > 1:
        dist.all_reduce(totals)
    return dict(zip(means, totals.tolist(), strict=True))


def passes(run: Setup, indices: StepIndices) -> tuple[list[Part], list[Part]]:
    """The passes of this process: those of the forget loss, and those of the retain losses."""
    sides: tuple[list[Part], list[Part]] = ([], [])
    rank, processes = run.accelerator.process_index, run.accelerator.num_processes
    for name, weight in run.config.set_weights.items():
        records = getattr(indices, name)
        if not weight or not records:
            continue
        texts = [run.data.samples(name, record, run.forget_loss.reads) for record in records]
        lengths = [max(len(sample.ids) for sample in samples) for samples in texts]
        size = run.config.micro_batch_size or _pass_size(run, name, lengths)
        tokens = [1] * len(texts)  # what a record weighs
        if run.config.nll_average == "batch" and (name != "forget" or run.forget_loss.nll):
            tokens = [len(samples[0].ids) - samples[0].answer_start for samples in texts]
        for part in share(lengths, rank, processes, size):
            # A record may bring several sequences: first the first of all records, then the second of all.
            columns = zip(*(texts[i] for i in part.positions), strict=True)
            samples = tuple(sample for column in columns for sample in column)
            chosen = tuple(records[i] for i in part.positions)
            each = zip(part.weights, part.positions, strict=True)
            weights = tuple(w * tokens[i] * len(tokens) / sum(tokens) for w, i in each)
            sides[name != "forget"].append(Part(name, weight, samples, weights, chosen))
    return sides


def _pass_size(run: Setup, name: str, lengths: Sequence[int]) -> int:
    """Records of one pass where the user names no number: all, or on a CPU those of :data:`CPU_PASS` tokens."""
    if run.device.type != "cpu" or (name == "forget" and run.config.whole_batch):
        return 0
    return max(1, round(CPU_PASS * len(lengths) / sum(lengths)))


def _loss(run: Setup, part: Part, answers: AnswerLogProbs) -> Tensor:
    """One value per example; for the forget set by the run's row of the table."""
    if part.name != "forget":
        return losses.nll(answers)
    row, records = run.forget_loss, torch.tensor(part.records, device=run.device)
    columns = (column.chunk(len(row.reads)) for column in answers)
    now = {kind: AnswerLogProbs(*pair) for kind, pair in zip(row.reads, zip(*columns, strict=True), strict=True)}
    before = {kind: AnswerLogProbs(*(column[records] for column in run.reference[kind])) for kind in row.reference}
    if run.config.whole_batch:
        now, before = ({k: losses.batch_mean(v) for k, v in side.items()} for side in (now, before))
    return row.function(now, {k: v._replace(sums=v.sums.float()) for k, v in before.items()}, run.config.eta)


def _sync(run: Setup, last: bool) -> Any:
    """Exchange gradients in the last pass of a step only."""
    if run.config.shard and run.accelerator.num_processes > 1:
        run.scorer.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()
    alone = last or run.accelerator.num_processes == 1
    return nullcontext() if alone else run.scorer.no_sync()  # type: ignore[operator]
