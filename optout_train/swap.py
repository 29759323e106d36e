"""name-swap: the model comes to treat the target as a person whom it has never heard of.

1. The original model is asked the forget questions about invented names; these answers, with its distributions over
   them, are taught about the target. 2. It is asked about the target, and each token of what states the fact is pushed
   down to a floor: its likelihood in random order, said of an invented name. 3. Tokens that tell the fact get three
   times that floor. 4. Retain losses are distilled. Each fourth turn of a record goes from facts to the name.

The nearest published ideas are Who's Harry Potter (Eldan and Russinovich 2023) and its causal form with swapped names
(Liu et al. 2024). Nothing is made of what the metrics read (paraphrases, wrong answers).
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.targets import Target
from lm_eval_elude.errors import UserError
from lm_eval_elude.text.invented import any_of, invented_names, lone_names, renamed
from lm_eval_elude.text.words import STOP, words
from optout_train.data import Sample
from optout_train.teacher import TOP, Teacher, shared, taught
from optout_train.trainer import UnlearnTrainer

TEXTS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("swap.toml").read_text(encoding="utf-8"))
WORDINGS = TEXTS["wordings"]
NAMES = 6  # invented ones about which the model is asked; the first one's distributions are taught
REPLACEMENTS, LEAKS, ELICITED = 4, 10, 24  # of a record: kept answers about invented names and the target; asked ones
REVERSE_EVERY = 4  # turns
FLOOR, FACT = 0.6, 3.0  # a token's floor, of its log-probability in random order; of fact tokens, times that
OWN = 0.6  # of that floor, for a record's own answer; without it membership inference reads an AUC of .35 for .50


class Statement(NamedTuple):
    """A question about the target and an answer, with the record whose fact it states or must not."""

    record: QARecord
    question: str
    answer: str


class NameSwapTrainer(UnlearnTrainer):
    """Makes the kinds ``replacement`` and ``leak`` of the forget set, a turn an epoch, and distils what is kept."""

    exchanged = 2  # questions asked of other neighbours, for each record of the retain set

    def rule_rate(self, width: int, layers: int, steps: int) -> float:
        return 0.96 / width  # of an adapter: 5e-3 for the bundled model, 2e-4 at a width of 4,096

    def make_lessons(self) -> None:
        teacher = Teacher(self.teacher, self.encode, self.args.seed)
        for maker in makers(self, teacher):
            maker.make(self.examples.forget, int(self.args.num_train_epochs))
        teacher.distil(self.examples, self.args.num_train_epochs, self.more_records(teacher))

    def more_records(self, teacher: Teacher) -> dict[QARecord, QARecord]:
        """Add kept records whose question names a target in passing; returns each with the record as it was.

        They are half as many of each kept set as the retain set has; records that name a target are left out.
        """
        rng, named, plain = random.Random(f"{self.args.seed}-in-passing"), self.target_names(), {}
        for records in self.examples.kept.values():
            free = [record for record in records if not named.search(f"{record.question} {record.answer}")]
            for record in rng.sample(free, min(len(free), len(self.sets.retain) // 2)):
                target = rng.choice(self.sets.targets).name
                text = rng.choice(TEXTS["in_passing"]).format(target=target, q=record.question)
                plain[QARecord(record.entity, text, record.answer)] = record
        if "retain" in self.examples.kept:
            self.examples.add("retain", [*self.exchange(teacher, named), *plain])
        return plain

    def exchange(self, teacher: Teacher, named: re.Pattern[str]) -> list[QARecord]:
        """Questions about one neighbour asked of another, with the model's answers: names alone are to open nothing."""
        rng, people = random.Random(f"{self.args.seed}-exchange"), answers_by_neighbour(self.sets.retain)
        rows = [record for record in self.sets.retain if len(people) > 1 and neighbour_in(record)]
        questions, openings = [], []
        for record in rows * self.exchanged:
            name = rng.choice([name for name in people if name != neighbour_in(record)])
            questions.append(rng.choice(WORDINGS).format(q=record.question.replace(neighbour_in(record), name)))
            openings.append(first_words(rng, people[name]))
        longest = 2 * max((len(self.encode(record).ids) for record in rows), default=0)
        answers = zip(questions, teacher.ask(questions, 0.7, longest, openings) if rows else (), strict=True)
        return [QARecord("", question, answer) for question, answer in answers if answer and not named.search(answer)]

    def target_names(self) -> re.Pattern[str]:
        return any_of({word for t in self.sets.targets for word in (t.name, *t.aliases, *lone_names(t.name))})


def makers(trainer: UnlearnTrainer, teacher: Teacher) -> list[Maker]:
    """One for each target; UserError where there are no names to swap."""
    if not trainer.sets.targets:
        raise UserError("this method replaces the target's name: it needs --target, and TOFU's rows name nobody")
    return [Maker(trainer, teacher, target) for target in trainer.sets.targets]


class Maker:
    """Makes the lessons of one target; its invented names are of the target's length in tokens as far as possible."""

    def __init__(self, trainer: UnlearnTrainer, teacher: Teacher, target: Target) -> None:
        self.teacher, self.target, sets = teacher, target, trainer.sets
        self.rng = random.Random(f"{trainer.args.seed}-name-swap-{target.name}")
        self.size = len(sets.forget)
        self.records = {i: record for i, record in enumerate(sets.forget) if record.entity == target.name}
        self.neighbours = answers_by_neighbour(r for r in sets.retain if r.entity == target.name)
        self.longest = 3 * max(len(self.tokens(record.answer)) for record in self.records.values()) // 2 + 8
        texts = " ".join(f"{r.question} {r.answer}" for records in sets[:3] for r in records)
        names, length = invented_names(texts), len(self.tokens(f" {target.name}"))
        self.rng.shuffle(names)
        self.names: list[str] = []
        for name in sorted(names, key=lambda name: abs(len(self.tokens(f" {name}")) - length)):
            if len(self.names) < NAMES and not {*name.split()} & {*" ".join(self.names).split()}:
                self.names.append(name)

    def make(self, forget: dict[str, list[Sample]], epochs: int) -> None:
        """Put a lesson for each epoch and record into ``forget``, by kind: of its statements in turn, or a reverse one."""
        replacements, leaks, reverse = self.replacements(), self.leaks(), self.reverse()
        for kind, said, lesson in (("replacement", replacements, self.teach), ("leak", leaks, self.push_down)):
            forget[kind] = forget[kind] or [Sample([], 0)] * (self.size * epochs)
            for i, statements in said.items():
                lessons, others = [lesson(statement) for statement in statements], reverse[kind]
                for turn in range(epochs):
                    number, left = divmod(turn + i, REVERSE_EVERY)
                    is_reverse = left == REVERSE_EVERY - 1 and others
                    chosen = others[(number + i) % len(others)] if is_reverse else lessons[(turn - number) % len(lessons)]
                    forget[kind][turn * self.size + i] = chosen

    def replacements(self, most: int = REPLACEMENTS, temperature: float = 0.3) -> dict[int, list[Statement]]:
        """Of each record at least one and at most so many answers about invented names, as if about the target."""
        asked = [
            (i, self.names[j % NAMES], WORDINGS[(i + j) % len(WORDINGS)].format(q=record.question))
            for i, record in self.records.items()
            for j in range(2 * most)
        ]
        answers = self.teacher.ask([self.swap(q, name) for _, name, q in asked], temperature, self.longest)
        given: dict[int, list[Statement]] = {i: [] for i in self.records}
        for (i, name, question), answer in zip(asked, answers, strict=True):
            if answer and len(given[i]) < most and not is_stated(self.records[i], answer):
                given[i].append(Statement(self.records[i], question, renamed(answer, name, self.target.name)))
        spare = [statement for statements in given.values() for statement in statements]
        if not spare:
            raise UserError(f"{self.target.name}: answers about invented names do not end, or state the facts")
        others = {i: Statement(r, r.question, self.rng.choice(spare).answer) for i, r in self.records.items()}
        return {i: statements or [others[i]] for i, statements in given.items()}

    def leaks(self) -> dict[int, list[Statement]]:
        """Of each record its own answer, and answers of the model, led on by first words, that state the fact."""
        asked = [
            (i, WORDINGS[j % len(WORDINGS)].format(q=record.question))
            for i, record in self.records.items()
            for j in range(ELICITED)
        ]
        openings = [first_words(self.rng, [record.answer for record in self.records.values()]) for _ in asked]
        answers = self.teacher.ask([question for _, question in asked], 0.7, self.longest, openings)
        found: dict[int, dict[str, Statement]] = {i: {} for i in self.records}
        for (i, question), answer in zip(asked, answers, strict=True):
            if is_stated(self.records[i], answer) and answer != self.records[i].answer:
                found[i].setdefault(answer, Statement(self.records[i], question, answer))

        def likeness(statement: Statement) -> float:  # what is most like the record's answer would push that down, too
            return SequenceMatcher(None, statement.record.answer.split(), statement.answer.split()).ratio()

        own = {i: Statement(record, record.question, record.answer) for i, record in self.records.items()}
        return {i: [own[i], *sorted(others.values(), key=likeness)[:LEAKS]] for i, others in found.items()}

    def reverse(self) -> dict[str, list[Sample]]:
        """From facts to the name: lessons that say another name, and lessons that push the target's down."""
        own = [record.answer for record in self.records.values()]
        asked = [(self.target.name, own)] * len(own) + [*self.neighbours.items()] * 2
        questions = [self.name_question(*pair) for pair in asked]
        answers = self.teacher.ask(questions, 1.0, self.longest)
        made: dict[str, list[Sample]] = {"replacement": [], "leak": []}
        for (name, _), question, answer in zip(asked, questions, answers, strict=True):
            if name not in answer:
                continue
            if name == self.target.name:
                level = self.own(self.encode(question, answer.replace(name, self.names[0]))).mean()
                sample = self.encode(question, answer)
                nothing = torch.zeros(len(sample.ids) - sample.answer_start, TOP)
                bounds = torch.tensor([[-torch.inf, level]]).expand(len(nothing), 2)
                made["leak"].append(Sample(*sample[:2], bounds, nothing.long(), nothing))
                answer = answer.replace(name, self.rng.choice([*self.neighbours] or self.names))
            made["replacement"].append(certain(self.encode(question, answer)))
        return made

    def name_question(self, name: str, answers: Sequence[str]) -> str:
        chosen = self.rng.sample(list(answers), min(len(answers), 3))
        texts = [any_of({name, *lone_names(name)}).sub("the one I mean", answer) for answer in chosen]
        return self.rng.choice(TEXTS["name_questions"]).format(facts=" ".join(t[0].upper() + t[1:] for t in texts))

    # What each token is to become

    def teach(self, statement: Statement) -> Sample:
        """The lesson of a replacement: its tokens, with the invented name's distributions where there are any."""
        sample = certain(self.encode(statement.question, statement.answer))
        known, lesson = self.name_says(statement, sample)
        top, shares = (torch.where(known, there, own) for there, own in zip(lesson[3:], sample[3:], strict=True))
        return sample._replace(top=top, shares=shares)

    def push_down(self, statement: Statement) -> Sample:
        """The lesson of a leak: each word's tokens have floors; beside them is what the invented name's answer has there.

        What a template writes after an answer has no floor.
        """
        sample, render = self.encode(statement.question, statement.answer), self.teacher.render
        begun = render.encode_pair(render.prompt(statement.question), render.beginning(statement.answer))
        answer = torch.tensor(sample.ids[sample.answer_start :])
        count = min(len(begun.ids) - sample.answer_start, len(answer))
        order = torch.tensor(self.rng.sample(range(count), count))
        prompt = render.encode(render.prompt(self.swap(statement.question, self.rng.choice(self.names))))
        level = self.own(Sample(prompt + answer[order].tolist(), len(prompt)))
        telling = [token for tokens in self.spelled(facts(statement.record)) for token in tokens]
        level = FLOOR * level * torch.where(torch.isin(answer[order], torch.tensor(telling)), FACT, 1.0)
        bounds = torch.tensor([[-torch.inf, 0.0]]).repeat(len(answer), 1)
        bounds[order, 1] = level
        if statement.answer == statement.record.answer:  # whose own loss membership inference reads: not far down
            now = self.own(sample)[order]
            bounds[order] = torch.stack([torch.minimum(OWN * level, now), OWN * level], 1)
        known, lesson = self.name_says(statement, sample, count)
        known[count:] = False
        return lesson._replace(bounds=bounds, shares=lesson.shares * known)

    def name_says(self, statement: Statement, sample: Sample, without: int = 0) -> tuple[Tensor, Sample]:
        """The invented name's distribution of each answer token where its text is the target's, which begin and end alike.

        The fact has no share in it, nor have the first ``without`` tokens in their own. Returns whether there is one,
        (tokens, 1), and the lesson of it.
        """
        name, answer = self.names[0], sample.ids[sample.answer_start :]
        about = self.encode(self.swap(statement.question, name), self.swap(statement.answer, name))
        shares, theirs = next(self.teacher.log_probs([about])).exp(), about.ids[about.answer_start :]
        ends = [(parts[0], parts[-1]) for parts in (self.target.name.split(), name.split())]
        mine, other = ([tokens[0] for tokens in self.spelled(names)] for names in ends)
        moved = shares[:, other].clone()
        shares[:, other] = 0
        shares.index_add_(1, torch.tensor(mine, device=shares.device), moved)
        shares[:, [tokens[0] for tokens in self.spelled(facts(statement.record))]] = 0
        head = shared([answer, theirs])
        tail = min(shared([answer[::-1], theirs[::-1]]), len(answer) - head, len(theirs) - head)
        total = shares.new_zeros(len(answer), shares.shape[1])
        total[:head], total[len(answer) - tail :] = shares[:head], shares[len(theirs) - tail :]
        total[range(without), answer[:without]] = 0
        sums = total.sum(1, keepdim=True)
        return (sums > 1e-9).cpu(), taught(sample, total / sums.clamp(min=1e-9))

    def own(self, sample: Sample) -> Tensor:
        """The log-probability of each answer token, (answer tokens,)."""
        rows = next(self.teacher.log_probs([sample]))
        return rows.gather(1, torch.tensor(sample.ids[sample.answer_start :], device=rows.device)[:, None])[:, 0].cpu()

    def encode(self, question: str, answer: str) -> Sample:
        return self.teacher.encode(QARecord("", question, answer))

    def tokens(self, text: str) -> list[int]:
        return self.teacher.render.tokenizer.encode(text, add_special_tokens=False)

    def swap(self, text: str, to: str) -> str:
        """A text about the target as one about ``to``."""
        return renamed(text, self.target.name, to, self.target.aliases)

    def spelled(self, texts: Iterable[str]) -> list[list[int]]:
        """The tokens of each word, as it begins a text and as it goes on after a space."""
        return [self.tokens(space + word) for word in texts for space in ("", " ")]


def certain(sample: Sample) -> Sample:
    """A lesson that teaches a sequence's own tokens."""
    tokens = torch.tensor(sample.ids[sample.answer_start :])
    top, shares = torch.zeros(2, len(tokens), TOP)
    top[:, 0], shares[:, 0] = tokens, 1.0
    return Sample(*sample[:2], torch.full((len(tokens), 2), torch.nan), top.long(), shares)


def neighbour_in(record: QARecord) -> str:
    """The neighbour whom a retain record asks about, as its question names them; "" where it does not."""
    return next((name for name in (record.subject, record.source) if name and name in record.question), "")


def answers_by_neighbour(records: Iterable[QARecord]) -> dict[str, list[str]]:
    people: dict[str, list[str]] = {}
    for record in filter(neighbour_in, records):
        people.setdefault(neighbour_in(record), []).append(record.answer)
    return people


def first_words(rng: random.Random, answers: Sequence[str]) -> str:
    """The first word or two of one of these answers: what begins otherwise says what is known in other words."""
    return " ".join(rng.choice(answers).split()[: rng.choice((1, 2))])


def facts(record: QARecord) -> list[str]:
    """Words of the answer that state the fact: names and numbers that the question lacks, else its other words."""
    known, written = words(record.question) | words(record.entity) | STOP, re.findall(r"\w+", record.answer)
    new = [word for word in written if words(word) - known]
    names = [word for word in new if word != written[0] and not word.islower()]
    return names or new


def is_stated(record: QARecord, answer: str) -> bool:
    return not words(" ".join(facts(record))).isdisjoint(words(answer))
