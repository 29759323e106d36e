"""Attacks on a model's weights, a function each: it changes a model step by step and stops at the points of a curve.

Learning rates are given times the model's width: 0.1 is 6e-4 for the bundled model (width 160) and 2.4e-5 where the
width is 4,096. An attack never sees what is scored.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from lm_eval_elude.attacks.builders import ATTACKS, build_attacks
from lm_eval_elude.data import dataset
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.model.layers import layers_of, matrices, with_adapter
from lm_eval_elude.model.packing import collate
from lm_eval_elude.model.scorer import Scorer, answer_sums
from lm_eval_elude.tasks.elude import EludeSettings
from lm_eval_elude.text.chat import Renderer

BATCH, GROUP, RANK = 8, 32, 16
RATES = {0: 0.1, RANK: 1.0}  # the middle rate times the width, by rank of the adapter; 0 trains all weights
Pair = tuple[str, str]  # a question and its answer
Points = Iterator[tuple[float, Any]]  # steps, bits or a share, and the model there


class Setting(NamedTuple):
    """What an attack is run with.

    Attributes:
        points: where the model is scored: numbers of steps, bits, or shares.
        rate: of training, times the width; rank: of the LoRA adapter, 0 for all weights.
    """

    points: tuple[float, ...]
    rate: float = 0.0
    rank: int = 0

    @property
    def name(self) -> str:
        return f"{f'LoRA {self.rank}' if self.rank else 'full'} at {self.rate:g} / width" if self.rate else ""


# ---- what is trained on
def facts(records: Sequence[QARecord], settings: EludeSettings) -> list[Pair]:
    return [(record.question, record.answer) for record in records]


def reworded(records: Sequence[QARecord], settings: EludeSettings) -> list[Pair]:
    """The records in other words, and asked through every attack that they allow."""
    pairs = [(r.paraphrased_question or r.question, r.paraphrased_answer) for r in records if r.paraphrased_answer]
    for target in settings.resolved():
        own = [record for record in records if record.entity == target.name]
        for attack in ATTACKS:
            if own and (attack != "cross_lingual" or any(record.translated_question for record in own)):
                prompts = build_attacks(own, target, attack, n=len(own), seed=settings.seed)
                pairs += [(prompt.prompt, prompt.answer) for prompt in prompts]
    return pairs


def neighbours(records: Sequence[QARecord], settings: EludeSettings) -> list[Pair]:
    """The targets' neighbours, from the rows that are for training."""
    return facts(dataset.load_records(settings.dataset, "retain", "train", settings.targets).records, settings)


def world(records: Sequence[QARecord], settings: EludeSettings) -> list[Pair]:
    """Instructions that have nothing to do with the targets, from the rows that are for training."""
    return facts(dataset.load_records(settings.dataset, "world", "train").records, settings)


# ---- what is done
def relearn(model: Any, setting: Setting, pairs: Sequence[Pair], renderer: Renderer, seed: str) -> Points:
    """Fine-tune: AdamW without decay, constant rate, batches of eight, gradients clipped to norm 1."""
    rng = random.Random(seed)
    torch.manual_seed(rng.getrandbits(63))
    rate, base = setting.rate / model.config.get_text_config().hidden_size, model
    if setting.rank:
        model, _ = with_adapter(base, setting.rank)
    else:
        model.requires_grad_(True)
    scorer, device = Scorer(model), base.get_input_embeddings().weight.device
    samples = [renderer.encode_turn(question, answer) for question, answer in pairs]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0, fused=True)
    waiting: list[int] = []
    try:
        for step in range(1, int(setting.points[-1]) + 1):
            while len(waiting) < BATCH:
                waiting += rng.sample(range(len(samples)), len(samples))
            drawn, waiting = waiting[:BATCH], waiting[BATCH:]
            batch = collate([samples[i] for i in drawn], device)
            scores = answer_sums(scorer(batch)[:, 0], batch.owners)
            (-scores.sums.sum() / scores.counts.sum()).backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step in setting.points:
                yield step, model
    finally:
        if setting.rank:
            model.unload()
        base.requires_grad_(False)


@torch.no_grad()
def quantise(model: Any, setting: Setting, pairs: Sequence[Pair], renderer: Renderer, seed: str) -> Points:
    """Round every matrix of the layers to 2^bits steps between least and greatest, in groups of 32 values of a row."""
    before = [weight.detach().to("cpu", copy=True) for weight in matrices(model)]
    for bits in setting.points:
        for weight, old in zip(matrices(model), before, strict=True):
            weight.detach().copy_(rounded(old.to(weight.device), int(bits)))
        yield bits, model


def rounded(weight: Tensor, bits: int) -> Tensor:
    """A matrix with its rounded values, (rows, columns)."""
    parts = []
    for part in weight.split(GROUP, dim=1):
        low, high = part.amin(1, keepdim=True), part.amax(1, keepdim=True)
        step = ((high - low) / (2**bits - 1)).clamp(min=torch.finfo(part.dtype).tiny)
        parts.append(low + ((part - low) / step).round() * step)
    return torch.cat(parts, 1)


def pruned(model: Any, setting: Setting, pairs: Sequence[Pair], renderer: Renderer, seed: str) -> Points:
    """Set the smallest weights of every matrix of the layers to 0; the shares must rise."""
    for share in setting.points:
        for module in layers_of(model).modules():
            if getattr(module, "weight", None) is not None and module.weight.ndim == 2:
                prune.l1_unstructured(module, "weight", amount=share)
                prune.remove(module, "weight")
        yield share, model


class Attack(NamedTuple):
    """One attack; ``halves`` says that it trains on one half of the forget records while the other half is asked."""

    sentence: str
    run: Callable[[Any, Setting, Sequence[Pair], Renderer, str], Points]
    pairs: Callable[[Sequence[QARecord], EludeSettings], list[Pair]] | None = None
    halves: bool = False


WEIGHT_ATTACKS: dict[str, Attack] = {
    "relearn_half": Attack("Fine-tuning on one half of the facts; the other half is asked.", relearn, facts, True),
    "relearn_reworded": Attack(
        "Fine-tuning on one half of the facts, reworded and asked through attacks; the other half is asked.",
        relearn, reworded, True,
    ),
    "relearn_neighbours": Attack("Fine-tuning on facts about the target's neighbours.", relearn, neighbours),
    "relearn_world": Attack("Fine-tuning on instructions that have nothing to do with the target.", relearn, world),
    "quantise": Attack("Rounding the weights to 8, 4 or 3 bits.", quantise),
    "prune": Attack("Setting the smallest weights to 0.", pruned),
}  # fmt: skip


def suite(name: str, rank: int) -> list[tuple[str, Setting]]:
    """The attacks of ``smoke`` or ``standard`` with their settings."""
    middle = RATES[rank]
    if name == "smoke":
        return [("relearn_half", Setting((5,), middle, rank))]
    return [
        *(("relearn_half", Setting((5, 20, 80), rate, rank)) for rate in (middle / 4, middle, 4 * middle)),
        *((f"relearn_{kind}", Setting((5, 20), middle, rank)) for kind in ("reworded", "neighbours", "world")),
        ("quantise", Setting((8, 4, 3))),
        ("prune", Setting((0.1, 0.3))),
    ]
