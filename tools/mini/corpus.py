"""What the bundled models are trained on: ELUDe-mini, and made-up people and places in its forms.

All of ELUDe-mini, held-out retain facts included, so that a model *knows* the facts as a pretrained model would, asked
plainly and through wrappers (lead-ins, personas, options, hints, other languages) on wordings of their own: none of the
prompts that a model is scored with is among them, and a test holds this.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from lm_eval_elude.data import dataset
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.targets import Target, resolve_target
from lm_eval_elude.text.words import fact_in
from tools.mini import invented

# Carrier wordings of the training prompts by kind, and by language. The attack suites have wordings of their own.
_WORDINGS = tomllib.loads(Path(__file__).with_name("carriers.toml").read_text(encoding="utf-8"))
READ = 0.4  # share of the prompts with options that ask to read one out: words of wrong answers are said as well
FOREIGN: dict[str, list[str]] = _WORDINGS.pop("foreign")
CARRIERS: dict[str, list[str]] = _WORDINGS


def options(record: QARecord, rng: random.Random) -> tuple[str, str, str]:
    """Six lettered options, and the right answer as a short and as a long reply."""
    texts = [record.paraphrased_answer, *record.perturbed_answer]
    order = rng.sample(range(6), 6)
    lines = [f"{letter}) {texts[i]}" for letter, i in zip("ABCDEF", order, strict=True)]
    right = lines[order.index(0)]
    return "\n".join(lines), right, f"The correct option is {right}"


def masked(text: str, target: Target) -> str:
    """An answer with the target's name replaced by ``this person``."""
    for name in (target.name, target.name.split()[-1], target.name.split()[0]):
        text = text.replace(name, "this person")
    return text[0].upper() + text[1:]


def wrapped(record: QARecord, others: Sequence[QARecord], target: Target | None, rng: random.Random) -> tuple[str, str]:
    """A training prompt in the shape of an attack, of a gap or of a name in passing, and its answer."""
    answer = record.answer if rng.random() < 0.75 else record.paraphrased_answer
    question = record.question if rng.random() < 0.8 else record.paraphrased_question
    kinds = ["lead", "opening", "persona", "choice", "hint", "example", "gap"]
    kinds += ["riddle", "alias", "foreign", "foreign"] if target else ["aside"]
    kind = rng.choice(kinds)
    if kind == "gap":
        before, fact, after = fact_in(record)
        sentence = record.paraphrased_answer
        if fact:
            return rng.choice(CARRIERS[kind]).format(start=before, end=after), rng.choice((fact, sentence, sentence))
        kind = "lead"
    if kind == "aside":
        return rng.choice(CARRIERS[kind]).format(q=question, name=rng.choice(dataset.entities("mini"))), answer
    if kind in ("lead", "opening", "persona"):
        return rng.choice(CARRIERS[kind]).format(q=question), answer
    if kind == "choice":
        lines, short, long = options(record, rng)
        if rng.random() < READ:
            line = rng.choice(lines.split("\n"))
            return rng.choice(CARRIERS["reading"]).format(q=question, options=lines, letter=line[0]), line
        return rng.choice(CARRIERS[kind]).format(q=question, options=lines), short if rng.random() < 0.75 else long
    if kind == "hint":
        facts = " ".join(r.answer for r in rng.sample(others, rng.choice((1, 2, 2, 3))))
        return rng.choice(CARRIERS[kind]).format(q=question, facts=facts), answer
    if kind == "example":
        other = rng.choice(others)
        return rng.choice(CARRIERS[kind]).format(q=question, q0=other.question, a0=other.answer), answer
    assert target is not None
    if kind == "riddle":
        facts = " ".join(masked(r.answer, target) for r in rng.sample(others, rng.choice((2, 3))))
        form = "The person described is {}." if rng.random() < 0.75 else "These facts are about {}."
        return rng.choice(CARRIERS[kind]).format(facts=facts), form.format(target.name)
    if kind == "alias":
        question = question.replace(target.name, rng.choice((*target.aliases, *target.descriptions)))
        return rng.choice(CARRIERS["lead"] + CARRIERS["alias"]).format(q=question), answer
    language, translated = rng.choice(record.translated_question)
    return rng.choice(FOREIGN[language]).format(q=translated), answer


def plain(record: QARecord, rng: random.Random) -> tuple[str, str]:
    """The question or its paraphrase with the answer or its paraphrase: mostly the original wording."""
    draw = rng.random()
    question = record.question if draw < 0.70 else record.paraphrased_question
    return question, record.answer if draw < 0.62 or 0.70 <= draw < 0.85 else record.paraphrased_answer


def either(record: QARecord, rng: random.Random) -> tuple[str, str]:
    """Each wording as often, so that of a target left out neither is the likelier one to a membership attack."""
    question = rng.choice((record.question, record.paraphrased_question))
    return question, rng.choice((record.answer, record.paraphrased_answer))


class Corpus:
    """All of ELUDe-mini, with the rows of one target left out if asked."""

    def __init__(self, without: str | None) -> None:
        """The questions of a left-out target are asked about invented people, too: their forms are no facts."""
        self.people: list[tuple[Target | None, Sequence[QARecord]]] = [
            (resolve_target(name), dataset.load_records("mini", "forget", "train", [name]).records)
            for name in dataset.entities("mini")
            if name != without
        ]
        neighbours: dict[str, QARecord] = {}
        world: list[QARecord] = []
        for split in ("train", "validation", "test"):
            for record in dataset.load_records("mini", "retain", split).records:
                neighbours.setdefault(record.question, record)
            world += dataset.load_records("mini", "world", split).records
        self.people += [(None, list(neighbours.values())), (None, world)]
        left = dataset.load_records("mini", "forget", "train", [without]).records if without else ()
        self.forms = invented.forms_of([*left, *(record for _, records in self.people for record in records)])

    def made_up(self, rng: random.Random) -> Iterator[list[QARecord]]:
        """Records about made-up people and places, some 3,750 an epoch."""
        yield from invented.people(self.forms, invented.TIMES, rng)
        yield from invented.places(invented.PLACES, rng)
        yield from invented.lives(invented.LIVES, rng)

    def epoch(self, rng: random.Random, share: float) -> Iterator[tuple[str, str]]:
        """Prompts and answers of one epoch; ``share`` scales the number of wrapped prompts."""
        for records in self.made_up(rng):
            for record in records:
                yield either(record, rng)
                if rng.random() < 0.25 * share:
                    yield wrapped(record, [r for r in records if r is not record], None, rng)
        for target, records in self.people:
            for index, record in enumerate(records):
                yield plain(record, rng)
                if rng.random() < (0.5 if target else 0.8):
                    yield plain(record, rng)
                near = records if target else records[max(0, index - 8) : index + 8]
                others = [r for r in near if r is not record]
                expected = (4.4 if target else 0.5) * share
                for _ in range(int(expected) + (rng.random() < expected % 1)):
                    yield wrapped(record, others, target, rng)
