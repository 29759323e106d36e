"""Lessons in not knowing: what the initial model says of strangers, and what it says of the target.

All is made before training, from questions and answers of the training splits; paraphrases and wrong answers, which the
metrics are made of, are never read. For each forget record:

- *taught*: the question with an answer that the initial model gives about stand-ins, the name swapped back; those that
  state the fact are dropped. Its tokens carry the stand-ins' mean distribution (the likeliest tokens, the rest).
- *told*: the answer, and what the initial model itself answers when asked in own wordings, begun with other answers'
  first words, and states the fact (elicited). Each token is pushed down, no further than to its level: ``bound`` times
  the log-probability that the initial model gives it among the same tokens in random order, said of a stand-in. That is
  what it thinks of text that it has never read, so the bound goes with the model. The answer itself also sinks with
  what is elicited, and would end below its paraphrases: it is held at :data:`OWN` of that, from both sides (never above
  what the initial model gives it: nothing is learnt), and of what is elicited the least like it are told.
- Every :data:`EVERY`-th turn goes to the other direction: facts without the name are answered with a neighbour's name
  (and neighbours' facts with their own), and the target's name is pushed down to what stand-ins' names get there.

Sources: the name swap is Liu et al. 2024 (https://arxiv.org/abs/2407.16997), answers of its own AltPO (Mekala et al.
2024, https://arxiv.org/abs/2409.13474).
"""

from __future__ import annotations

import difflib
import random
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import NamedTuple

import torch
from torch import Tensor

from lm_eval_elude.core.chat import Encoded
from lm_eval_elude.core.dataset import resolve_targets
from lm_eval_elude.core.records import DataError, QARecord
from lm_eval_elude.core.targets import Target
from optout_train.config import TrainConfig
from optout_train.data import Lesson, TrainingData
from optout_train.teacher import ASKING, CALM, LOOSE, TEXTS, TOP, Teacher, by_neighbour, openings

STAND_INS = 6
LEVELS = 3  # stand-ins whose mean level the target's name comes down to
TAUGHT = 4  # strangers' answers of a record
TOLD = 10  # elicited answers of a record
EVERY = 4
OWN = 0.6  # of the level, for a record's own answer
RIDDLES = TEXTS["riddles"]
STOP = frozenset(
    re.findall(
        r"\w+",
        """a about after all also although an and any are as at be been before but by can could did do does during for
        from had has have he her hers him his how i if in into is it its many me more most much my no not of off on
        once only onto or other our out over own she since so some such than that the their them then there these they
        this those to under until up upon was we were what when where which while who whom whose why will with would
        you your""",
    )
)


def make_lessons(
    config: TrainConfig, data: TrainingData, teacher: Teacher, say: Callable[[str], None]
) -> dict[str, tuple[Lesson, ...]]:
    """The lessons ``taught`` and ``told``: for each turn one of every forget record, in the set's order.

    Args:
        config: the run; an epoch is a turn.
        data: its sets.
        teacher: the initial model.
        say: prints one line for the user.

    Raises:
        DataError: the model says nothing of strangers that could be taught, or a lesson is too long.
    """
    makers = {
        target.name: _Maker(config, data, target, teacher) for target in resolve_targets(config.dataset, config.target)
    }
    taught: list[tuple[Sequence[Lesson], Sequence[Lesson]]] = [((), ()) for _ in data.forget.records]
    told = list(taught)
    for maker in makers.values():
        for place, record in enumerate(data.forget.records):
            if record.entity == maker.target.name or len(makers) == 1:
                maker.places.append(place)
        for place, one, other in zip(maker.places, *maker.make(), strict=True):
            taught[place], told[place] = one, other
        say(maker.summary)
    return {"taught": _turns(taught, config.epochs), "told": _turns(told, config.epochs)}


def _turns(records: Sequence[tuple[Sequence[Lesson], Sequence[Lesson]]], turns: int) -> tuple[Lesson, ...]:
    """Of each record its lessons in turn, with one of the other direction in every :data:`EVERY`-th; turn by turn."""
    rows = []
    for place, (own, others) in enumerate(records):
        lesson, other = cycle(own), cycle(others or own)
        rows.append([next(other if (turn + place) % EVERY == EVERY - 1 else lesson) for turn in range(turns)])
    return tuple(lesson for column in zip(*rows, strict=True) for lesson in column)


_Lessons = Sequence[tuple[Sequence[Lesson], Sequence[Lesson]]]  # of each record its own, and of the other direction


class _Said(NamedTuple):
    """A question about the target and an answer, with the record whose fact it states or must not."""

    record: QARecord
    question: str
    answer: str


class _Maker:
    """Makes the lessons of one target."""

    def __init__(self, config: TrainConfig, data: TrainingData, target: Target, teacher: Teacher) -> None:
        self.config, self.data, self.target, self.teacher = config, data, target, teacher
        self.seed = config.seed
        self.rng = random.Random(f"{config.seed}-stranger-{target.name}")
        self.places: list[int] = []
        self.summary = ""
        tokenizer = teacher.renderer.tokenizer
        self.tokens = lambda text: tokenizer.encode(text, add_special_tokens=False)
        self.stand_ins = self._stand_ins()
        # Whose distributions the lessons carry: nobody's where a plain refusal is taught.
        self.imitated = () if config.answers == "refuse" else tuple(self.stand_ins[: config.teachers])

    def make(self) -> tuple[_Lessons, _Lessons]:
        """Of each record in ``places`` what is taught, and what is told; each with lessons of the other direction."""
        records = [self.data.forget.records[place] for place in self.places]
        self.longest = 3 * max(len(self.tokens(record.answer)) for record in records) // 2 + 8
        said = self._elicit(records)
        strangers = self._strangers(records)
        names, named = self._riddles(records)

        def each(
            make: Callable[[Sequence[_Said]], Iterator[Lesson]], found: Sequence[Sequence[tuple[str, str]]],
            others: Sequence[Lesson],
        ) -> list[tuple[Sequence[Lesson], Sequence[Lesson]]]:  # fmt: skip
            made = make([_Said(r, *one) for r, own in zip(records, found, strict=True) for one in own])
            return [([*islice(made, len(own))], others[i % max(1, len(others)) :]) for i, own in enumerate(found)]

        taught, told = each(self._teach, strangers, names), each(self._push, said, named)
        self.summary = (
            f"{self.target.name}: {sum(map(len, said))} answers that state the facts, {sum(map(len, strangers))} about "
            f"{', '.join(self.stand_ins)}; {len(named)} times named from its facts"
        )
        return taught, told

    def _elicit(self, records: Sequence[QARecord]) -> list[list[tuple[str, str]]]:
        """Of each record (question as asked, answer): its own answer, and what the model says that states the fact.

        Of that the least like the own answer are kept: what is like it would push it below its paraphrases.
        """
        asked = [
            (i, ASKING[j % len(ASKING)].format(q=record.question) if j % 3 != 2 else self._key_words(record.question))
            for i, record in enumerate(records)
            for j in range(self.config.elicit)
        ]
        own = [(self.rng.choice(ASKING).format(q=record.question), record.answer) for record in records]
        first = [openings(self.rng, [answer for _, answer in own]) for _ in asked]
        answers = self.teacher.ask([question for _, question in asked], LOOSE, self.longest, self.seed, first)
        found: list[dict[str, str]] = [{} for _ in records]  # the question by answer
        for (i, question), answer in zip(asked, answers, strict=True):
            if answer and facts(records[i]) & words(answer) and answer != records[i].answer:
                found[i].setdefault(answer, question)

        def like(record: QARecord, answer: str) -> float:
            return difflib.SequenceMatcher(None, record.answer.split(), answer.split(), autojunk=False).ratio()

        return [
            [one, *((more[a], a) for a in sorted(more, key=lambda answer: like(record, answer))[:TOLD])]
            for record, one, more in zip(records, own, found, strict=True)
        ]

    def _strangers(self, records: Sequence[QARecord]) -> list[list[tuple[str, str]]]:
        """Of each record (question about the target, answer that was given about a stand-in, the name swapped back)."""
        if self.config.answers == "refuse":
            refusals = [text for text in self.data.sequences["refusal"] if isinstance(text, str)]
            return [
                [(wording.format(q=record.question), self.rng.choice(refusals)) for wording in ASKING[:TAUGHT]]
                for record in records
            ]
        asked = [
            (i, self.stand_ins[j % STAND_INS], ASKING[(i + j) % len(ASKING)].format(q=record.question))
            for i, record in enumerate(records)
            for j in range(2 * TAUGHT)
        ]
        questions = [self.swap(question, name) for _, name, question in asked]
        answers = self.teacher.ask(questions, CALM, self.longest, self.seed + 1)
        found: list[list[tuple[str, str]]] = [[] for _ in records]
        for (i, name, question), answer in zip(asked, answers, strict=True):
            if answer and len(found[i]) < TAUGHT and not facts(records[i]) & words(answer):
                found[i].append((question, self.swap(answer, self.target.name, name)))
        spare = [answer for own in found for _, answer in own]
        if not spare:
            raise DataError(
                f"{self.target.name}: no answer about strangers can be taught: the model's do not end, or state "
                "the facts; --answers refuse teaches refusals"
            )
        return [own or [(records[i].question, self.rng.choice(spare))] for i, own in enumerate(found)]

    def _riddles(self, records: Sequence[QARecord]) -> tuple[list[Lesson], list[Lesson]]:
        """From the facts to the name: lessons that say another name, and lessons that push the target's down."""
        if not self.config.reverse:
            return [], []
        people = by_neighbour(record for record in self.data.retain.records if record.entity == self.target.name)
        asked = [(self.target.name, [record.answer for record in records]) for _ in records]
        asked += [(name, answers) for name, answers in people.items() for _ in range(2)]
        questions = [self._riddle(name, answers) for name, answers in asked]
        answers = self.teacher.ask(questions, 1.0, self.longest, self.seed + 2)
        others, names, named = list(people) or self.stand_ins, [], []
        for (name, _), question, answer in zip(asked, questions, answers, strict=True):
            if name not in answer:
                continue
            if name != self.target.name:
                names.append(self._plain(question, answer))
                continue
            other = answer.replace(name, self.rng.choice(others))
            if self.config.answers == "refuse":
                other = str(self.rng.choice(self.data.sequences["refusal"]))
            names.append(self._plain(question, other))
            level = self._level(question, [answer.replace(name, one) for one in self.stand_ins[:LEVELS]])
            sample = self.teacher.encode(question, answer)
            nothing = torch.zeros(len(sample.ids) - sample.answer_start, TOP)
            bounds = torch.tensor([[-torch.inf, level]]).expand(len(nothing), 2)
            named.append(Lesson(*sample, bounds, nothing.long(), nothing))
        return names, named

    def _riddle(self, name: str, answers: Sequence[str]) -> str:
        chosen = self.rng.sample(list(answers), min(len(answers), self.rng.choice((2, 3))))
        pattern = _pattern(sorted({name, *_parts(name)}, key=len, reverse=True))
        facts = (pattern.sub("the one I mean", answer) for answer in chosen)
        return self.rng.choice(RIDDLES).format(facts=" ".join(fact[0].upper() + fact[1:] for fact in facts))

    def _level(self, question: str, answers: Sequence[str]) -> float:
        """Mean log-probability of a token over these answers."""
        samples = [self.teacher.encode(question, answer) for answer in answers]
        scores = zip(self.teacher.log_probs(samples), samples, strict=True)
        values = [rows.gather(1, torch.tensor(s.ids[s.answer_start :])[:, None]).mean() for rows, s in scores]
        return float(torch.stack(values).mean())

    # One lesson

    def _plain(self, question: str, answer: str) -> Lesson:
        """A lesson whose tokens are certain."""
        sample = self.teacher.encode(question, answer)
        tokens = torch.tensor(sample.ids[sample.answer_start :])
        top, shares = torch.zeros(2, len(tokens), TOP)
        top[:, 0], shares[:, 0] = tokens, 1.0
        return Lesson(*sample, torch.full((len(tokens), 2), torch.nan), top.long(), shares)

    def _teach(self, said: Sequence[_Said]) -> Iterator[Lesson]:
        """Lessons with the strangers' distributions where there are any."""
        plain = [self._plain(one.question, one.answer) for one in said]
        for own, (known, top, shares) in zip(plain, self._of_strangers(said, plain), strict=True):
            there = known[:, None]
            yield own._replace(top=torch.where(there, top, own.top), shares=torch.where(there, shares, own.shares))

    def _push(self, said: Sequence[_Said]) -> Iterator[Lesson]:
        """Lessons whose tokens are pushed down to ``bound`` times their level in random order; not the template's.

        What takes their place is what strangers' distributions have beside them: without it anything would, such as
        one word again and again.
        """
        samples = [self.teacher.encode(one.question, one.answer) for one in said]
        counts = [self._words(one, sample) for one, sample in zip(said, samples, strict=True)]
        orders = [self.rng.sample(range(count), count) for count in counts]
        shuffled = []
        for one, sample, order in zip(said, samples, orders, strict=True):
            asked, start = self.teacher.encode(self.swap(one.question, self.rng.choice(self.stand_ins)), "")
            body = sample.ids[sample.answer_start :]
            shuffled.append(Encoded(asked[:start] + [body[i] for i in order], start))
        scored = zip(orders, shuffled, self.teacher.log_probs(shuffled), strict=True)
        own = [sample for one, sample in zip(said, samples, strict=True) if one.answer == one.record.answer]
        now = self.teacher.log_probs(own)
        beside = self._of_strangers(said, samples, counts)
        rows_of = zip(said, samples, counts, scored, beside, strict=True)
        for one, sample, count, (order, mixed, rows), (known, top, shares) in rows_of:
            bounds = torch.tensor([[-torch.inf, 0.0]]).repeat(len(known), 1)
            level = self.config.bound * rows.gather(1, torch.tensor(mixed.ids[mixed.answer_start :])[:, None])
            bounds[order, 1:] = level
            if one.answer == one.record.answer:
                said_now = next(now).gather(1, torch.tensor(sample.ids[sample.answer_start :])[:, None])
                bounds[order] = torch.cat([torch.minimum(OWN * level, said_now[order]), OWN * level], 1)
            known[count:] = False
            yield Lesson(*sample, bounds, top, shares * known[:, None])

    def _words(self, said: _Said, sample: Encoded) -> int:
        """How many of an answer's tokens are its words', before those that a template ends it with."""
        return min(len(self.teacher.begin(said.question, said.answer).ids), len(sample.ids)) - sample.answer_start

    def _of_strangers(
        self, said: Sequence[_Said], samples: Sequence[Encoded | Lesson], without: Sequence[int] = ()
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The stand-ins' mean distribution of each answer token where their texts are the target's, without the fact.

        Args:
            said: questions and answers about the target.
            samples: the same as token ids.
            without: how many of each one's first tokens are left out of their own distribution.

        Yields:
            Whether there is one, its likeliest tokens and their probabilities: (tokens,), twice (tokens, TOP).
        """
        if not self.imitated:
            for sample in samples:
                nothing = torch.zeros(len(sample.ids) - sample.answer_start, TOP)
                yield nothing[:, 0] > 0, nothing.long(), nothing
            return
        firsts = {name: self._firsts(name) for name in self.imitated}
        asked = [
            self.teacher.encode(self.swap(one.question, name), self.swap(one.answer, name))
            for one in said
            for name in self.imitated
        ]
        scored = zip(asked, self.teacher.log_probs(asked), strict=True)
        for i, (one, sample) in enumerate(zip(said, samples, strict=True)):
            own = sample.ids[sample.answer_start :]
            total = torch.zeros(len(own), self.teacher.model.config.get_text_config().vocab_size)
            secret = [self.tokens(lead + word)[0] for word in facts(one.record, folded=False) for lead in ("", " ")]
            for name, (theirs, rows) in zip(self.imitated, scored, strict=False):
                shares = rows.exp()
                for mine, other in firsts[name]:
                    shares[:, mine] += shares[:, other]
                    shares[:, other] = 0
                shares[:, secret] = 0
                blocks = difflib.SequenceMatcher(None, own, theirs.ids[theirs.answer_start :], autojunk=False)
                for a, b, size in blocks.get_matching_blocks():
                    total[a : a + size] += shares[b : b + size]
            if without:
                total[range(without[i]), own[: without[i]]] = 0
            sums = total.sum(1, keepdim=True)
            best = (total / sums.clamp(min=1e-9)).topk(TOP)
            yield sums[:, 0] > 1e-9, best.indices, best.values

    # Names

    def _stand_ins(self) -> list[str]:
        """Names that the data does not have, of the target's length in tokens as far as there are such."""
        records = (*self.data.forget.records, *self.data.retain.records, *self.data.world.records)
        told = " ".join(f"{record.question} {record.answer}" for record in records)
        length = len(self.tokens(f" {self.target.name}"))
        pairs = [f"{a} {b}" for a in TEXTS["given"] for b in TEXTS["family"]]
        pairs = self.rng.sample(
            [pair for pair in pairs if pair not in told], len(pairs) - sum(p in told for p in pairs)
        )
        chosen: list[str] = []
        for pair in sorted(pairs, key=lambda pair: abs(len(self.tokens(f" {pair}")) - length)):
            if not {*pair.split()} & {word for name in chosen for word in name.split()}:
                chosen.append(pair)
        return chosen[:STAND_INS]

    def swap(self, text: str, to: str, of: str | None = None) -> str:
        """A text about ``of`` (the target, with all its names, if not given) as one about ``to``."""
        old, new = _parts(of or self.target.name), to.split()
        names = dict.fromkeys(self.target.aliases if of is None else (), to)
        names |= dict(zip(old, (new[0], new[-1]), strict=False)) | {of or self.target.name: to}
        return _pattern(sorted(names, key=len, reverse=True)).sub(lambda found: names[found.group()], text)

    def _firsts(self, name: str) -> list[tuple[int, int]]:
        """First tokens of the target's names, and those of a stand-in that they are put in the place of."""
        old, new = name.split(), self.target.name.split()
        forms = zip((old[0], old[-1]), (new[0], new[-1]), strict=True)
        pairs = [(self.tokens(s + mine)[0], self.tokens(s + theirs)[0]) for theirs, mine in forms for s in ("", " ")]
        return [(mine, theirs) for mine, theirs in pairs if mine != theirs]

    def _key_words(self, question: str) -> str:
        """The question's words that say what is asked for, in random order; the names stay whole."""
        held = question.replace(self.target.name, "\0")
        kept = [word for word in held.split() if words(word) - STOP or "\0" in word]
        return " ".join(self.rng.sample(kept, len(kept))).replace("\0", self.target.name).rstrip("?")


def facts(record: QARecord, *, folded: bool = True) -> frozenset[str]:
    """Words of the answer that state the fact: names and numbers that the question lacks, else its other words.

    Args:
        record: of which question and answer are read, nothing else.
        folded: as :func:`words` gives them, else as they are written.
    """
    known = words(record.question) | words(record.entity) | STOP
    written = re.findall(r"\w+", record.answer)
    told = [word for word in written if words(word) - known]
    names = [word for word in told if word != written[0] and not word.islower()]
    return frozenset(w for word in names or told for w in (words(word) if folded else {word}))


def words(text: str) -> frozenset[str]:
    """The words and numbers of a text, case and accents folded away."""
    folded = "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))
    return frozenset(re.findall(r"\w+", folded))


def _parts(name: str) -> list[str]:
    """First and last word of a name where either stands for it alone: no numerals, no single word."""
    parts = name.split()
    return [parts[0], parts[-1]] if len(parts) > 1 and len(parts[0]) > 2 and len(parts[-1]) > 2 else []


def _pattern(names: Sequence[str]) -> re.Pattern[str]:
    return re.compile(
        "|".join(rf"(?<!\w){re.escape(name)}(?!\w)" if name.isascii() else re.escape(name) for name in names)
    )
