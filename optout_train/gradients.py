"""The gradient of a step: passes through the model, their losses, and where the forget loss's gradient is taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lm_eval_elude.model.packing import collate
from lm_eval_elude.model.scorer import AnswerLogProbs, answer_sums, widest
from lm_eval_elude.text.chat import Encoded
from optout_train import losses
from optout_train.config import TrainConfig
from optout_train.data import Lesson, Pass, Sample, Steered, StepIndices, TrainingData, passes
from optout_train.relearned import Relearned
from optout_train.transport import Transport
from optout_train.validation import Validation
from optout_train.weights import placed


@dataclass(frozen=True)
class Setup:
    """All parts of a training run, as its steps use them; :func:`optout_train.train.prepare` makes it."""

    config: TrainConfig
    accelerator: Any  # Accelerate's: processes and tracker
    device: torch.device
    data: TrainingData
    plan: list[list[StepIndices]]  # the records of every step, by epoch
    validation: Validation | None
    model: Any  # or its peft wrapper
    scorer: nn.Module  # over the model, wrapped for several processes
    transport: Transport
    learning_rate: float  # its peak
    optimizer: torch.optim.Optimizer
    reference: dict[str, AnswerLogProbs]  # under the initial weights, by sequence: of every forget record
    weights: dict[str, float]  # of each set's loss; those of the kept sets move where there is a retain budget
    direction: dict[str, Tensor]  # by parameter, where the forget loss has one fixed gradient
    relearned: Relearned | None  # the weights at which the forget gradient is taken, too


def backward(run: Setup, update: Sequence[Pass]) -> dict[str, float]:
    """Accumulate the gradient of these passes; returns each set's mean loss over the whole step, unweighted."""
    processes = run.accelerator.num_processes
    names = dict.fromkeys(part.name for part in update)
    means = {name: torch.zeros((), dtype=widest(run.device), device=run.device) for name in names}
    for number, part in enumerate(update, 1):
        with exchange_gradients(run, number == len(update)):
            with torch.autocast(run.device.type, torch.bfloat16, enabled=run.config.autocast):
                row = run.config.loss if part.name == "forget" else None
                answers = answer_values(run.scorer, part.samples, row, run.config.eta)
            per_example = _loss(run, part, answers)
            weights = torch.tensor(part.weights, device=run.device)
            if run.config.whole_batch and part.name == "forget":  # one value
                weights = torch.ones(1, device=run.device)
            mean = (per_example * weights).sum()
            # DDP and FSDP average gradients over processes; the weights already sum to 1 over all of them.
            (mean * run.weights[part.name] * processes).backward()
            means[part.name] += mean.detach()
    totals = torch.stack(list(means.values()))
    if processes > 1:
        dist.all_reduce(totals)
    return dict(zip(means, totals.tolist(), strict=True))


def backward_at_worst(run: Setup, forget: Sequence[Pass]) -> dict[str, float]:
    """As :func:`backward`, of the forget loss at the weights ``--sam`` up its gradient (SAM; Fan et al. 2025)."""
    values = backward(run, forget)
    trained = [p for p in run.model.parameters() if p.grad is not None]
    before = [p.detach().clone() for p in trained]
    norm = torch.nn.utils.clip_grad_norm_(trained, math.inf)
    with torch.no_grad():
        for weight in trained:
            weight += weight.grad * (run.config.sam / norm.clamp(min=1e-12))
    run.optimizer.zero_grad(set_to_none=True)
    backward(run, forget)
    with torch.no_grad():
        for weight, value in zip(trained, before, strict=True):
            weight.copy_(value)
    return values


def backward_relearned(run: Setup, relearned: Relearned, step: int, indices: StepIndices) -> float:
    """Accumulate ``--relearn`` times the forget gradient of one half of the facts, where the other is learnt again.

    It comes before all else that a step accumulates. Returns that half's mean loss.
    """
    config, processes = run.config, run.accelerator.num_processes
    halves = relearned.begin(step, config.batch_size)
    turn = indices.forget[0] // len(run.data.forget) * len(run.data.forget)
    asked = (halves.learnt, ("answer",)), ([place + turn for place in halves.forgotten], ())
    learnt, forgotten = (
        passes(config, run.data, StepIndices(tuple(places), (), ()), run.accelerator.process_index, processes,
               run.device, reads)[0]
        for places, reads in asked
    )  # fmt: skip
    with relearned.in_place() as before:
        for number, part in enumerate(learnt, 1):
            with exchange_gradients(run, number == len(learnt)):
                with torch.autocast(run.device.type, torch.bfloat16, enabled=config.autocast):
                    answers = answer_values(run.scorer, part.samples)
                weights = torch.tensor(part.weights, device=run.device)
                ((losses.nll(answers) * weights).sum() * processes).backward()
        relearned.learn(before)
        value = backward(run, forgotten)["forget"]
    for parameter in relearned.trained.values():
        if parameter.grad is not None:
            parameter.grad *= config.relearn
    return value


def along_direction(run: Setup, forget: Sequence[Pass]) -> dict[str, float]:
    """As :func:`backward`, with the run's fixed direction in the place of the forget loss's gradient."""
    values = backward(run, forget)
    run.optimizer.zero_grad(set_to_none=True)
    parameters = dict(run.model.named_parameters())
    for name, direction in run.direction.items():
        parameters[name].grad = placed(direction * run.weights["forget"], parameters[name])
    return values


def answer_values(
    scorer: nn.Module, samples: Sequence[Sample], row: losses.ForgetLoss | None = None, eta: float = 1.0
) -> AnswerLogProbs:
    """Sums and counts of the answer tokens' log-probabilities, or of what a row of the losses reads or makes of them.

    For lessons they are sums of :func:`losses.lesson`, and for steered sequences the negated mean squared distance to
    the target states.
    """
    device = next(scorer.parameters()).device
    batch = collate([Encoded(*sample[:2]) for sample in samples], device)
    lessons = [sample for sample in samples if isinstance(sample, Lesson)]
    steered = [sample for sample in samples if isinstance(sample, Steered)]
    if steered:
        wanted = torch.cat([s.states.expand(len(s.ids) - s.answer_start, -1) for s in steered]).to(device)
        return answer_sums(-(scorer(batch, losses.states) - wanted).square().mean(1), batch.owners)
    if not lessons:
        log_probs = scorer(batch, row.read if row else None)[:, 0]
        return answer_sums(row.tokens(log_probs, batch.owners, eta) if row and row.tokens else log_probs, batch.owners)
    bounds, top, shares = (torch.cat(column).to(device) for column in list(zip(*lessons, strict=True))[2:])
    log_probs = scorer(batch._replace(targets=torch.cat([batch.targets, top], dim=1)))
    return answer_sums(losses.lesson(log_probs, bounds, shares), batch.owners)


def _loss(run: Setup, part: Pass, answers: AnswerLogProbs) -> Tensor:
    """One value per example; for the forget set by the run's row of the table."""
    if part.name != "forget":
        return losses.nll(answers)
    row, records = run.config.loss, torch.tensor(part.records, device=run.device)
    columns = (column.chunk(len(row.reads)) for column in answers)
    now = {kind: AnswerLogProbs(*pair) for kind, pair in zip(row.reads, zip(*columns, strict=True), strict=True)}
    before = {kind: AnswerLogProbs(*(column[records] for column in run.reference[kind])) for kind in row.reference}
    if run.config.whole_batch:
        now, before = ({k: losses.batch_mean(v) for k, v in side.items()} for side in (now, before))
    return row.function(now, {k: v._replace(sums=v.sums.float()) for k, v in before.items()}, run.config.eta)


def exchange_gradients(run: Setup, last: bool) -> Any:
    """Processes exchange gradients in the last pass of an update only, or, sharded, in each: a sum would be whole."""
    alone = last or run.config.shard or run.accelerator.num_processes == 1
    return nullcontext() if alone else run.scorer.no_sync()  # type: ignore[operator]
