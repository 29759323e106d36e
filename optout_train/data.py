"""Records to token ids to batches: what is trained on, in which order, and which tokens carry loss."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.sets import Subset
from lm_eval_elude.errors import UserError
from lm_eval_elude.text.chat import Encoded, Renderer
from optout_train.config import TrainConfig
from optout_train.sources import Source

KEPT: tuple[Subset, ...] = ("retain", "world")
SUBSETS: tuple[Subset, ...] = ("forget", *KEPT)
# Tokens of one pass on a CPU: enough for its matrix products, few enough to pad little and stay near the caches.
CPU_PASS = 768


class Lesson(NamedTuple):
    """A sequence with what each of its last tokens is to become, made with the initial model before training.

    Attributes:
        ids, answer_start: as in ``Encoded``; what is distilled starts where its set's questions differ.
        bounds: (tokens, 2) the log-probabilities that a token is to be between, NaN where it is taught.
        top, shares: the teacher's likeliest tokens and their probabilities.
    """

    ids: list[int]
    answer_start: int
    bounds: Tensor
    top: Tensor
    shares: Tensor


class Steered(NamedTuple):
    """A sequence with the states that RMU draws its last tokens' to, (tokens, width), or (1, width) for all of them."""

    ids: list[int]
    answer_start: int
    states: Tensor


Sample = Encoded | Lesson | Steered


class StepIndices(NamedTuple):
    """Which records one step reads; the refusal set is indexed as the forget set."""

    forget: tuple[int, ...]
    retain: tuple[int, ...]
    world: tuple[int, ...]


class Pass(NamedTuple):
    """One forward and backward pass of a step: its set, records, their samples and each record's weight in the mean.

    Where a record brings several samples, the first of all records come first, then the second of all.
    """

    name: Subset
    records: tuple[int, ...]
    samples: tuple[Sample, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True)
class EncodedRecords:
    """Records with their token ids, rendered when first asked for.

    UserError where a sample is longer than the model's context; nothing is cut.
    """

    name: str
    records: tuple[QARecord, ...]
    renderer: Renderer
    limit: int

    _cache: dict[tuple[int, str | None], Encoded] = field(default_factory=dict, init=False, repr=False)

    def encode(self, index: int, answer: str | None = None) -> Encoded:
        """Prompt and answer (the record's own unless another is given) as token ids."""
        key = (index, answer)
        if key not in self._cache:
            record = self.records[index]
            encoded = self.renderer.encode_turn(record.question, answer or record.answer)
            if len(encoded.ids) > self.limit:
                raise UserError(
                    f"{self.name} record {index + 1} ({record.question[:60]!r}) has {len(encoded.ids)} tokens, but "
                    f"--model takes {self.limit}; shorten or remove it"
                )
            self._cache[key] = encoded
        return self._cache[key]

    def encode_all(self) -> list[Encoded]:
        """Every record with its own answer."""
        return [self.encode(index) for index in range(len(self))]

    def __len__(self) -> int:
        return len(self.records)


class TrainingData(NamedTuple):
    """What a run reads.

    Attributes:
        forget, retain, world: the sets; those of weight 0 are empty.
        sequences: what a forget loss may read of each forget record, by name: its answer, a refusal drawn for it, or
            what is made for it, of which it has several for the epochs to take turns in (all first, then all second).
        fingerprints: by name of the set.
        kept: of the sets that are distilled or steered, by name, what stands in the place of each record that is read.
    """

    forget: EncodedRecords
    retain: EncodedRecords
    world: EncodedRecords
    sequences: Mapping[str, Sequence[str | Lesson | Steered]]
    fingerprints: dict[str, str]
    kept: Mapping[Subset, Mapping[int, Lesson | Steered]] = MappingProxyType({})

    def samples(self, name: Subset, record: int, reads: Sequence[str]) -> tuple[Sample, ...]:
        """The sequences that a record of a set brings into its loss; ``reads`` says which in the forget set."""
        if name in self.kept:
            return (self.kept[name][record],)
        if name != "forget":
            return (getattr(self, name).encode(record),)
        sequences = (self.sequences[kind][record] for kind in reads)
        place = record % len(self.forget)  # where a record has several turns
        return tuple(self.forget.encode(place, s) if isinstance(s, str) else s for s in sequences)

    def plan(self, config: TrainConfig) -> list[list[StepIndices]]:
        """The records of every step, by epoch: see :func:`plan_steps`. Where records have turns, an epoch is one."""
        size, reads = len(self.forget), config.loss.reads
        turns = max([1, *(len(self.sequences.get(kind, ())) // max(size, 1) for kind in reads)])
        sizes = size, len(self.retain), len(self.world)
        plan = plan_steps(*sizes, config.epochs, config.batch_size, config.seed, config.retain_ratio)
        return [
            [step._replace(forget=tuple(i + size * (epoch % turns) for i in step.forget)) for step in steps]
            for epoch, steps in enumerate(plan)
        ]


def refusal_texts() -> tuple[str, ...]:
    """The hundred refusals that IDK and DPO teach (own wording, in the manner of TOFU's)."""
    return tuple(Path(__file__).with_name("refusals.txt").read_text(encoding="utf-8").split("\n")[:-1])


def load_training_data(
    config: TrainConfig, source: Source, renderer: Renderer, limit: int, say: Callable[[str], object] = str
) -> TrainingData:
    """Load what the configuration trains on; sets of weight 0 are not read. ``limit`` is the model's context in tokens.

    UserError where a set is missing (the flag that would do without it is named), or a sample is too long.
    """
    # What each set that a step draws from is made of: fine-tuning passes over all there is in the forget set's place.
    parts: dict[str, tuple[Subset, ...]] = {"forget": ("forget",)}
    if config.loss.learns:
        parts["forget"] = ("forget", "retain") if config.learn == "all" else ("retain",)
    parts |= {"retain": ("retain",) if config.retain_weight else (), "world": ("world",) if config.world_weight else ()}
    sets: dict[str, EncodedRecords] = {}
    fingerprints = {}
    for name, subsets in parts.items():
        records: list[QARecord] = []
        for subset in subsets:
            try:
                selection = source.load(subset, "train")
            except UserError as error:
                hint = "" if name == "forget" else f"; --{subset}-weight 0 trains without it"
                raise UserError(f"{error}{hint}") from None
            fingerprints[f"{subset}-train"] = selection.fingerprint
            records += selection.records
        sets[name] = EncodedRecords(f"{'+'.join(subsets)} train", tuple(records), renderer, limit)
    forget, texts, draw = sets["forget"], refusal_texts(), random.Random(f"{config.seed}-refusals")
    sequences = {
        "answer": [record.answer for record in forget.records],
        "refusal": [draw.choice(texts) for _ in forget.records],
    }
    return TrainingData(forget, sets["retain"], sets["world"], sequences, fingerprints)


def plan_steps(
    forget: int, retain: int, world: int, epochs: int, batch_size: int, seed: int, ratio: int = 1
) -> list[list[StepIndices]]:
    """The order of a whole run, a function of sizes and seed alone, so that a resumed run reads the same.

    Each epoch passes once over the forget set, shuffled; its last batch may be smaller. Every step reads ``ratio``
    times as many neighbours and world records, from an endless stream of shuffled passes over each set.
    """
    streams = [_endless(retain, f"{seed}-retain"), _endless(world, f"{seed}-world")]
    plan = []
    for epoch in range(epochs):
        order = random.Random(f"{seed}-forget-{epoch}").sample(range(forget), forget)
        chunks = [tuple(order[i : i + batch_size]) for i in range(0, forget, batch_size)]
        plan.append(
            [StepIndices(chunk, *(tuple(islice(stream, ratio * len(chunk))) for stream in streams)) for chunk in chunks]
        )
    return plan


def _endless(size: int, seed: str) -> Iterator[int]:
    """Indices of a set in endless shuffled passes; an empty set gives none."""
    for number in count() if size else ():
        yield from random.Random(f"{seed}-{number}").sample(range(size), size)


def share(lengths: Sequence[int], rank: int, processes: int, micro_batch_size: int) -> list[list[tuple[int, float]]]:
    """Split one step's samples over processes and forward passes: (position, weight) pairs of each pass of this rank.

    Samples of like length go together, which saves padding and changes no sum. Every process makes the same number of
    passes (collectives would hang otherwise), whose sizes differ by one at most: where there are too few samples, one
    of weight 0 fills a pass. Over all processes the weights sum to 1. A ``micro_batch_size`` of 0 makes one pass each.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    size = micro_batch_size or len(order)
    number = processes * -(-len(order) // (size * processes))  # of passes, in all processes
    bounds = [len(order) * i // number for i in range(number + 1)]
    parts = [order[start:end] for start, end in pairwise(bounds)]
    return [[(i, 1 / len(order)) for i in part] or [(order[0], 0.0)] for part in parts[rank::processes]]


def passes(
    config: TrainConfig,
    data: TrainingData,
    indices: StepIndices,
    rank: int,
    processes: int,
    device: torch.device,
    reads: Sequence[str] = (),
) -> tuple[list[Pass], list[Pass]]:
    """The passes of one process in a step: those of the forget loss, and those of the retain losses.

    ``reads`` says which sequences of the forget set, where these are not those of its loss.
    """
    forget: list[Pass] = []
    rest: list[Pass] = []
    for name, records in zip(SUBSETS, indices, strict=True):
        if not config.set_weights[name] or not records:
            continue
        of_records = [data.samples(name, record, reads or config.loss.reads) for record in records]
        lengths = [max(len(sample.ids) for sample in samples) for samples in of_records]
        size = config.micro_batch_size
        if not size and device.type == "cpu" and not (name == "forget" and config.whole_batch):
            size = max(1, round(CPU_PASS * len(lengths) / sum(lengths)))
        tokens = [1] * len(records)  # what a record weighs
        if config.released and (name != "forget" or config.loss.nll):
            tokens = [len(samples[0].ids) - samples[0].answer_start for samples in of_records]
        for part in share(lengths, rank, processes, size):
            samples = tuple(chain.from_iterable(zip(*(of_records[i] for i, _ in part), strict=True)))
            weights = tuple(weight * tokens[i] * len(tokens) / sum(tokens) for i, weight in part)
            chosen = tuple(records[i] for i, _ in part)
            (forget if name == "forget" else rest).append(Pass(name, chosen, samples, weights))
    return forget, rest
