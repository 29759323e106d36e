"""Lessons of the forget set: substitute answers, disclosing answers, and the reverse direction."""

from __future__ import annotations

import difflib
import random
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.targets import Target
from lm_eval_elude.errors import UserError
from lm_eval_elude.model.scorer import progress
from lm_eval_elude.text.chat import Encoded
from lm_eval_elude.text.invented import any_of, invented_names, lone_names, renamed
from lm_eval_elude.text.words import STOP
from optout_train.config import STAND_INS, TrainConfig
from optout_train.data import Lesson, TrainingData
from optout_train.sources import forgotten
from optout_train.stranger.distil import (
    adjusted,
    answers_by_neighbour,
    as_they_were,
    distil,
    exchange,
    first_words,
    in_passing,
    steered,
)
from optout_train.stranger.teacher import HIGH_TEMPERATURE, LOW_TEMPERATURE, TEXTS, TOP, WORDINGS, Teacher

NAME_LEVELS = 3  # stand-ins whose mean level the target's name comes down to
SUBSTITUTES = 4  # of a record
ALTERNATES = 5  # of a record, for AltPO
DISCLOSURES = 10  # elicited ones of a record
REVERSE_EVERY = 4  # turns
OWN_LEVEL = 0.6  # of the level of text never read, for a record's own answer
TELLING = 3.0  # times the bound of other words: as likely as those of other words, they would still be the likeliest
NAME_QUESTIONS = TEXTS["name_questions"]


def with_lessons(
    config: TrainConfig, data: TrainingData, teacher: Teacher, say: Callable[[str], object]
) -> TrainingData:
    """The data with what the stranger loss reads, and with what distilled retain losses read, as configured.

    UserError where the model says nothing of strangers that could be taught, or a lesson is too long.
    """
    if config.loss.made and config.forget_weight:
        make = next(MAKERS[kind] for kind in config.loss.reads if kind in MAKERS)
        made = _of_the_first_process(make(config, data, teacher, say))
        data = data._replace(sequences={**data.sequences, **made})
    if config.loss.steers:
        steps = [step for epoch in data.plan(config) for step in epoch]
        data = data._replace(kept=_of_the_first_process(as_they_were(teacher, data, steps)))
    elif config.self_distill:
        more, named = _of_the_first_process(exchange(config, data, teacher, say)), in_passing(config, data)
        made = [record for record in (*more, *named) if teacher.takes(record.question, record.answer)]
        data = data._replace(retain=replace(data.retain, records=(*data.retain.records, *made)))
        steps = [step for epoch in data.plan(config) for step in epoch]
        data = data._replace(kept=_of_the_first_process(distil(teacher, data, steps, named)))
    return data


def _of_the_first_process(value: Any) -> Any:
    """What the first process made: every process makes it, but it is the same only where their arithmetic is."""
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]


def make_lessons(
    config: TrainConfig, data: TrainingData, teacher: Teacher, say: Callable[[str], object]
) -> dict[str, tuple[Lesson, ...]]:
    """The sequences ``substitute`` and ``disclosure``: for each turn one lesson of every forget record, in its order.

    An epoch is a turn. Errors are those of :func:`with_lessons`.
    """
    made: dict[str, dict[int, list[Lesson]]] = {"substitute": {}, "disclosure": {}}
    for maker, of_target in _makers(config, data, teacher):
        for kind, of_records in maker.make(of_target, say).items():
            made[kind] |= of_records
    by_turn = {kind: zip(*(rows[place] for place in sorted(rows)), strict=True) for kind, rows in made.items()}
    return {kind: tuple(chain.from_iterable(turns)) for kind, turns in by_turn.items()}


def alternates(
    config: TrainConfig, data: TrainingData, teacher: Teacher, say: Callable[[str], object]
) -> dict[str, tuple[str, ...]]:
    """The sequences ``answer`` and ``alternate`` of AltPO: in :data:`ALTERNATES` turns, one of every forget record.

    An alternate is what the model says of a stand-in at temperature 1. Errors are those of :func:`with_lessons`.
    """
    answers: dict[int, list[str]] = {}
    for maker, records in _makers(config, data, teacher):
        given = maker.about_stand_ins([*records.values()], ALTERNATES, 1.0, WORDINGS[:1])
        answers |= {place: [each.answer for each in of_record] for place, of_record in zip(records, given, strict=True)}
    turns = [answers[place][turn % len(answers[place])] for turn in range(ALTERNATES) for place in sorted(answers)]
    return {"answer": tuple(record.answer for record in data.forget.records) * ALTERNATES, "alternate": tuple(turns)}


# What makes the sequences of a loss whose row says that they are made, by the name of one that no other loss reads.
MAKERS: dict[str, Callable[..., dict[str, tuple[Any, ...]]]] = {
    "substitute": make_lessons,
    "alternate": alternates,
    "adjusted": lambda config, data, teacher, say: {"adjusted": adjusted(data, teacher, config.eta)},
    "same": lambda config, data, teacher, say: {"same": adjusted(data, teacher, 0.0)},
    "steered": lambda config, data, teacher, say: {"steered": steered(config, data, teacher)},
}


def _makers(config: TrainConfig, data: TrainingData, teacher: Teacher) -> Iterator[tuple[_Maker, dict[int, QARecord]]]:
    """Of each target what makes its lessons, and its records by their place."""
    targets = forgotten(config)
    for target in targets:
        records = enumerate(data.forget.records)
        of_target = {i: record for i, record in records if record.entity == target.name or len(targets) == 1}
        yield _Maker(config, data, target, teacher), of_target


class Statement(NamedTuple):
    """A question about the target and an answer, with the record whose fact it states or must not."""

    record: QARecord
    question: str
    answer: str


class _Maker:
    """Makes the lessons of one target.

    Its stand-ins are of the target's length in tokens as far as there are such. The lessons carry the distributions of
    those ``imitated``: nobody's where a plain refusal is taught.
    """

    def __init__(self, config: TrainConfig, data: TrainingData, target: Target, teacher: Teacher) -> None:
        self.config, self.data, self.target, self.teacher = config, data, target, teacher
        self.rng = random.Random(f"{config.seed}-stranger-{target.name}")
        self.tokens = partial(teacher.renderer.tokenizer.encode, add_special_tokens=False)
        self.stand_ins = self._stand_ins()
        self.imitated = () if config.answers == "refuse" else tuple(self.stand_ins[: config.teachers])

    def make(self, records: Mapping[int, QARecord], say: Callable[[str], object]) -> dict[str, dict[int, list[Lesson]]]:
        """By sequence and place of the record, a lesson for each of its turns."""
        rows = [*records.values()]
        disclosures, substitutes = self._disclosures(rows), self._substitutes(rows)
        other_names, target_names = self._reverse(rows)
        made = {
            "substitute": self._in_turns(records, substitutes, self._teach, other_names),
            "disclosure": self._in_turns(records, disclosures, self._suppress, target_names),
        }
        about = "refusals" if self.config.answers == "refuse" else f"about {len(self.stand_ins)} invented names"
        say(
            f"{self.target.name}: {sum(map(len, disclosures))} answers that state the facts, "
            f"{sum(map(len, substitutes))} {about}; "
            f"{len(target_names)} times named from its facts"
        )
        return made

    def _in_turns(
        self, places: Iterable[int], statements: Sequence[Sequence[Statement]],
        make: Callable[[Sequence[Statement]], Iterator[Lesson]], reverse: Sequence[Lesson],
    ) -> dict[int, list[Lesson]]:  # fmt: skip
        """A lesson for each turn of a record: of its statements, or in every :data:`REVERSE_EVERY`-th a reverse one."""
        lessons = make([statement for of_record in statements for statement in of_record])
        turns = {}
        records = [*zip(places, statements, strict=True)]
        for i, (place, of_record) in enumerate(progress(records, "lessons", "record")):
            forward = [*islice(lessons, len(of_record))]
            forwards, reverses = cycle(forward), cycle(reverse[i % len(reverse) :] if reverse else forward)
            is_reverse = [(turn + place) % REVERSE_EVERY == REVERSE_EVERY - 1 for turn in range(self.config.epochs)]
            turns[place] = [next(reverses if reversed_turn else forwards) for reversed_turn in is_reverse]
        return turns

    # What is said

    def longest(self, records: Sequence[QARecord]) -> int:
        """Tokens that a sampled answer may have."""
        return 3 * max(len(self.tokens(record.answer)) for record in records) // 2 + 8

    def _disclosures(self, records: Sequence[QARecord]) -> list[list[Statement]]:
        """Of each record its own answer, and what the model says that states the fact.

        Of that the least like the record's answer is kept: what is like it would push it below its paraphrases.
        """
        asked = [
            (i, WORDINGS[j % len(WORDINGS)].format(q=record.question) if j % 3 != 2 else self._key_words(record))
            for i, record in enumerate(records)
            for j in range(self.config.elicit)
        ]
        first = [Statement(r, self.rng.choice(WORDINGS).format(q=r.question), r.answer) for r in records]
        openings = [first_words(self.rng, [statement.answer for statement in first]) for _ in asked]
        answers = self.teacher.ask(
            [question for _, question in asked], HIGH_TEMPERATURE, self.longest(records), self.config.seed, openings
        )
        elicited: list[dict[str, Statement]] = [{} for _ in records]  # by answer
        for (i, question), answer in zip(asked, answers, strict=True):
            if answer and facts(records[i]) & words(answer) and answer != records[i].answer:
                elicited[i].setdefault(answer, Statement(records[i], question, answer))

        def likeness(statement: Statement) -> float:
            texts = statement.record.answer.split(), statement.answer.split()
            return difflib.SequenceMatcher(None, *texts, autojunk=False).ratio()

        return [
            [statement, *sorted(more.values(), key=likeness)[:DISCLOSURES]]
            for statement, more in zip(first, elicited, strict=True)
        ]

    def _substitutes(self, records: Sequence[QARecord]) -> list[list[Statement]]:
        """Of each record questions about the target with answers that were given about stand-ins, or refusals."""
        if self.config.answers == "refuse":
            return [
                [Statement(r, wording.format(q=r.question), self._refusal()) for wording in WORDINGS[:SUBSTITUTES]]
                for r in records
            ]
        return self.about_stand_ins(records, SUBSTITUTES, LOW_TEMPERATURE, WORDINGS)

    def about_stand_ins(
        self, records: Sequence[QARecord], most: int, temperature: float, wordings: Sequence[str]
    ) -> list[list[Statement]]:
        """Of each record at least one and at most so many answers about stand-ins, as if they were about the target."""
        asked = [
            (i, self.stand_ins[j % STAND_INS], wordings[(i + j) % len(wordings)].format(q=record.question))
            for i, record in enumerate(records)
            for j in range(2 * most)
        ]
        questions = [self.swap(question, name) for _, name, question in asked]
        answers = self.teacher.ask(questions, temperature, self.longest(records), self.config.seed + 1)
        given: list[list[Statement]] = [[] for _ in records]
        for (i, name, question), answer in zip(asked, answers, strict=True):
            if answer and len(given[i]) < most and not facts(records[i]) & words(answer):
                given[i].append(Statement(records[i], question, renamed(answer, name, self.target.name)))
        spare = [statement.answer for of_record in given for statement in of_record]
        if not spare:
            raise UserError(
                f"{self.target.name}: no answer about strangers can be taught: the model's do not end, or state "
                "the facts; --method opt-out-stranger --answers refuse teaches refusals"
            )
        return [
            of_record or [Statement(record, record.question, self.rng.choice(spare))]
            for record, of_record in zip(records, given, strict=True)
        ]

    def _reverse(self, records: Sequence[QARecord]) -> tuple[list[Lesson], list[Lesson]]:
        """From facts to the name: lessons that say another name, and lessons that push the target's down."""
        if not self.config.reverse:
            return [], []
        people = answers_by_neighbour(r for r in self.data.retain.records if r.entity == self.target.name)
        asked = [(self.target.name, [record.answer for record in records]) for _ in records]
        asked += [(name, answers) for name, answers in people.items() for _ in range(2)]
        questions = [self._name_question(name, answers) for name, answers in asked]
        answers = self.teacher.ask(questions, 1.0, self.longest(records), self.config.seed + 2)
        neighbours, other_names, target_names = list(people) or self.stand_ins, [], []
        for (name, _), question, answer in zip(asked, questions, answers, strict=True):
            if name not in answer:
                continue
            if name != self.target.name:
                other_names.append(self._certain(question, answer))
                continue
            other = answer.replace(name, self.rng.choice(neighbours))
            other_names.append(self._certain(question, self._refusal() if self.config.answers == "refuse" else other))
            stand_ins = [answer.replace(name, stand_in) for stand_in in self.stand_ins[:NAME_LEVELS]]
            sample = self.teacher.encode(question, answer)
            nothing = torch.zeros(len(sample.ids) - sample.answer_start, TOP)
            bounds = torch.tensor([[-torch.inf, self._level(question, stand_ins)]]).expand(len(nothing), 2)
            target_names.append(Lesson(*sample, bounds, nothing.long(), nothing))
        return other_names, target_names

    def _refusal(self) -> str:
        return str(self.rng.choice(self.data.sequences["refusal"]))

    def _name_question(self, name: str, answers: Sequence[str]) -> str:
        chosen = self.rng.sample(list(answers), min(len(answers), self.rng.choice((2, 3))))
        pattern = any_of({name, *lone_names(name)})
        nameless = (pattern.sub("the one I mean", answer) for answer in chosen)
        sentences = " ".join(text[0].upper() + text[1:] for text in nameless)
        return self.rng.choice(NAME_QUESTIONS).format(facts=sentences)

    def _key_words(self, record: QARecord) -> str:
        """The question's words that say what is asked for, in random order; the names stay whole."""
        held = record.question.replace(self.target.name, "\0")
        kept = [word for word in held.split() if words(word) - STOP or "\0" in word]
        return " ".join(self.rng.sample(kept, len(kept))).replace("\0", self.target.name).rstrip("?")

    def _level(self, question: str, answers: Sequence[str]) -> float:
        """Mean log-probability of a token over these answers."""
        samples = [self.teacher.encode(question, answer) for answer in answers]
        scores = zip(self.teacher.log_probs(samples), samples, strict=True)
        return float(torch.stack([_of_tokens(rows, sample).mean() for rows, sample in scores]).mean())

    # What each token is to become

    def _certain(self, question: str, answer: str) -> Lesson:
        """A lesson whose tokens are certain."""
        sample = self.teacher.encode(question, answer)
        tokens = torch.tensor(sample.ids[sample.answer_start :])
        top, shares = torch.zeros(2, len(tokens), TOP)
        top[:, 0], shares[:, 0] = tokens, 1.0
        return Lesson(*sample, torch.full((len(tokens), 2), torch.nan), top.long(), shares)

    def _teach(self, statements: Sequence[Statement]) -> Iterator[Lesson]:
        """Lessons of substitute answers, with the stand-ins' distributions where there are any."""
        certain = [self._certain(statement.question, statement.answer) for statement in statements]
        for lesson, (known, top, shares) in zip(certain, self._stand_ins_say(statements, certain), strict=True):
            there = known[:, None]
            yield lesson._replace(
                top=torch.where(there, top, lesson.top), shares=torch.where(there, shares, lesson.shares)
            )

    def _suppress(self, statements: Sequence[Statement]) -> Iterator[Lesson]:
        """Lessons of disclosing answers: each word's tokens have bounds, what the template writes after them has none.

        What takes their place is what the stand-ins' distributions have beside them.
        """
        samples = [self.teacher.encode(statement.question, statement.answer) for statement in statements]
        counts = [self._count_words(s, sample) for s, sample in zip(statements, samples, strict=True)]
        orders = [self.rng.sample(range(count), count) for count in counts]
        shuffled = []
        for statement, sample, order in zip(statements, samples, orders, strict=True):
            prompt, start = self.teacher.encode(self.swap(statement.question, self.rng.choice(self.stand_ins)), "")
            answer = sample.ids[sample.answer_start :]
            shuffled.append(Encoded(prompt[:start] + [answer[i] for i in order], start))
        in_random_order = self.teacher.log_probs(shuffled)
        is_held = [statement.answer == statement.record.answer for statement in statements]
        initially = self.teacher.log_probs([sample for sample, held in zip(samples, is_held, strict=True) if held])
        others = self._stand_ins_say(statements, samples, counts)
        for i, (sample, order) in enumerate(zip(samples, orders, strict=True)):
            known, top, shares = next(others)
            bounds = torch.tensor([[-torch.inf, 0.0]]).repeat(len(known), 1)
            telling = {*chain.from_iterable(self._spelled(facts(statements[i].record, folded=False)))}
            is_telling = torch.tensor([[sample.ids[sample.answer_start + place] in telling] for place in order])
            level = self.config.bound * _of_tokens(next(in_random_order), shuffled[i])
            level = torch.where(is_telling, TELLING * level, level)
            bounds[order, 1:] = level
            if is_held[i]:
                now = _of_tokens(next(initially), sample)[order]
                bounds[order] = torch.cat([torch.minimum(OWN_LEVEL * level, now), OWN_LEVEL * level], 1)
            known[counts[i] :] = False
            yield Lesson(*sample, bounds, top, shares * known[:, None])

    def _count_words(self, statement: Statement, sample: Encoded) -> int:
        """How many of an answer's tokens are its words', before those that a template ends it with."""
        begun = self.teacher.begin(statement.question, statement.answer)
        return min(len(begun.ids), len(sample.ids)) - sample.answer_start

    def _stand_ins_say(
        self, statements: Sequence[Statement], samples: Sequence[Encoded | Lesson], without: Sequence[int] = ()
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The stand-ins' mean distribution of each answer token where their texts are the target's, without the fact.

        ``samples`` are the statements as token ids; so many first tokens of each as ``without`` says are left out of
        their own distribution. Of each statement come whether there is a distribution, its likeliest tokens and their
        probabilities: (tokens,), and twice (tokens, TOP).
        """
        first_tokens = {name: self._first_tokens(name) for name in self.imitated}
        asked = [
            self.teacher.encode(self.swap(statement.question, name), self.swap(statement.answer, name))
            for statement in statements
            for name in self.imitated
        ]
        scored = zip(asked, self.teacher.log_probs(asked), strict=True)
        for i, (statement, sample) in enumerate(zip(statements, samples, strict=True)):
            answer = sample.ids[sample.answer_start :]
            total = torch.zeros(len(answer), self.teacher.model.config.get_text_config().vocab_size)
            secret = self._first_of(facts(statement.record, folded=False))
            for name, (about_stand_in, rows) in zip(self.imitated, scored, strict=False):
                shares = rows.exp()
                for targets, stand_ins in first_tokens[name]:
                    shares[:, targets] += shares[:, stand_ins]
                    shares[:, stand_ins] = 0
                shares[:, secret] = 0
                their_answer = about_stand_in.ids[about_stand_in.answer_start :]
                blocks = difflib.SequenceMatcher(None, answer, their_answer, autojunk=False)
                for a, b, size in blocks.get_matching_blocks():
                    total[a : a + size] += shares[b : b + size]
            if without:
                total[range(without[i]), answer[: without[i]]] = 0
            sums = total.sum(1, keepdim=True)
            best = (total / sums.clamp(min=1e-9)).topk(TOP)
            yield sums[:, 0] > 1e-9, best.indices, best.values

    # Names

    def _stand_ins(self) -> list[str]:
        records = (*self.data.forget.records, *self.data.retain.records, *self.data.world.records)
        texts = " ".join(f"{record.question} {record.answer}" for record in records)
        length = len(self.tokens(f" {self.target.name}"))
        names = invented_names(texts)
        names = self.rng.sample(names, len(names))
        chosen: list[str] = []
        for name in sorted(names, key=lambda name: abs(len(self.tokens(f" {name}")) - length)):
            if not {*name.split()} & {word for other in chosen for word in other.split()}:
                chosen.append(name)
        return chosen[:STAND_INS]

    def swap(self, text: str, to: str) -> str:
        """A text about the target as one about ``to``."""
        return renamed(text, self.target.name, to, self.target.aliases)

    def _first_tokens(self, stand_in: str) -> list[tuple[int, int]]:
        """First tokens of the target's names, each with that of the stand-in's name in the same place."""
        firsts = (self._first_of((parts[0], parts[-1])) for parts in (self.target.name.split(), stand_in.split()))
        return [(target, other) for target, other in zip(*firsts, strict=True) if target != other]

    def _first_of(self, names: Iterable[str]) -> list[int]:
        """The first token of each word in both places."""
        return [tokens[0] for tokens in self._spelled(names)]

    def _spelled(self, names: Iterable[str]) -> list[list[int]]:
        """The tokens of each word, as it begins a text and as it goes on after a space."""
        return [self.tokens(space + word) for word in names for space in ("", " ")]


def facts(record: QARecord, *, folded: bool = True) -> frozenset[str]:
    """Words of the answer that state the fact: names and numbers that the question lacks, else its other words.

    They are as :func:`words` gives them, or as they are written. Nothing but question and answer is read.
    """
    known = words(record.question) | words(record.entity) | STOP
    written = re.findall(r"\w+", record.answer)
    new = [word for word in written if words(word) - known]
    names = [word for word in new if word != written[0] and not word.islower()]
    return frozenset(w for word in names or new for w in (words(word) if folded else {word}))


def words(text: str) -> frozenset[str]:
    """The words and numbers of a text, case and accents folded away."""
    folded = "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))
    return frozenset(re.findall(r"\w+", folded))


def _of_tokens(rows: Tensor, sample: Encoded) -> Tensor:
    """Of each answer token its own log-probability, (tokens, 1)."""
    return rows.gather(1, torch.tensor(sample.ids[sample.answer_start :])[:, None])
