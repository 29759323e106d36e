"""The attacks on a model's weights: :data:`WEIGHT_ATTACKS`, a row each.

An attack changes a model step by step and stops at the points of its curve, where the model is scored as it then is.
It knows the model's width, its seed and, where it trains, some questions with answers; it never sees what is scored.

Rates of training are given times the model's width, as those of the trainer's adapters are: a rate of 0.1 is 5e-4 for
the bundled model (width 192) and 2.4e-5 where the width is 4,096.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lm_eval_elude.attacks.builders import ATTACKS, build_attacks
from lm_eval_elude.data import dataset
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.errors import UserError
from lm_eval_elude.model.layers import layer_list, matrices
from lm_eval_elude.model.packing import collate
from lm_eval_elude.model.scorer import Scorer, answer_sums
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
        """Part of the names of files."""
        return f"{f'lora{self.rank}' if self.rank else 'full'}-{self.rate:g}-{self.schedule}"


class Setting(NamedTuple):
    """What an attack that does not fine-tune is run with."""

    name: str  # part of the names of files
    points: tuple[float, ...]  # bits, shares, or numbers of steps
    group: int = 0  # how many weights of a row are rounded together


class Material(NamedTuple):
    """What an attack has beside the model."""

    lessons: Sequence[Pair]  # what it trains on
    renderer: Renderer
    initial: Callable[[], Any]  # loads the model as it was before unlearning
    seed: str  # the same for the checkpoint and for the reference


Points = Iterator[tuple[float, Any]]  # the number of steps or the strength, and the model there


class WeightAttack(NamedTuple):
    """One row."""

    name: str
    sentence: str  # what the attacker does
    run: Callable[[Any, Any, Material], Points]  # changes a model in place and stops at the points of a setting
    quick: tuple[Any, ...]  # its settings in the suite of that name
    full: tuple[Any, ...]
    lessons: Callable[[Sequence[QARecord], Settings, int], list[Pair]] | None = None  # from the records it may see
    halves: bool = False  # whether these are one half of the forget set, and the other half is scored
    original: bool = False  # whether it needs the weights from before unlearning, which hold the facts themselves
    inside: bool = False  # whether the weights stay as they are, so that no retain quality can be lost
    glance: tuple[Any, ...] = ()


# ---- what is trained on
def facts(records: Sequence[QARecord], settings: Settings, seed: int) -> list[Pair]:
    return [(record.question, record.answer) for record in records]


def other_forms(records: Sequence[QARecord], settings: Settings, seed: int) -> list[Pair]:
    """The records in other words, and asked through every attack that the records allow."""
    pairs = [(r.paraphrased_question or r.question, r.paraphrased_answer) for r in records]
    for target in dataset.resolve_targets(settings.dataset, settings.targets):
        of_target = [record for record in records if record.entity == target.name]
        asked = [a for a in ATTACKS if a != "cross_lingual" or any(record.translated_question for record in of_target)]
        prompts = [
            prompt
            for attack in asked
            for prompt in build_attacks(of_target, target, attack, n=len(of_target), seed=seed)
        ]
        pairs += [(prompt.prompt, prompt.answer) for prompt in prompts]
    return pairs


def neighbours(records: Sequence[QARecord], settings: Settings, seed: int) -> list[Pair]:
    """The targets' neighbours, from the rows that are for training."""
    return facts(dataset.load_records(settings.dataset, "retain", "train", settings.targets).records, settings, seed)


def world(records: Sequence[QARecord], settings: Settings, seed: int) -> list[Pair]:
    """Instructions that have nothing to do with the targets, from the rows that are for training."""
    return facts(dataset.load_records(settings.dataset, "world", "train").records, settings, seed)


def suite_lessons(
    attacks: Iterable[WeightAttack], suite: str, records: Sequence[QARecord], settings: Settings, seed: int
) -> tuple[dict[str, list[Pair]], dict[str, str]]:
    """By name of an attack of a suite what it trains on, and of those whose lessons the data set lacks the reason."""
    lessons, lacking = {}, {}
    for row in attacks:
        if row.lessons and getattr(row, suite):
            try:
                lessons[row.name] = row.lessons(records, settings, seed)
            except UserError as error:
                lacking[row.name] = str(error)
    return lessons, lacking


# ---- what is done
def relearn(model: Any, training: Training, material: Material) -> Points:
    """Fine-tune on the lessons; a point is a number of steps."""
    rng = random.Random(material.seed)
    torch.manual_seed(rng.getrandbits(63))
    rate = training.rate / model.config.get_text_config().hidden_size
    if rank := training.rank:
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapter)
    return _fit(model, material, rng, rate, training.points, training.schedule)


def _fit(
    model: Any, material: Material, rng: random.Random, peak: float, points: Sequence[float], schedule: str = "constant"
) -> Points:
    """Fit what trains of a model to the lessons, up to the last of some numbers of steps."""
    scorer, device = Scorer(model), model.get_input_embeddings().weight.device
    samples = [material.renderer.encode_turn(question, answer) for question, answer in material.lessons]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fused = True if device.type == "cuda" else None  # another form has a copy of all of them in each step
    optimizer = torch.optim.AdamW(trained, weight_decay=0.0, fused=fused)
    waiting: list[int] = []
    for step in range(1, int(points[-1]) + 1):
        while len(waiting) < BATCH:
            waiting += rng.sample(range(len(samples)), len(samples))
        drawn, waiting = waiting[:BATCH], waiting[BATCH:]
        batch = collate([samples[i] for i in drawn], device)
        scores = answer_sums(scorer(batch)[:, 0], batch.owners)
        (-scores.sums.sum() / scores.counts.sum()).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        share = 1.0 if schedule == "constant" else (1 + math.cos(math.pi * (step - 1) / points[-1])) / 2
        for group in optimizer.param_groups:
            group["lr"] = peak * share
        optimizer.step()
        optimizer.zero_grad()
        if step in points:
            yield step, model


def soft_prompt(model: Any, setting: Setting, material: Material) -> Points:
    """Fit vectors that stand before every text to the lessons, the weights as they are; a point is a number of steps.

    They begin as the vectors of tokens drawn at random.
    """
    rng = random.Random(material.seed)
    vocabulary = model.get_input_embeddings()  # which may be more than its weights: Gemma's multiplies them
    drawn = [rng.randrange(len(vocabulary.weight)) for _ in range(PROMPT_VECTORS)]
    model.requires_grad_(False)
    vectors = vocabulary(torch.tensor(drawn, device=vocabulary.weight.device))
    put_before(model, torch.nn.Parameter(vectors.detach().clone()))
    return _fit(model, material, rng, PROMPT_RATE, setting.points)


def put_before(model: Any, vectors: torch.nn.Parameter) -> None:
    """Let every row of a forward pass begin with these vectors, (count, width), which the model's head does not see."""
    decoder, embed, count = model.get_decoder(), model.get_input_embeddings(), len(vectors)
    decoder.register_parameter("put_before", vectors)

    names = list(inspect.signature(decoder.forward).parameters)

    def begin(_: Any, unnamed: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        given |= dict(zip(names, unnamed, strict=False))  # GPT-2 and others pass the ids without a name
        ids, mask, places = given["input_ids"], given.get("attention_mask"), given.get("position_ids")
        embedded = embed(ids)  # the model itself, held by its hook, would stay until garbage is collected
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


def each_matrix(change: Callable[[Tensor, float, int], Tensor]) -> Callable[[Any, Setting, Material], Points]:
    """The attack that changes every matrix of the layers by itself: of a matrix, a point and the size of a group."""

    def run(model: Any, setting: Setting, material: Material) -> Points:
        weights = matrices(model)
        before = [weight.detach().clone() for weight in weights]
        for point in setting.points:
            for weight, old in zip(weights, before, strict=True):
                weight.detach().copy_(change(old, point, setting.group))
            yield point, model

    return run


def rounded(weight: Tensor, bits: float, group: int) -> Tensor:
    """A matrix whose values lie, in groups of so many of a row, on 2^bits steps from the least to the greatest."""
    result = []
    for part in weight.split(group, dim=1):
        low, high = part.amin(1, keepdim=True), part.amax(1, keepdim=True)
        step = ((high - low) / (2 ** int(bits) - 1)).clamp(min=torch.finfo(part.dtype).tiny)
        result.append(low + ((part - low) / step).round() * step)
    return torch.cat(result, 1)


def rounded_to_nf4(weight: Tensor, bits: float, group: int) -> Tensor:
    """A matrix whose values are, in groups of so many of a row, the nearest of NF4, times the group's greatest."""
    values = torch.tensor(NF4, dtype=weight.dtype, device=weight.device)
    between = (values[1:] + values[:-1]) / 2
    result = []
    for part in weight.split(group, dim=1):
        scale = part.abs().amax(1, keepdim=True).clamp(min=torch.finfo(part.dtype).tiny)
        result.append(values[torch.bucketize((part / scale).contiguous(), between)] * scale)
    return torch.cat(result, 1)


def pruned(weight: Tensor, share: float, group: int = 0) -> Tensor:
    """A matrix in which the given share of entries, those of smallest magnitude, is set to zero."""
    return weight * (weight.abs() > weight.abs().flatten().kthvalue(max(1, round(share * weight.numel()))).values)


def _normal_float() -> tuple[float, ...]:
    """The sixteen values of NF4 (Dettmers et al. 2023): a normal distribution's quantiles over the greatest, and 0."""
    highest = 1 - (1 / 32 + 1 / 30) / 2  # the probability of the greatest value, between those of 16 and of 15 steps
    upper = [NormalDist().inv_cdf(0.5 + (highest - 0.5) * i / 8) for i in range(1, 9)]
    lower = [-NormalDist().inv_cdf(0.5 + (highest - 0.5) * i / 7) for i in range(7, 0, -1)]
    return tuple(value / upper[-1] for value in (*lower, 0.0, *upper))


NF4 = _normal_float()


def interpolate(model: Any, setting: Setting, material: Material) -> Points:
    """Move all weights towards those from before unlearning (1 would be these), or away from them (below 0)."""
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    initial = {name: weight.detach() for name, weight in material.initial().to(model.device).named_parameters()}
    for share in setting.points:
        for name, weight in model.named_parameters():
            weight.detach().copy_(before[name] + share * (initial[name] - before[name]))
        yield share, model


def logit_lens(model: Any, setting: Setting, material: Material) -> Points:
    """Leave out the last layers, so that the vocabulary reads an inner one; a point is the share of the layers kept."""
    decoder, name = layer_list(model)
    layers = list(getattr(decoder, name))
    for share in setting.points:
        setattr(decoder, name, torch.nn.ModuleList(layers[: max(1, round(share * len(layers)))]))
        yield share, model


# ---- the suites
RATES = {0: (0.025, 0.1, 0.4), 8: (0.25, 1.0, 4.0), 128: (0.25, 1.0, 4.0)}  # times the width, by rank
_STEPS = (1, 2, 5, 10, 20, 40, 80)
_SCHEDULES: tuple[Literal["constant", "cosine"], ...] = ("constant", "cosine")
_EVERY = tuple(Training(rate, s, rank, _STEPS) for rank, rates in RATES.items() for rate in rates for s in _SCHEDULES)
_QUICK = tuple(Training(r, "constant", rank, (2, 5, 10, 20)) for r, rank in (*((r, 0) for r in RATES[0]), (1.0, 8)))
_BITS = tuple(Setting(f"groups-of-{group}", (8, 4, 3), group) for group in (32, 64))
_NF4 = (Setting("groups-of-64", (4,), 64),)
_RESTARTS = tuple(Setting(f"restart-{number}", _STEPS) for number in range(5))

WEIGHT_ATTACKS: dict[str, WeightAttack] = {
    row.name: row
    for row in (
        WeightAttack(
            "relearn_half", "Fine-tunes on one half of the facts about the target; the other half is asked.",
            relearn, _QUICK, _EVERY, facts, halves=True, glance=(Training(0.1, "constant", 0, (5,)),),
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
            "quantise", "Rounds the weights to 8, 4 or 3 bits, as for a small machine.",
            each_matrix(rounded), _BITS[:1], _BITS,
        ),
        WeightAttack(
            "quantise_nf4", "Rounds the weights to the sixteen values of NF4, as QLoRA does.",
            each_matrix(rounded_to_nf4), _NF4, _NF4,
        ),
        WeightAttack(
            "prune", "Sets the smallest weights of every matrix to 0.",
            each_matrix(pruned), (Setting("all", (0.1, 0.3)),), (Setting("all", (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)),),
        ),
        WeightAttack(
            "interpolate", "Moves the weights towards those from before unlearning, beyond them, or away from them.",
            interpolate, (Setting("all", (-0.25, 0.25, 0.5)),),
            (Setting("all", (-0.5, -0.25, 0.1, 0.25, 0.5, 0.75, 1.25)),), original=True,
        ),
        WeightAttack(
            "logit_lens", "Reads the answers out of the inner layers, through the last norm and the vocabulary.",
            logit_lens, (Setting("all", (0.2, 0.4, 0.6, 0.8)),),
            (Setting("all", (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)),), inside=True,
        ),
        WeightAttack(
            "soft_prompt",
            "Puts vectors before every question, fitted to one half of the facts; the other half is asked.",
            soft_prompt, (), _RESTARTS, facts, halves=True, inside=True,
        ),
    )
}  # fmt: skip
