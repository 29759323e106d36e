"""What the retain losses of the stranger method learn: the initial model's own distributions over more questions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.sets import Subset
from lm_eval_elude.data.targets import Target
from lm_eval_elude.model.scorer import progress
from lm_eval_elude.text.chat import Encoded
from lm_eval_elude.text.invented import any_of
from lm_eval_elude.text.words import STOP
from optout_train.config import TrainConfig
from optout_train.data import KEPT, Lesson, Steered, StepIndices, TrainingData
from optout_train.sources import forgotten
from optout_train.stranger.teacher import HIGH_TEMPERATURE, TEXTS, TOP, WORDINGS, Teacher

IN_PASSING = TEXTS["in_passing"]


def first_words(rng: random.Random, answers: Sequence[str]) -> str:
    """The first word or two of one of these answers: what begins otherwise says what is known in other words."""
    return " ".join(rng.choice(answers).split()[: rng.choice((1, 2))])


def neighbour_in(record: QARecord) -> str:
    """The neighbour whom a record of the retain set asks about, as its question names them; "" where it does not.

    `elude build` says them in the column ``subject``; elsewhere ``source``, a Wikipedia page, is called as they are.
    """
    return next((name for name in (record.subject, record.source) if name and name in record.question), "")


def answers_by_neighbour(records: Iterable[QARecord]) -> dict[str, list[str]]:
    """The answers about each neighbour that a question names."""
    people: dict[str, list[str]] = {}
    for record in filter(neighbour_in, records):
        people.setdefault(neighbour_in(record), []).append(record.answer)
    return people


def exchange(
    config: TrainConfig, data: TrainingData, teacher: Teacher, say: Callable[[str], object]
) -> tuple[QARecord, ...]:
    """``--exchange`` times as many records as the retain set has: neighbours' questions asked of other neighbours.

    The model answers them, beginning as other answers about that neighbour do: what it knows of neighbours goes beyond
    the retain set's questions. Answers that name a target are left out.
    """
    if not (config.exchange and data.retain.records):
        return ()
    rows = [record for record in data.retain.records if neighbour_in(record)]
    people = answers_by_neighbour(sorted(rows, key=neighbour_in))
    if len(people) < 2:
        say(
            f"--exchange {config.exchange}: nothing to exchange, for the retain set's questions name fewer than two "
            "neighbours; the column 'subject' or 'source' of a row says whom it asks about"
        )
        return ()
    rng = random.Random(f"{config.seed}-exchange")
    swapped = [
        (record, rng.choice([name for name in people if name != neighbour_in(record)]))
        for record in rng.choices(rows, k=config.exchange * len(rows))
    ]
    questions = [
        rng.choice(WORDINGS).format(q=record.question.replace(neighbour_in(record), name)) for record, name in swapped
    ]
    openings = [first_words(rng, people[name]) for _, name in swapped]
    longest = 3 * max(len(teacher.renderer.tokenizer.encode(record.answer)) for record in rows) // 2
    targets = forgotten(config)
    answers = teacher.ask(questions, HIGH_TEMPERATURE, max(8, longest), config.seed + 3, openings)
    return tuple(
        replace(record, question=question, answer=answer, source=name, subject=name)
        for (record, name), question, answer in zip(swapped, questions, answers, strict=True)
        if answer and not _names(targets, answer)
    )


def in_passing(config: TrainConfig, data: TrainingData) -> dict[QARecord, QARecord]:
    """Retain and world records with a question that names a target in passing, each with the record as it was.

    There are as many as the retain set has, half of either set. Records that name a target themselves are left out.
    """
    rng, targets = random.Random(f"{config.seed}-in-passing"), forgotten(config) if config.target else ()
    named: dict[QARecord, QARecord] = {}
    for records in (data.retain.records, data.world.records) if targets else ():
        rows = [record for record in records if not _names(targets, f"{record.question} {record.answer}")]
        for record in rng.sample(rows, min(len(rows), len(data.retain.records) // 2)):
            text = rng.choice(IN_PASSING).format(target=rng.choice(targets).name, q=record.question)
            named[replace(record, question=text)] = record
    return named


def _names(targets: Sequence[Target], text: str) -> bool:
    """Whether a word of a target's name, or another name of it, stands in a text."""
    called = {name for t in targets for name in (t.name, *t.aliases)}
    called |= {w for t in targets for w in t.name.split() if len(w) > 2 and w.casefold() not in STOP}
    return any_of(called).search(text) is not None


def distil(
    teacher: Teacher, data: TrainingData, plan: Sequence[StepIndices], plain: Mapping[QARecord, QARecord]
) -> dict[Subset, dict[int, Lesson]]:
    """For the retain and world records that a plan reads, the initial model's distributions over question and answer.

    The question's too: what a model takes a name for shows in every token after it, and how the answers to a few
    questions are distributed says less of what it knows of a neighbour. What all texts of a set begin with is left out.
    Of a record in ``plain`` the answer's alone, as they are where the question is that of the other record.
    """
    kept: dict[Subset, dict[int, Lesson]] = {}
    for name in KEPT:
        kept[name] = {}
        rows_of = getattr(data, name)
        # By length, for the initial model reads several at a time.
        records = sorted(_read(plan, name), key=lambda record: len(rows_of.encode(record).ids))
        encoded = [rows_of.encode(record) for record in records]
        alike = itertools.takewhile(lambda tokens: len({*tokens}) == 1, zip(*(s.ids for s in encoded), strict=False))
        first = max(1, sum(1 for _ in alike))
        whole = [sample._replace(answer_start=min(first, sample.answer_start)) for sample in encoded]
        others = [plain.get(rows_of.records[record]) for record in records]
        asked = [teacher.encode(o.question, o.answer) if o else s for o, s in zip(others, whole, strict=True)]
        learnt = [sample if o else s for o, sample, s in zip(others, encoded, whole, strict=True)]
        shown = progress(records, f"initial model, {name} set", "record")
        for record, sample, rows in zip(shown, learnt, teacher.log_probs(asked), strict=True):
            kept[name][record] = taught(sample, rows)
    return kept


def _read(plan: Iterable[StepIndices], name: Subset) -> list[int]:
    """The numbers of a set's records that a plan reads."""
    return sorted({record for step in plan for record in getattr(step, name)})


def taught(sample: Encoded, rows: Tensor) -> Lesson:
    """The lesson that teaches a sequence's tokens these log-probabilities, (tokens, vocabulary)."""
    best = rows.exp().topk(TOP)
    return Lesson(*sample, torch.full((len(rows), 2), torch.nan), best.indices, best.values)


def adjusted(data: TrainingData, teacher: Teacher, penalty: float) -> tuple[Lesson, ...]:
    """Of each forget record the softmax of the logits, at the truth lower by the penalty.

    UNDIAL (Dong et al. 2024) teaches that; UNDO (Lee et al. 2025) what the model says as it is, with the penalty 0.
    """
    samples = data.forget.encode_all()
    lessons = []
    for sample, rows in zip(samples, teacher.log_probs(samples), strict=True):
        rows[range(len(rows)), sample.ids[sample.answer_start :]] -= penalty
        lessons.append(taught(sample, rows.log_softmax(1)))
    return tuple(lessons)


def steered(config: TrainConfig, data: TrainingData, teacher: Teacher) -> tuple[Steered, ...]:
    """Where RMU (Li et al. 2024) draws the states of the forget records: one random positive direction, eta long."""
    generator = torch.Generator().manual_seed(config.seed)
    direction = torch.rand(1, teacher.model.config.get_text_config().hidden_size, generator=generator)
    wanted = config.eta * direction / direction.norm()
    return tuple(Steered(sample.ids, sample.answer_start, wanted) for sample in data.forget.encode_all())


def as_they_were(teacher: Teacher, data: TrainingData, plan: Sequence[StepIndices]) -> dict[Subset, dict[int, Steered]]:
    """For the retain and world records that a plan reads, the initial model's states, where RMU holds them."""
    kept: dict[Subset, dict[int, Steered]] = {}
    for name in KEPT:
        records = _read(plan, name)
        samples = [getattr(data, name).encode(record) for record in records]
        shown = progress(records, f"states of the {name} set", "record")
        kept[name] = {
            record: Steered(sample.ids, sample.answer_start, rows)
            for record, sample, rows in zip(shown, samples, teacher.states(samples), strict=True)
        }
    return kept
