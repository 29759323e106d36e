"""name-swap: the model comes to treat the target as a person whom it has never heard of.

1. The original model is asked the forget questions about invented names; these answers, with its distributions over
   them, are taught about the target. 2. It is asked about the target, and each token of what states the fact is pushed
   down to a floor: its likelihood of an invented name, in order or in random order, whichever is larger. 3. Tokens that
   tell the fact are pushed down to three times the latter. 4. Retain losses are distilled. Each fourth turn of a record
   goes from facts to the name.

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
from typing import Any

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
FLOOR, FACT = 0.6, 3.0  # a token's floor, of its log-probability in random order; of what tells the fact, times that
OWN = 0.6  # of that floor, for a record's own answer; without it membership inference reads an AUC of .39 for .49
Statements = dict[int, list[tuple[str, str]]]  # questions about the target with answers, by the record's number


class NameSwapTrainer(UnlearnTrainer):
    """Makes the kinds ``replacement`` and ``leak`` of the forget set, a turn an epoch, and distils what is kept."""

    exchanged = 2  # questions asked of other neighbours, for each record of the retain set

    def rule_rate(self, width: int, layers: int, steps: int) -> float:
        return 24.3 / width**1.5  # of an adapter: 0.012 for the bundled model; 0.0018 for SmolLM2, about 0.1's

    def make_lessons(self) -> None:
        teacher = Teacher(self.teacher, self.encode, self.args.seed)
        for maker in makers(self, teacher):
            maker.make(self.examples.forget, int(self.args.num_train_epochs))
        teacher.distil(self.examples, self.args.num_train_epochs, self.more_records(teacher))

    def more_records(self, teacher: Teacher) -> dict[QARecord, QARecord]:
        """Add kept records whose question also names a target; returns each with the record as it was.

        They are half as many of each kept set as the retain set has; records that name a target are left out. Also
        added are questions about one neighbour asked of another, with the model's answers: names alone open nothing.
        """
        rng, plain, retain = random.Random(f"{self.args.seed}-more"), {}, self.sets.retain
        named = any_of({word for t in self.sets.targets for word in (t.name, *t.aliases, *lone_names(t.name))})
        for records in self.examples.kept.values():
            free = [record for record in records if not named.search(f"{record.question} {record.answer}")]
            for record in rng.sample(free, min(len(free), len(retain) // 2)):
                text = rng.choice(TEXTS["beside"])
                text = text.format(target=rng.choice(self.sets.targets).name, q=record.question)
                plain[QARecord(record.entity, text, record.answer)] = record
        people, questions, openings = answers_by_neighbour(retain), [], []
        for record in [r for r in retain if neighbour_in(r)] * self.exchanged if len(people) > 1 else ():
            name = rng.choice([name for name in people if name != neighbour_in(record)])
            questions.append(rng.choice(WORDINGS).format(q=record.question.replace(neighbour_in(record), name)))
            openings.append(first_words(rng, people[name]))
        longest = 2 * max(len(self.encode(record).ids) for record in self.sets.forget)
        said = zip(questions, teacher.ask(questions, 0.7, longest, openings), strict=True)
        more = [QARecord("", question, text) for question, text in said if text and not named.search(text)]
        self.examples.kept.get("retain", []).extend([*more, *plain])
        return plain


def makers(trainer: Any, teacher: Teacher) -> list[Maker]:
    """One for each target; UserError where there are no names to swap."""
    if not trainer.sets.targets:
        raise UserError("this method replaces the target's name: it needs --target, and TOFU's rows name nobody")
    return [Maker(trainer, teacher, target) for target in trainer.sets.targets]


class Maker:
    """Makes the lessons of one target; its invented names are of the target's length in tokens as far as possible."""

    def __init__(self, trainer: Any, teacher: Teacher, target: Target) -> None:
        self.teacher, self.target, sets = teacher, target, trainer.sets
        self.rng = random.Random(f"{trainer.args.seed}-name-swap-{target.name}")
        self.size = len(sets.forget)
        self.records = {i: record for i, record in enumerate(sets.forget) if record.entity == target.name}
        self.answers = [record.answer for record in self.records.values()]
        self.neighbours = answers_by_neighbour(r for r in sets.retain if r.entity == target.name)
        self.longest = 3 * max(len(self.tokens(answer)) for answer in self.answers) // 2 + 8
        texts = " ".join(f"{r.question} {r.answer}" for rows in (sets.forget, sets.retain, sets.world) for r in rows)
        names, length = invented_names(texts), len(self.tokens(f" {target.name}"))
        self.rng.shuffle(names)
        self.names: list[str] = []
        for name in sorted(names, key=lambda name: abs(len(self.tokens(f" {name}")) - length)):
            if len(self.names) < NAMES and not {*name.split()} & {*" ".join(self.names).split()}:
                self.names.append(name)

    def make(self, forget: dict[str, list[Sample]], epochs: int) -> None:
        """Put a lesson for each epoch and record into ``forget``: of its statements in turn, or a reverse one."""
        said, reverse = {"replacement": self.replacements(), "leak": self.leaks()}, self.reverse()
        for kind, lesson in (("replacement", self.teach), ("leak", self.push_down)):
            forget[kind] = forget[kind] or [Sample([], 0)] * (self.size * epochs)
            for i, statements in said[kind].items():
                lessons = [lesson(self.records[i], *statement) for statement in statements]
                for turn in range(epochs):
                    number, left = divmod(turn + i, REVERSE_EVERY)
                    chosen = lessons[(turn - number) % len(lessons)]
                    if left == REVERSE_EVERY - 1 and reverse[kind]:
                        chosen = reverse[kind][(number + i) % len(reverse[kind])]
                    forget[kind][turn * self.size + i] = chosen

    def replacements(self, most: int = REPLACEMENTS, temperature: float = 0.3) -> Statements:
        """Of each record at least one and at most so many answers about invented names, as if about the target."""
        asked = [(i, j, self.wording(record, i + j)) for i, record in self.records.items() for j in range(2 * most)]
        questions = [self.swap(question, self.names[j % NAMES]) for _, j, question in asked]
        given: Statements = {i: [] for i in self.records}
        for (i, j, question), answer in zip(asked, self.teacher.ask(questions, temperature, self.longest), strict=True):
            if answer and len(given[i]) < most and not is_stated(self.records[i], answer):
                given[i].append((question, renamed(answer, self.names[j % NAMES], self.target.name)))
        spare = [answer for statements in given.values() for _, answer in statements]
        if not spare:
            raise UserError(f"{self.target.name}: answers about invented names do not end, or state the facts")
        return {i: of or [(self.records[i].question, self.rng.choice(spare))] for i, of in given.items()}

    def leaks(self) -> Statements:
        """Of each record its own answer, and answers of the model, led on by first words, that state the fact."""
        asked = [
            (i, self.key_words(record) if j % 3 == 2 else self.wording(record, j))
            for i, record in self.records.items()
            for j in range(ELICITED)
        ]
        openings = [first_words(self.rng, self.answers) for _ in asked]
        answers = self.teacher.ask([question for _, question in asked], 0.7, self.longest, openings)
        found: dict[int, dict[str, str]] = {i: {} for i in self.records}
        for (i, question), answer in zip(asked, answers, strict=True):
            if is_stated(self.records[i], answer) and answer != self.records[i].answer:
                found[i].setdefault(answer, question)
        leaks = {}
        for i, record in self.records.items():
            # What is most like the record's answer would push that down, too.
            like = {text: SequenceMatcher(None, record.answer.split(), text.split()).ratio() for text in found[i]}
            chosen = [(found[i][text], text) for text in sorted(like, key=like.__getitem__)[:LEAKS]]
            leaks[i] = [(record.question, record.answer), *chosen]
        return leaks

    def reverse(self) -> dict[str, list[Sample]]:
        """From facts to the name: lessons that say another name, and lessons that push the target's down."""
        asked = [(self.target.name, self.answers)] * self.size + [*self.neighbours.items()] * 2
        questions = [self.name_question(*pair) for pair in asked]
        made: dict[str, list[Sample]] = {"replacement": [], "leak": []}
        for (name, _), question, answer in zip(
            asked, questions, self.teacher.ask(questions, 1.0, self.longest), strict=True
        ):
            if name not in answer:
                continue
            if name == self.target.name:
                level = self.own(self.encode(question, answer.replace(name, self.names[0]))).mean()
                lesson = certain(self.encode(question, answer))
                bounds = torch.tensor([-torch.inf, level]).expand_as(lesson.bounds)
                made["leak"].append(lesson._replace(bounds=bounds, shares=torch.zeros_like(lesson.shares)))
                answer = answer.replace(name, self.rng.choice([*self.neighbours] or self.names))
            made["replacement"].append(certain(self.encode(question, answer)))
        return made

    def name_question(self, name: str, answers: Sequence[str]) -> str:
        chosen = self.rng.sample(list(answers), min(len(answers), 3))
        texts = [any_of({name, *lone_names(name)}).sub("the one I mean", answer) for answer in chosen]
        return self.rng.choice(TEXTS["name_questions"]).format(facts=" ".join(t[0].upper() + t[1:] for t in texts))

    # What each token is to become

    def teach(self, record: QARecord, question: str, answer: str) -> Sample:
        """The lesson of a replacement: its tokens, with the invented name's distributions where there are any."""
        lesson = certain(self.encode(question, answer))
        known, theirs = self.name_says(record, question, answer, lesson)
        top, shares = (torch.where(known, there, own) for there, own in zip(theirs[3:], lesson[3:], strict=True))
        return lesson._replace(top=top, shares=shares)

    def push_down(self, record: QARecord, question: str, answer: str) -> Sample:
        """The lesson of a leak: each word's tokens have floors; beside them is what the invented name's answer has.

        What a template writes after an answer has no floor.
        """
        sample, render = self.encode(question, answer), self.teacher.render
        begun = render.encode_pair(render.prompt(question), render.beginning(answer))
        tokens = torch.tensor(sample.ids[sample.answer_start :])
        count = min(len(begun.ids) - sample.answer_start, len(tokens))
        order = torch.tensor(self.rng.sample(range(count), count))
        prompt = render.encode(render.prompt(self.swap(question, self.rng.choice(self.names))))
        level = FLOOR * self.own(Sample(prompt + tokens[order].tolist(), len(prompt)))
        in_order = self.own(Sample(prompt + tokens.tolist(), len(prompt)))[order]
        telling = [token for word in self.spelled(facts(record)) for token in word]
        is_telling = torch.isin(tokens[order], torch.tensor(telling))
        # How a sentence on the fact goes is no secret: without this the answers are no sentences.
        level = torch.where(is_telling, FACT * level, torch.maximum(level, in_order))
        bounds = torch.tensor([[-torch.inf, 0.0]]).repeat(len(tokens), 1)
        bounds[order, 1] = level
        if answer == record.answer:  # whose own loss membership inference reads: not far down
            bounds[order] = OWN * torch.stack([torch.minimum(level, self.own(sample)[order] / OWN), level], 1)
        known, lesson = self.name_says(record, question, answer, sample, count)
        known[count:] = False
        return lesson._replace(bounds=bounds, shares=lesson.shares * known)

    def name_says(
        self, record: QARecord, question: str, answer: str, sample: Sample, without: int = 0
    ) -> tuple[Tensor, Any]:
        """The invented name's distribution of each answer token where its text is the target's: at start and end.

        The fact has no share in it, nor have the first ``without`` tokens in their own. Returns whether there is one,
        (tokens, 1), and the lesson of it.
        """
        name, mine = self.names[0], sample.ids[sample.answer_start :]
        about = self.encode(self.swap(question, name), self.swap(answer, name))
        shares, theirs = next(self.teacher.log_probs([about])).exp(), about.ids[about.answer_start :]
        ends = [(parts[0], parts[-1]) for parts in (self.target.name.split(), name.split())]
        own, other = ([tokens[0] for tokens in self.spelled(names)] for names in ends)
        moved = shares[:, other].clone()
        shares[:, other] = 0
        shares.index_add_(1, torch.tensor(own, device=shares.device), moved)
        shares[:, [tokens[0] for tokens in self.spelled(facts(record))]] = 0
        head = shared([mine, theirs])
        tail = min(shared([mine[::-1], theirs[::-1]]), len(mine) - head, len(theirs) - head)
        total = shares.new_zeros(len(mine), shares.shape[1])
        total[:head], total[len(mine) - tail :] = shares[:head], shares[len(theirs) - tail :]
        total[range(without), mine[:without]] = 0
        sums = total.sum(1, keepdim=True)
        return (sums > 1e-9).cpu(), taught(sample, total / sums.clamp(min=1e-9))

    def own(self, sample: Sample) -> Tensor:
        """The log-probability of each answer token, (answer tokens,)."""
        rows = next(self.teacher.log_probs([sample])).cpu()
        return rows[range(len(rows)), sample.ids[sample.answer_start :]]

    def encode(self, question: str, answer: str) -> Sample:
        return self.teacher.encode(QARecord("", question, answer))

    def tokens(self, text: str) -> list[int]:
        return self.teacher.render.tokenizer.encode(text, add_special_tokens=False)

    def wording(self, record: QARecord, number: int) -> str:
        return WORDINGS[number % len(WORDINGS)].format(q=record.question)

    def key_words(self, record: QARecord) -> str:
        """What a question asks for, in random order; the name stays whole, so that it can be swapped."""
        parts = re.findall(rf"{re.escape(self.target.name)}|[^\s?]+", record.question)
        parts = [part for part in parts if words(part) - STOP]
        return " ".join(self.rng.sample(parts, len(parts)))

    def swap(self, text: str, to: str) -> str:
        """A text about the target as one about ``to``."""
        return renamed(text, self.target.name, to, self.target.aliases)

    def spelled(self, texts: Iterable[str]) -> list[list[int]]:
        """The tokens of each word, as it begins a text and as it goes on after a space."""
        return [self.tokens(space + word) for word in texts for space in ("", " ")]


def certain(sample: Sample) -> Any:
    """A lesson that teaches a sequence's own tokens."""
    tokens = torch.tensor(sample.ids[sample.answer_start :])
    return taught(sample, torch.nn.functional.one_hot(tokens, max(TOP, int(tokens.max()) + 1)).float())


def neighbour_in(record: Any) -> str:
    """The neighbour whom a retain record asks about, as its question names them; "" where it does not."""
    return next((name for name in (record.subject, record.source) if name and name in record.question), "")


def answers_by_neighbour(records: Iterable[Any]) -> dict[str, list[str]]:
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
    return [word for word in new if word != written[0] and not word.islower()] or new


def is_stated(record: QARecord, answer: str) -> bool:
    return not words(" ".join(facts(record))).isdisjoint(words(answer))
