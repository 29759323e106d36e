"""The attacks on a model's weights: :data:`WEIGHT_ATTACKS`, a row each.

An attack changes a model step by step and stops at the points of its curve, where the model is scored as it then is.
It knows the model's width, its seed and, where it trains, some questions with answers; it never sees what is scored.

Rates of training are given times the model's width, as those of the trainer's adapters are: a rate of 0.1 is 5e-4 for
the bundled model (width 192) and 2.4e-5 where the width is 4,096.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lm_eval_elude.attacks.builders import ATTACKS, build_attacks
from lm_eval_elude.data import dataset
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.model.packing import collate
from lm_eval_elude.model.scorer import Scorer, answer_sums, matrices
from lm_eval_elude.scoring.settings import Settings
from lm_eval_elude.text.chat import Renderer

Pair = tuple[str, str]  # a question and its answer
BATCH = 8
PROMPT_VECTORS, PROMPT_RATE = 20, 0.01  # of a soft prompt, as published


class Training(NamedTuple):
    """How a model is fine-tuned: AdamW without decay on batches of eight, gradients clipped to norm 1."""

    rate: float  # the peak, times the model's width
    schedule: Literal["constant", "cosine"]
    rank: int  # of the LoRA adapter; 0 trains all weights
    points: tuple[int, ...]  # numbers of steps after which the model is scored; the last one ends the run

    @property
    def name(self) -> str:
        """Short, as the name of a file."""
        return f"{f'lora{self.rank}' if self.rank else 'full'}-{self.rate:g}-{self.schedule}"


class Restart(NamedTuple):
    """One of several soft prompts, each learnt from another beginning."""

    number: int
    points: tuple[int, ...]  # numbers of steps after which the model is scored; the last one ends the run

    @property
    def name(self) -> str:
        """Short, as the name of a file."""
        return f"restart-{self.number}"


class Strength(NamedTuple):
    """How strongly the weights are changed at each point, and in groups of how many where it is in groups."""

    points: tuple[float, ...]
    group: int = 0

    @property
    def name(self) -> str:
        """Short, as the name of a file."""
        return f"groups-of-{self.group}" if self.group else "all"


class Material(NamedTuple):
    """What an attack has beside the model."""

    lessons: Sequence[Pair]  # what it trains on
    renderer: Renderer
    initial: Callable[[], Any]  # loads the model as it was before unlearning
    seed: str  # the same for the checkpoint and for the reference


Points = Iterator[tuple[float, Any]]  # the number of steps or the strength, and the model there


class WeightAttack(NamedTuple):
    """One row.

    Attributes:
        name: as it is reported.
        sentence: what the attacker does.
        run: changes a model in place and yields the points of the curve.
        quick: its settings in the suite ``quick``.
        full: its settings in the suite ``full``.
        lessons: what it trains on, from the records that it may see; None where it trains on nothing.
        halves: whether those are one half of the forget set, and the other half is scored.
        original: whether it needs the weights from before unlearning, which hold the facts themselves.
        inside: whether the weights stay as they are, so that what is kept of the retain quality does not matter.
        glance: its settings in the suite ``glance``, a first look that takes seconds on the bundled model.
    """

    name: str
    sentence: str
    run: Callable[[Any, Any, Material], Points]
    quick: tuple[Any, ...]
    full: tuple[Any, ...]
    lessons: Callable[[Sequence[QARecord], Settings, int], list[Pair]] | None = None
    halves: bool = False
    original: bool = False
    inside: bool = False
    glance: tuple[Any, ...] = ()


# ---- what is trained on
def facts(records: Sequence[QARecord], settings: Settings, seed: int) -> list[Pair]:
    """The records themselves."""
    return [(record.question, record.answer) for record in records]


def other_forms(records: Sequence[QARecord], settings: Settings, seed: int) -> list[Pair]:
    """The records in other words, and asked through every attack that the records allow."""
    pairs = [(r.paraphrased_question or r.question, r.paraphrased_answer) for r in records]
    for target in dataset.resolve_targets(settings.dataset, settings.targets):
        its = [record for record in records if record.entity == target.name]
        asked = [a for a in ATTACKS if a != "cross_lingual" or any(record.translated_question for record in its)]
        prompts = [prompt for attack in asked for prompt in build_attacks(its, target, attack, n=len(its), seed=seed)]
        pairs += [(prompt.prompt, prompt.answer) for prompt in prompts]
    return pairs


def neighbours(records: Sequence[QARecord], settings: Settings, seed: int) -> list[Pair]:
    """The targets' neighbours, from the rows that are for training."""
    return facts(dataset.load_records(settings.dataset, "retain", "train", settings.targets).records, settings, seed)


def world(records: Sequence[QARecord], settings: Settings, seed: int) -> list[Pair]:
    """Instructions that have nothing to do with the targets, from the rows that are for training."""
    return facts(dataset.load_records(settings.dataset, "world", "train").records, settings, seed)


# ---- what is done
def relearn(model: Any, training: Training, material: Material) -> Points:
    """Fine-tune on the lessons; a point is a number of steps."""
    rng = random.Random(material.seed)
    torch.manual_seed(rng.getrandbits(63))
    width = model.config.get_text_config().hidden_size
    if training.rank:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model,
            LoraConfig(
                r=training.rank, lora_alpha=2 * training.rank, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
        )
    for step in _fit(model, material, rng, training.rate / width, training.schedule, training.points[-1]):
        if step in training.points:
            yield step, model


def _fit(
    model: Any, material: Material, rng: random.Random, peak: float, schedule: Literal["constant", "cosine"], steps: int
) -> Iterator[int]:
    """Fit what trains of a model to the lessons; the number of each step when it is done."""
    scorer, renderer, device = Scorer(model), material.renderer, model.get_input_embeddings().weight.device
    samples = [renderer.encode_pair(renderer.prompt(q), renderer.answer(a)) for q, a in material.lessons]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, weight_decay=0.0)
    waiting: list[int] = []
    for step in range(1, steps + 1):
        while len(waiting) < BATCH:
            waiting += rng.sample(range(len(samples)), len(samples))
        drawn, waiting = waiting[:BATCH], waiting[BATCH:]
        batch = collate([samples[i] for i in drawn], device)
        scores = answer_sums(scorer(batch)[:, 0], batch.owners)
        (-scores.sums.sum() / scores.counts.sum()).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        share = 1.0 if schedule == "constant" else (1 + math.cos(math.pi * (step - 1) / steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = peak * share
        optimizer.step()
        optimizer.zero_grad()
        yield step


def soft_prompt(model: Any, restart: Restart, material: Material) -> Points:
    """Fit vectors that stand before every text to the lessons, the weights as they are; a point is a number of steps.

    They begin as the vectors of tokens drawn at random.
    """
    rng = random.Random(material.seed)
    vocabulary = model.get_input_embeddings().weight
    drawn = [rng.randrange(len(vocabulary)) for _ in range(PROMPT_VECTORS)]
    model.requires_grad_(False)
    put_before(model, torch.nn.Parameter(vocabulary[drawn].detach().clone()))
    for step in _fit(model, material, rng, PROMPT_RATE, "constant", restart.points[-1]):
        if step in restart.points:
            yield step, model


def put_before(model: Any, vectors: torch.nn.Parameter) -> None:
    """Let every row of a forward pass begin with these vectors, (count, width), which the model's head does not see."""
    decoder, count = model.get_decoder(), len(vectors)
    decoder.register_parameter("put_before", vectors)

    def begin(_: Any, __: Any, given: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        ids, mask, places = given["input_ids"], given.get("attention_mask"), given.get("position_ids")
        embedded = model.get_input_embeddings()(ids)
        given |= {"input_ids": None, "inputs_embeds": torch.cat([vectors.expand(len(ids), -1, -1), embedded], 1)}
        if places is not None:
            first = torch.arange(count, device=ids.device).expand(len(ids), -1)
            given["position_ids"] = torch.cat([first, places + count], 1)
        if mask is not None:  # what sees itself sees the vectors, too, which see those before them
            seen = mask.amax() if mask.dtype != torch.bool else True
            whole = torch.nn.functional.pad(mask, (count, 0, count, 0), value=seen)
            later = torch.ones(count, whole.shape[-1], dtype=torch.bool, device=ids.device).triu(1)
            whole[:, :, :count].masked_fill_(later, mask.amin())
            given["attention_mask"] = whole
        return (), given

    def end(_: Any, __: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[:, count:]
        return output

    decoder.register_forward_pre_hook(begin, with_kwargs=True)
    decoder.register_forward_hook(end)


def quantise(model: Any, strength: Strength, material: Material) -> Points:
    """Round every matrix to the nearest of 2^bits values, evenly spaced within each group; a point is the bits."""
    weights = matrices(model)
    before = [weight.detach().clone() for weight in weights]
    for bits in strength.points:
        _set(weights, (rounded(weight, int(bits), strength.group) for weight in before))
        yield bits, model


def rounded(weight: Tensor, bits: int, group: int) -> Tensor:
    """A matrix whose values lie, in groups of so many of a row, on 2^bits steps from the least to the greatest."""
    parts = weight.split(group, dim=1)
    result = []
    for part in parts:
        low, high = part.amin(1, keepdim=True), part.amax(1, keepdim=True)
        step = ((high - low) / (2**bits - 1)).clamp(min=torch.finfo(part.dtype).tiny)
        result.append(low + ((part - low) / step).round() * step)
    return torch.cat(result, 1)


def quantise_nf4(model: Any, strength: Strength, material: Material) -> Points:
    """Round every matrix to the sixteen values of NF4 times the greatest of each group; a point is 4 bits."""
    weights = matrices(model)
    _set(weights, [rounded_to(weight, NF4, strength.group) for weight in weights])
    yield strength.points[0], model


def rounded_to(weight: Tensor, code: Sequence[float], group: int) -> Tensor:
    """A matrix whose values are, in groups of so many of a row, the nearest of a code, times the group's greatest."""
    values = torch.tensor(code, dtype=weight.dtype, device=weight.device)
    between = (values[1:] + values[:-1]) / 2
    result = []
    for part in weight.split(group, dim=1):
        scale = part.abs().amax(1, keepdim=True).clamp(min=torch.finfo(part.dtype).tiny)
        result.append(values[torch.bucketize((part / scale).contiguous(), between)] * scale)
    return torch.cat(result, 1)


def _normal_float() -> tuple[float, ...]:
    """The sixteen values of NF4 (Dettmers et al. 2023): a normal distribution's quantiles over the greatest, and 0."""
    highest = 1 - (1 / 32 + 1 / 30) / 2  # the probability of the greatest value, between those of 16 and of 15 steps
    upper = [NormalDist().inv_cdf(0.5 + (highest - 0.5) * i / 8) for i in range(1, 9)]
    lower = [-NormalDist().inv_cdf(0.5 + (highest - 0.5) * i / 7) for i in range(7, 0, -1)]
    return tuple(value / upper[-1] for value in (*lower, 0.0, *upper))


NF4 = _normal_float()


def prune(model: Any, strength: Strength, material: Material) -> Points:
    """Set the smallest weights of every matrix to 0; a point is their share."""
    weights = matrices(model)
    for share in strength.points:
        kept = (w.abs() > w.abs().flatten().kthvalue(max(1, round(share * w.numel()))).values for w in weights)
        _set(weights, [weight * keep for weight, keep in zip(weights, kept, strict=True)])
        yield share, model


def interpolate(model: Any, strength: Strength, material: Material) -> Points:
    """Move all weights towards those from before unlearning (1 would be these), or away from them (below 0)."""
    weights = dict(model.named_parameters())
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    initial = dict(material.initial().to(model.device).named_parameters())
    for share in strength.points:
        _set(weights.values(), (old + share * (initial[name] - old) for name, old in before.items()))
        yield share, model


def logit_lens(model: Any, strength: Strength, material: Material) -> Points:
    """Leave out the last layers, so that the vocabulary reads an inner one; a point is the share of the layers kept."""
    decoder = model.get_decoder()
    layers = list(decoder.layers)
    for share in strength.points:
        decoder.layers = torch.nn.ModuleList(layers[: max(1, round(share * len(layers)))])
        yield share, model


@torch.no_grad()
def _set(weights: Any, values: Any) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)


# ---- the suites
_SCHEDULES: tuple[Literal["constant", "cosine"], ...] = ("constant", "cosine")
RATES = {0: (0.025, 0.1, 0.4), 8: (0.25, 1.0, 4.0), 128: (0.25, 1.0, 4.0)}  # times the width, by rank
_STEPS = (1, 2, 5, 10, 20, 40, 80)
_EVERY = tuple(
    Training(rate, s, rank, _STEPS) for rank, rates in RATES.items() for rate, s in product(rates, _SCHEDULES)
)
_BITS = tuple(Strength((8, 4, 3), group) for group in (32, 64))
_HALF = "Fine-tunes on one half of the facts about the target; the other half is asked."

WEIGHT_ATTACKS: dict[str, WeightAttack] = {
    row.name: row
    for row in (
        WeightAttack(
            "relearn_half", _HALF, relearn,
            (*(Training(rate, "constant", 0, (2, 5, 10, 20)) for rate in RATES[0]),
             Training(1.0, "constant", 8, (2, 5, 10, 20))),
            _EVERY, facts, halves=True, glance=(Training(0.1, "constant", 0, (5,)),),
        ),
        WeightAttack(
            "relearn_forms",
            "Fine-tunes on one half of the facts, reworded and asked in other forms; the other half is asked.",
            relearn, (), _EVERY, other_forms, halves=True,
        ),
        WeightAttack(
            "relearn_neighbours", "Fine-tunes on facts about the target's neighbours.",
            relearn, (Training(0.1, "constant", 0, (5, 20)),), _EVERY, neighbours,
        ),
        WeightAttack(
            "relearn_world", "Fine-tunes on instructions that have nothing to do with the target.",
            relearn, (), _EVERY, world,
        ),
        WeightAttack(
            "quantise", "Rounds the weights to 8, 4 or 3 bits, as who runs a model on a small machine does.",
            quantise, _BITS[:1], _BITS,
        ),
        WeightAttack(
            "quantise_nf4", "Rounds the weights to the sixteen values of NF4, as who fine-tunes with QLoRA does.",
            quantise_nf4, (Strength((4,), 64),), (Strength((4,), 64),),
        ),
        WeightAttack(
            "prune", "Sets the smallest weights of every matrix to 0.",
            prune, (Strength((0.1, 0.3)),), (Strength((0.05, 0.1, 0.2, 0.3, 0.4, 0.5)),),
        ),
        WeightAttack(
            "interpolate", "Moves the weights back towards those from before unlearning, or further away from them.",
            interpolate, (Strength((-0.25, 0.25, 0.5)),), (Strength((-0.5, -0.25, 0.1, 0.25, 0.5, 0.75)),),
            original=True,
        ),
        WeightAttack(
            "soft_prompt",
            "Puts vectors before every question, fitted to one half of the facts; the other half is asked.",
            soft_prompt, (), tuple(Restart(number, _STEPS) for number in range(5)), facts, halves=True, inside=True,
        ),
        WeightAttack(
            "logit_lens", "Reads the answers out of the inner layers, through the last norm and the vocabulary.",
            logit_lens, (Strength((0.2, 0.4, 0.6, 0.8)),), (Strength((0.2, 0.4, 0.6, 0.8, 0.9)),),
            inside=True,
        ),
    )
}  # fmt: skip
