"""Records to token ids to batches: what is trained on, in which order, and which tokens carry loss."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lm_eval_elude.core.chat import Encoded, Renderer
from lm_eval_elude.core.dataset import Subset
from lm_eval_elude.core.logprobs import IGNORE
from lm_eval_elude.core.records import DataError, QARecord
from optout_train.config import TrainConfig
from optout_train.losses import FORGET
from optout_train.sources import Source


class Batch(NamedTuple):
    """Right-padded to the longest sample: ``ids`` and ``labels`` (batch, length), labels on the answer only."""

    ids: Tensor
    labels: Tensor


class Lesson(NamedTuple):
    """A sequence that the initial model made before training; the last three have one row for each token learnt.

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


class Lessons(NamedTuple):
    """A :class:`Batch` of lessons, whose rows for each token learnt follow one another."""

    ids: Tensor
    labels: Tensor
    bounds: Tensor
    top: Tensor
    shares: Tensor


class StepIndices(NamedTuple):
    """Which records one step reads; the refusal set is indexed as the forget set."""

    forget: tuple[int, ...]
    retain: tuple[int, ...]
    world: tuple[int, ...]


class Share(NamedTuple):
    """One forward pass of one process: positions in the step's index list, and each one's weight in the mean."""

    positions: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True)
class EncodedRecords:
    """Records with their token ids, rendered when first asked for.

    Raises:
        DataError: a sample is longer than the model's context; nothing is cut.
    """

    name: str
    records: tuple[QARecord, ...]
    renderer: Renderer
    limit: int

    @cached_property
    def _cache(self) -> dict[tuple[int, str | None], Encoded]:
        return {}

    def encode(self, index: int, answer: str | None = None) -> Encoded:
        """Prompt and answer (the record's own unless another is given) as token ids."""
        key = (index, answer)
        if key not in self._cache:
            record = self.records[index]
            texts = self.renderer.prompt(record.question), self.renderer.answer(answer or record.answer)
            encoded = self.renderer.encode_pair(*texts)
            if len(encoded.ids) > self.limit:
                raise DataError(
                    f"{self.name} record {index + 1} ({record.question[:60]!r}) has {len(encoded.ids)} tokens, but "
                    f"--model takes {self.limit}; shorten or remove it"
                )
            self._cache[key] = encoded
        return self._cache[key]

    def __len__(self) -> int:
        return len(self.records)


class TrainingData(NamedTuple):
    """What a run reads.

    Attributes:
        forget, retain, world: the sets; those of weight 0 are empty.
        sequences: what a forget loss may read of each forget record, by name: its answer, a refusal drawn for it, or
            lessons, of which each record has several for the epochs to take turns in (all first, then all second ones).
        fingerprints: by name of the set.
        kept: of the sets that are distilled, by name, the lesson in the place of each record that is read.
    """

    forget: EncodedRecords
    retain: EncodedRecords
    world: EncodedRecords
    sequences: Mapping[str, Sequence[str | Lesson]]
    fingerprints: dict[str, str]
    kept: Mapping[str, Mapping[int, Lesson]] = MappingProxyType({})

    def samples(self, name: str, record: int, reads: Sequence[str]) -> tuple[Encoded | Lesson, ...]:
        """The sequences that a record of a set brings into its loss; ``reads`` says which in the forget set."""
        if name in self.kept:
            return (self.kept[name][record],)
        if name != "forget":
            return (getattr(self, name).encode(record),)
        found = (self.sequences[kind][record] for kind in reads)
        return tuple(self.forget.encode(record, one) if isinstance(one, str) else one for one in found)

    def steps(self, config: TrainConfig, reads: Sequence[str]) -> list[list[StepIndices]]:
        """The records of every step, by epoch: see :func:`plan_steps`. Where records have turns, an epoch is one."""
        count = len(self.forget)
        turns = max([1, *(len(self.sequences.get(kind, ())) // max(count, 1) for kind in reads)])
        plan = plan_steps(count, len(self.retain), len(self.world), config.epochs, config.batch_size, config.seed)
        return [
            [step._replace(forget=tuple(i + count * (epoch % turns) for i in step.forget)) for step in steps]
            for epoch, steps in enumerate(plan)
        ]


def refusal_texts() -> tuple[str, ...]:
    """The hundred refusals that IDK and DPO teach (own wording, in the manner of TOFU's)."""
    lines = (Path(__file__).parent / "refusals.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line)


def load_training_data(
    config: TrainConfig, source: Source, renderer: Renderer, limit: int, say: Callable[[str], object] = str
) -> TrainingData:
    """Load what the configuration trains on.

    Args:
        config: the run; sets of weight 0 are not read.
        source: of the records.
        renderer: of the model's tokenizer.
        limit: the model's context length in tokens.
        say: prints one line for the user, about odd rows.

    Raises:
        DataError: a set is missing (the flag that would do without it is named), or a sample is too long.
    """
    # What each set that a step draws from is made of: fine-tuning passes over all there is in the forget set's place.
    parts: dict[str, tuple[Subset, ...]] = {"forget": ("forget",)}
    if FORGET[config.forget_loss].learns:
        parts["forget"] = ("forget", "retain") if config.learn == "all" else ("retain",)
    parts |= {"retain": ("retain",) if config.retain_weight else (), "world": ("world",) if config.world_weight else ()}
    sets: dict[str, EncodedRecords] = {}
    fingerprints = {}
    for name, subsets in parts.items():
        records: list[QARecord] = []
        for subset in subsets:
            try:
                selection = source.load(subset, "train")
            except DataError as error:
                hint = "" if name == "forget" else f"; --{subset}-weight 0 trains without it"
                raise DataError(f"{error}{hint}") from None
            if selection.odd and f"{subset}-train" not in fingerprints:
                say(f"{subset} train: {selection.remark}")
            fingerprints[f"{subset}-train"] = selection.fingerprint
            records += selection.records
        sets[name] = EncodedRecords(f"{'+'.join(subsets)} train", tuple(records), renderer, limit)
    texts = refusal_texts()
    draw = random.Random(f"{config.seed}-refusals")
    refusals = tuple(draw.choice(texts) for _ in sets["forget"].records)
    sequences = {"answer": tuple(record.answer for record in sets["forget"].records), "refusal": refusals}
    return TrainingData(sets["forget"], sets["retain"], sets["world"], sequences, fingerprints)


def plan_steps(
    forget: int, retain: int, world: int, epochs: int, batch_size: int, seed: int
) -> list[list[StepIndices]]:
    """The order of a whole run, a function of sizes and seed alone, so that a resumed run reads the same.

    Each epoch passes once over the forget set, shuffled; its last batch may be smaller. Every step reads as many
    neighbours and world records, from an endless stream of shuffled passes over each set.
    """
    streams = [_Stream(retain, f"{seed}-retain"), _Stream(world, f"{seed}-world")]
    plan = []
    for epoch in range(epochs):
        order = random.Random(f"{seed}-forget-{epoch}").sample(range(forget), forget)
        chunks = [tuple(order[i : i + batch_size]) for i in range(0, forget, batch_size)]
        plan.append([StepIndices(chunk, *(stream.take(len(chunk)) for stream in streams)) for chunk in chunks])
    return plan


def share(lengths: Sequence[int], rank: int, processes: int, micro_batch_size: int) -> list[Share]:
    """Split one step's samples over processes and forward passes; weights sum to 1 over all of them.

    Samples of like length go together, which saves padding and changes no sum. Every process makes the same number of
    passes of the same size (collectives would hang otherwise): the filling samples have weight 0.

    Args:
        lengths: tokens of each sample of the step.
        rank, processes: this process among how many.
        micro_batch_size: largest number of samples in a pass, 0 for all.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    real = len(order)
    size = min(micro_batch_size or real, -(-real // processes))
    order += order[:1] * (-real % (size * processes))
    weights = [1 / real] * real + [0.0] * (len(order) - real)
    mine = slice(rank, None, processes)
    positions, shares = order[mine], weights[mine]
    return [Share(tuple(positions[i : i + size]), tuple(shares[i : i + size])) for i in range(0, len(positions), size)]


def collate(samples: Sequence[Encoded | Lesson], device: torch.device | str = "cpu") -> Batch | Lessons:
    """Pad to the longest sample with token 0: right of the answer it is neither attended to nor labelled."""
    longest = max(len(sample.ids) for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    labels = torch.full((len(samples), longest), IGNORE)
    for row, sample in enumerate(samples):
        tokens = torch.tensor(sample.ids)
        ids[row, : len(tokens)] = tokens
        labels[row, sample.answer_start : len(tokens)] = tokens[sample.answer_start :]
    if lessons := [sample for sample in samples if isinstance(sample, Lesson)]:
        bounds, top, shares = (torch.cat(column).to(device) for column in list(zip(*lessons, strict=True))[2:])
        return Lessons(ids.to(device), labels.to(device), bounds, top, shares)
    return Batch(ids.to(device), labels.to(device))


class Forked(NamedTuple):
    """Groups of samples as rows in which common openings stand once: the tree of a group's tokens, depth first.

    Attributes:
        ids: (batch, length) tokens.
        targets: (n,) the labelled tokens of all samples.
        positions: (batch, length) of each token in its samples.
        sees: (batch, length, length), whether a query (second axis) sees a key: those before it in its samples.
        sources: (n,) where each target is predicted, an index into the flattened ``ids``.
        owners: (n,) the sample of each target, counted over the batch.
    """

    ids: Tensor
    targets: Tensor
    positions: Tensor
    sees: Tensor
    sources: Tensor
    owners: Tensor


def collate_forked(groups: Sequence[Sequence[Encoded | Lesson]], device: torch.device | str = "cpu") -> Forked:
    """Write groups of samples into rows, padded to the longest; padding is seen by nothing but padding."""
    rows: list[tuple[list[int], list[int], list[int]]] = []
    reads: list[tuple[int, int, int, int]] = []  # row, node that predicts, target, owner
    first = 0
    for row, group in enumerate(groups):
        tokens: list[int] = []
        depths: list[int] = []
        ends: list[int] = []
        last: list[int] = []
        path: list[int] = []
        for number in sorted(range(len(group)), key=lambda i: group[i].ids):
            sample, begin = group[number].ids, group[number].answer_start
            shared = next(
                (i for i, pair in enumerate(zip(last, sample, strict=False)) if pair[0] != pair[1]),
                min(len(last), len(sample)),
            )
            path = path[:shared] + list(range(len(tokens), len(tokens) + len(sample) - shared))
            tokens += sample[shared:]
            depths += range(shared, len(sample))
            ends += [0] * (len(sample) - shared)
            for node in path:
                ends[node] = len(tokens)
            reads += [(row, path[i - 1], sample[i], first + number) for i in range(begin, len(sample))]
            last = sample
        first += len(group)
        rows.append((tokens, depths, ends))
    ids, positions, until = (
        pad_sequence([torch.tensor(column) for column in columns], batch_first=True)
        for columns in zip(*rows, strict=True)
    )
    index = torch.arange(ids.shape[1])
    until = until.maximum(index + 1)  # padding sees itself: no row of the mask is empty
    sees = (index[:, None] >= index) & (index[:, None] < until[:, None, :])
    at, node, targets, owners = torch.tensor(reads).T
    return Forked(*(t.to(device) for t in (ids, targets, positions, sees, at * ids.shape[1] + node, owners)))


class _Stream:
    """Indices of a set in endless shuffled passes; an empty set gives none."""

    def __init__(self, size: int, seed: str) -> None:
        self.size, self.seed = size, seed
        self.passes = 0
        self.waiting: list[int] = []

    def take(self, count: int) -> tuple[int, ...]:
        while self.size and len(self.waiting) < count:
            self.waiting += random.Random(f"{self.seed}-{self.passes}").sample(range(self.size), self.size)
            self.passes += 1
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return tuple(taken)
