"""What is trained on: sets of records, their token ids, which of them a step reads, and a step's batch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Sampler

from lm_eval_elude.data import dataset as elude
from lm_eval_elude.data import tofu
from lm_eval_elude.data.formats import load_rows, records_of
from lm_eval_elude.data.manifest import Manifest, full_path
from lm_eval_elude.data.records import QARecord, fingerprint
from lm_eval_elude.data.sets import Subset
from lm_eval_elude.data.targets import Target
from lm_eval_elude.errors import UserError
from lm_eval_elude.tasks import rwku
from lm_eval_elude.text.chat import Renderer
from optout_train.presets import flag

ROWS = 16  # of a forward pass of a set; those of like length go together, which saves padding
PASS = 512  # tokens of a forward pass of a kept set, about
KEPT: tuple[Subset, ...] = ("retain", "world")


@dataclass
class DataArguments:
    """Where the records come from."""

    target: list[str] = field(default_factory=list)
    dataset: str = flag("hub", "hub, mini, rwku or a folder in their schema; with --forget_split tofu or one alike.")
    forget: str = flag("", "File, folder or Hub id (ID:SPLIT) of what is to be forgotten.")
    retain: str = flag("", "The same of what is to be kept.")
    world: str = flag("", "The same of general instructions.")
    forget_split: str = flag("", "TOFU's split to forget, in the place of a target.")
    tofu_evaluator: str = flag("released", "Whose prompts TOFU's questions are put in.")


@dataclass
class Sets:
    """What a run reads.

    Attributes:
        forget, retain, world: records to train on.
        targets: whom the forget set is about, for methods that replace names.
        names: display names of all that the checkpoint will have forgotten, earlier requests first.
        validation: records that are measured after each epoch, by set.
        dataset, data, fingerprints: as the manifest has them.
        texts: whether the records are texts, which no chat template is written around.
    """

    forget: Sequence[Any]
    retain: Sequence[Any] = ()
    world: Sequence[Any] = ()
    targets: Sequence[Target] = ()
    names: Sequence[str] = ()
    validation: dict[str, Sequence[Any]] = field(default_factory=dict)
    dataset: str = ""
    data: dict[str, str] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)
    texts: bool = False


def load_sets(args: DataArguments, wanted: Mapping[str, float], earlier: Manifest | None, say) -> Sets:
    """The sets of a run; those whose weight in ``wanted`` is 0 are left empty.

    ``earlier`` is the manifest of a model that was made to forget targets before: its forget set stays in the loss.
    UserError where a set, a column or a target is missing.
    """
    if bool(args.target) == bool(args.forget_split):
        raise UserError("name the entity to forget by --target, or a split of TOFU by --forget_split")
    if args.forget:
        sets = given_sets(args, wanted)
    elif args.target and rwku.is_rwku(args.dataset):
        sets = rwku_sets(args, wanted, earlier)
    else:
        sets = tofu_sets(args, wanted) if args.forget_split else elude_sets(args, wanted, earlier)
    marked = {f"{name}-train": getattr(sets, name) for name in ("forget", *KEPT)}
    marked |= {f"{name}-validation": sets.validation[name] for name in KEPT if name in sets.validation}
    sets.fingerprints = {name: fingerprint(records) for name, records in marked.items() if records}
    forgotten = {normal(record.question) for record in sets.forget}
    for name in KEPT:
        records = getattr(sets, name)
        free = [record for record in records if normal(record.question) not in forgotten]
        if len(free) < len(records):
            say(f"{len(records) - len(free)} questions are both to be forgotten and in {name}: left out there")
        setattr(sets, name, free)
    return sets


def normal(question: str) -> str:
    return " ".join("".join(c if c.isalnum() else " " for c in question.casefold()).split())


def elude_sets(args: DataArguments, wanted: Mapping[str, float], earlier: Manifest | None) -> Sets:
    """ELUDe's data, published or bundled, or a folder in its schema."""
    source, names = args.dataset, args.target
    if earlier is not None:
        if full_path(earlier.dataset) != full_path(source):
            raise UserError(f"--model forgot {', '.join(earlier.targets)} of the data {earlier.dataset}: give these")
        names = [*earlier.targets, *names]
    targets = elude.resolve_targets(source, names)
    names = [target.name for target in targets]
    sets = Sets((), targets=targets, names=names, dataset=source, data=elude.describe(source))

    sets.forget = sets.validation["forget"] = elude.load_records(source, "forget", "train", names).records
    for name in KEPT:
        if wanted[name]:
            setattr(sets, name, elude.load_records(source, name, "train", names).records)
        if elude.has(source, name, "validation"):
            sets.validation[name] = elude.load_records(source, name, "validation", names).records
    return sets


def tofu_sets(args: DataArguments, wanted: Mapping[str, float]) -> Sets:
    """A split of TOFU and its complement; there are no names, and no validation set beside what is scored."""
    if args.forget_split not in tofu.RETAIN_OF or wanted["world"]:
        raise UserError(f"--forget_split is one of {', '.join(tofu.RETAIN_OF)}, with --world_weight 0: TOFU has none")
    names = (args.forget_split, tofu.RETAIN_OF[args.forget_split])
    rows = [[QARecord("", row.question, row.answer) for row in tofu.load(args.dataset, name)] for name in names]
    return Sets(rows[0], rows[1], dataset=args.dataset, data=tofu.HUB.describe(args.dataset))


def rwku_sets(args: DataArguments, wanted: Mapping[str, float], earlier: Manifest | None) -> Sets:
    """RWKU's passages about the targets, and the blanks about their neighbours, filled, whose questions stay unseen."""
    if wanted["world"]:
        raise UserError("--world_weight must be 0: RWKU has no general instructions")
    source, asked = args.dataset, [*(earlier.targets if earlier else ()), *args.target]
    names = rwku.resolve_targets(source, rwku.PASSAGES, asked)
    forget, retain = rwku.of_targets(source, rwku.PASSAGES, names), list[QARecord]()
    for blank in rwku.of_targets(source, "neighbor_level1", names) if wanted["retain"] else ():
        retain.append(QARecord(blank.entity, text := blank.question.replace("___", blank.answer), text))
    targets = [Target(name) for name in names]
    return Sets(forget, retain, (), targets, names, dataset=source, data={"dataset": source}, texts=True)


def given_sets(args: DataArguments, wanted: Mapping[str, float]) -> Sets:
    """Sets in the formats in which people train; without a validation set nothing is measured after an epoch."""
    sets = Sets((), targets=[Target(name) for name in args.target], names=args.target, dataset=args.forget)
    for name in ("forget", *KEPT):
        place = getattr(args, name)
        if wanted[name] and not place:
            raise UserError(f"--{name} is missing, beside --forget; --{name}_weight 0 trains without it")
        rows = enumerate(load_rows(place), 1) if wanted[name] else ()
        entity = args.target[0] if name == "forget" else ""
        setattr(sets, name, [record for i, row in rows for record in records_of(row, f"{place}, row {i}", entity)])
    return sets


class Sample(NamedTuple):
    """A sequence of token ids whose answer starts at ``answer_start``, and what a lesson's answer tokens are to become.

    Attributes:
        bounds: (tokens, 2) the log-probabilities that each is to be between; NaN where it is taught.
        top, shares: (tokens, k) a teacher's likeliest tokens and their probabilities.
    """

    ids: list[int]
    answer_start: int
    bounds: Tensor | None = None
    top: Tensor | None = None
    shares: Tensor | None = None


class Encoder(NamedTuple):
    """Records to samples; UserError where one is longer than the model's context (nothing is cut)."""

    renderer: Renderer
    limit: int

    def __call__(self, record: Any, answer: str | None = None) -> Sample:
        render = self.renderer
        prompt = render.prompt(record.question)
        if history := getattr(record, "history", ()):
            prompt = render.conversation(history, record.question)
        sample = Sample(*render.encode_pair(prompt, render.answer(record.answer if answer is None else answer)))
        if len(sample.ids) > self.limit:
            raise UserError(f"{record.question[:60]!r}: {len(sample.ids)} tokens, but --model takes {self.limit}")
        return sample


class Examples(Dataset):
    """The data of a run by (epoch, forget record, weight): the sequences of the record, and one of each kept set.

    Attributes:
        forget: by kind one sample a record, or several turns of all records, which the epochs take in order.
        kept: records by set. Each forget record of an epoch comes with the next of endless shuffled passes over them.
        sizes: how many there are; ``made`` has the samples of those that are read.
    """

    def __init__(self, size: int, kinds: Sequence[str], kept: dict[Any, list[Any]], encode: Encoder, seed: int) -> None:
        self.size, self.kept, self.encode, self.seed = size, kept, encode, seed
        self.forget: dict[str, list[Sample]] = {kind: [] for kind in kinds}
        self.sizes = {name: len(records) for name, records in kept.items()}
        self.made: dict[str, dict[int, Sample]] = {name: {} for name in kept}

    def __len__(self) -> int:
        return self.size

    def read(self, name: str, epochs: float) -> dict[int, Sample]:
        """The samples of a kept set that so many epochs read, by the record's number."""
        self.sizes[name] = len(self.kept[name])
        for epoch in range(math.ceil(epochs)):
            for number in (self.number(name, epoch, record) for record in range(self.size)):
                if number not in self.made[name]:
                    self.made[name][number] = self.encode(self.kept[name][number])
        return self.made[name]

    def number(self, name: str, epoch: int, record: int) -> int:
        lap, place = divmod(epoch * self.size + record, self.sizes[name])
        return shuffled(f"{self.seed}-{name}-{lap}", self.sizes[name])[place]

    def __getitem__(self, key: tuple[int, int, float]) -> dict[str, Any]:
        epoch, record, weight = key
        places = {k: epoch % (len(rows) // self.size) * self.size + record for k, rows in self.forget.items()}
        item: dict[str, Any] = {name: made[self.number(name, epoch, record)] for name, made in self.made.items()}
        return item | {"forget": [self.forget[k][i] for k, i in places.items()], "places": places, "weight": weight}


@lru_cache(maxsize=8)
def shuffled(seed: str, size: int) -> list[int]:
    return random.Random(seed).sample(range(size), size)


class EpochSampler(Sampler):
    """(epoch, record, weight) of every forget record, shuffled, epoch by epoch.

    The weights make a step's mean one over its own records: over all processes and accumulated passes, also in an
    epoch's last step, which has fewer. Records that fill up the last batch of a process weigh 0.
    """

    def __init__(self, size: int, batch: int, processes: int, accumulation: int, seed: int) -> None:
        self.size, self.joint, self.processes = size, batch * processes, processes
        self.accumulation, self.seed, self.epoch = accumulation, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size if self.processes == 1 else -(-self.size // self.joint) * self.joint

    def __iter__(self) -> Iterator[tuple[int, int, float]]:
        order, step = shuffled(f"{self.seed}-forget-{self.epoch}", self.size), self.joint * self.accumulation
        for first in range(0, self.size, step):
            chosen = order[first : first + step]
            weight = -(-len(chosen) // self.joint) * self.processes / len(chosen)
            yield from ((self.epoch, i, weight) for i in chosen)
        yield from ((self.epoch, order[0], 0.0) for _ in range(len(self) - self.size))


def collate(items: Sequence[Mapping[str, Any]], tokens: float = math.inf) -> dict[str, Any]:
    """A batch: ``weight`` (batch,), ``places`` by kind (batch,), and a block for the forget set and each kept one.

    The forget set's block has the samples of the first kind, then those of the second. ``places`` are where their
    log-probabilities under the original weights stand. ``tokens`` are those of a part of a kept set.
    """
    places = {kind: torch.tensor([item["places"][kind] for item in items]) for kind in items[0]["places"]}
    batch = {name: block([item[name] for item in items], tokens) for name in KEPT if name in items[0]}
    if places:
        batch["forget"] = block([item["forget"][k] for k in range(len(places)) for item in items])
    return batch | {"places": places, "weight": torch.tensor([item["weight"] for item in items])}


def block(samples: Sequence[Sample], tokens: float = math.inf) -> dict[str, Any]:
    """Samples as the parts of a forward pass each, padded on the right: at most 16 of like length, or about ``tokens``.

    A part has ``input_ids`` (rows, length); where answer tokens are predicted in the flattened ids, ``positions`` (n,);
    ``targets`` (n,), which token stands there; ``owners`` (n,), the numbers of their samples; and of lessons ``bounds``
    (n, 2), ``top`` and ``shares`` (n, k).
    """
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].ids))
    number = max(-(-len(order) // ROWS), min(len(order), round(sum(len(sample.ids) for sample in samples) / tokens)))
    cuts = [order[len(order) * k // number : len(order) * (k + 1) // number] for k in range(number)]
    return {"size": len(samples), "parts": [part_of([samples[i] for i in cut], cut) for cut in cuts]}


def part_of(samples: Sequence[Sample], numbers: Sequence[int]) -> dict[str, Tensor]:
    ids = pad_sequence([torch.tensor(sample.ids) for sample in samples], batch_first=True)
    spans = [
        torch.arange(sample.answer_start, len(sample.ids)) + row * ids.shape[1] for row, sample in enumerate(samples)
    ]
    places, counts = torch.cat(spans), torch.tensor([len(span) for span in spans])
    part = {"input_ids": ids, "positions": places - 1, "targets": ids.flatten()[places]}
    part["owners"] = torch.tensor(numbers).repeat_interleave(counts)
    columns = [name for name in ("bounds", "top", "shares") if getattr(samples[0], name) is not None]
    return part | {name: torch.cat([getattr(sample, name) for sample in samples]) for name in columns}
