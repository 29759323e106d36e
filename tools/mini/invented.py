"""Questions about made-up people and places, in the forms of ELUDe-mini's own: what the bundled models learn to say.

A form is a question about a person of ELUDe-mini whose fact is a date, a number, or of a kind of ``invented.toml``.
The person becomes an invented one, and the fact is drawn anew, so that nothing can be learnt by heart: only which kind
of answer a question wants, and to keep to the name that it has.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lm_eval_elude.data.records import PERTURBATIONS, QARecord
from lm_eval_elude.data.targets import TARGETS
from lm_eval_elude.text.invented import any_of, lone_names, renamed
from lm_eval_elude.text.words import fact_in
from tools.mini import draw
from tools.mini.build import NEIGHBOURS

_TABLE = tomllib.loads(Path(__file__).with_name("invented.toml").read_text(encoding="utf-8"))
POOLS: dict[str, list[str]] = _TABLE["pool"]
KINDS: dict[str, tuple[re.Pattern[str], list[str]]] = {
    kind["name"]: (re.compile(rf"\b(?:{kind['cues']})\b"), kind["values"]) for kind in _TABLE["kind"]
}
FORMS: list[list[str]] = [*_TABLE["place"]["forms"], *_TABLE["life"]["forms"]]
FORMS_OF_A_PERSON, FORMS_OF_A_PLACE, FORMS_OF_A_LIFE = 7, 4, 8  # at most
TIMES, PLACES, LIVES = 4, 40, 40  # in an epoch: how often each form of ELUDe-mini is asked; places; lives
Draw = Callable[[random.Random], str]


class Form(NamedTuple):
    """A record whose fact can be another, and what draws one."""

    record: QARecord
    fact: str
    value: Draw


class _Drawn(dict[str, str]):
    """Fills a text's placeholders with words of the pools; each time another."""

    def __init__(self, rng: random.Random, known: Mapping[str, str] | None = None) -> None:
        super().__init__(known or {})
        self.rng = rng

    def __missing__(self, pool: str) -> str:
        if pool == "person":
            return f"{self['other_given']} {self['surname']}"
        if pool == "year":
            return str(self.rng.randint(900, 1900))
        if pool == "people":
            return f"{100 * self.rng.randint(3, 900):,}"
        if pool == "few":
            return str(self.rng.randint(2, self.rng.choice((9, 50))))
        if pool == "pounds":
            return f"{self.rng.randint(2, 90)} {self.rng.choice(('million', 'thousand'))} pounds"
        if pool == "date":
            return f"{self.rng.randint(1, 28)} {self.rng.choice(draw.MONTHS)} {self.rng.randint(1900, 2022)}"
        if pool == "cup":
            return filled(self.rng.choice(("{town} Cup", "{surname} Trophy")), self.rng)
        if pool not in POOLS:
            return filled(self.rng.choice(KINDS[pool][1]), self.rng)
        return self.rng.choice(POOLS[pool])


class _Once(_Drawn):
    """Fills a placeholder with the same word each time."""

    def __missing__(self, pool: str) -> str:
        return self.setdefault(pool, super().__missing__(pool))


def filled(text: str, rng: random.Random) -> str:
    return text.format_map(_Drawn(rng))


def number(fact: str, match: re.Match[str], rng: random.Random) -> str:
    """The fact with another date or number, as round as its own, and another town where it has one."""
    scale = draw._scale(match, rng)
    if scale.year:
        other = rng.randint(1880, 2020)
    else:
        units = [u for k in range(8) for u in (10**k, 5 * 10**k) if scale.truth % u == 0 and 4 * u <= scale.truth]
        unit = max(units, default=1) if scale.highest > 100 else 1  # not of numbers as words
        highest = int(min(scale.highest, 3 * scale.truth + 10 * unit))
        other = unit * rng.randint(max(1, int(scale.lowest) // unit), highest // unit)
    before, after = fact[: match.start()], fact[match.end() :]
    return before + scale.write(other) + re.sub(r"\bin [A-Z].*", lambda _: filled("in {town}", rng), after)


def value_of(question: str, fact: str) -> Draw | None:
    """What draws another value for a fact, None where no kind fits it."""
    match = draw._DATE.search(fact) or draw._SEASON.search(fact) or draw._NUMBER.search(fact)
    if match:
        rest = re.sub(r"\bin [A-Z].*", "", fact[: match.start()] + fact[match.end() :])
        return None if re.search(r"[A-Z]|\d", rest) else lambda rng: number(fact, match, rng)
    asked = re.search(r"\b(who|whom|whose|where|which|what)\b((?: \S+){0,5})", question, re.IGNORECASE)
    if not asked or re.search(r" and |,|^the ", fact):
        return None
    cued = sorted((cue.start(), name) for name, (cues, _) in KINDS.items() if (cue := cues.search(asked[2])))
    word = asked[1].casefold()
    kind = "person" if word.startswith("who") else "town" if word == "where" else cued[0][1] if cued else ""
    kind = "given" if kind == "person" and " " not in fact else kind
    if not kind or fact[0].isupper() != is_name(kind):
        return None
    return lambda rng: filled(rng.choice(KINDS[kind][1]), rng)


def is_name(kind: str) -> bool:
    """Whether the values of a kind begin with a capital letter."""
    return filled(KINDS[kind][1][0], random.Random(0))[0].isupper()


def with_value(text: str, fact: str, value: str) -> str:
    """A text with another value in the place of the fact, and the article before it that the value takes."""

    def other(match: re.Match[str]) -> str:
        article = match[1] or ""
        return (article[0] + "n" * value.startswith(tuple("aeiou")) + " " if article else "") + value

    return re.sub(rf"(?<!\w)([Aa]n? )?{re.escape(fact)}(?!\w)", other, text)


def forms_of(records: Sequence[QARecord]) -> dict[str, list[Form]]:
    """The usable forms by the person of ELUDe-mini whom they are about."""
    everyone = dict.fromkeys([*NEIGHBOURS, *(name for names in NEIGHBOURS.values() for name in names)])
    names = {word: name for name in everyone for word in (name, *lone_names(name))}
    forms: dict[str, list[Form]] = {}
    for record in records:
        person = next((name for name in everyone if name in record.question), "")
        _, fact, _ = fact_in(record)
        draws = value_of(record.question, fact) if person and fact else None
        rest = with_value(f"{record.question} {record.answer} {record.paraphrased_answer}", fact or "?", "-")
        others = {names[name] for name in any_of(names).findall(rest)} - {person}
        if draws and not others and fact not in f"{record.question} {record.paraphrased_question}":
            forms.setdefault(person, []).append(Form(record, fact, draws))
    return {person: of for person, of in forms.items() if len(of) > 2}


def drawn(value: Callable[[], str], fact: str = "") -> list[str]:
    """A fact and the wrong ones beside it, all different and none the true one of the form."""
    values = dict.fromkeys(value() for _ in range(40))
    return [value for value in values if value != fact][: PERTURBATIONS + 1]


def about(form: Form, person: str, name: str, rng: random.Random) -> QARecord:
    """The record of a form as one about an invented person, with a fact drawn for it."""
    record, fact = form.record, form.fact
    aliases = next((target.aliases for target in TARGETS if target.name == person), ())
    values = drawn(lambda: form.value(rng), fact)

    def said(text: str, value: str) -> str:
        return renamed(with_value(text, fact, value), person, name, aliases)

    stated = len(re.findall(rf"(?<!\w){re.escape(fact)}(?!\w)", record.answer)) == 1
    return QARecord(
        "",
        said(record.question, fact),
        said(record.answer if stated else record.paraphrased_answer, values[0]),
        said(record.paraphrased_question, fact),
        said(record.paraphrased_answer, values[0]),
        tuple(said(record.paraphrased_answer, value) for value in values[1:]),
    )


def people(forms: Mapping[str, Sequence[Form]], times: int, rng: random.Random) -> Iterator[list[QARecord]]:
    """Records by invented person, in the forms of one of ELUDe-mini's; each form about ``times`` times."""
    for person, of in forms.items():
        texts = " ".join(f"{form.record.answer} {form.record.paraphrased_answer}".casefold() for form in of)
        female = len(re.findall(r"\b(?:she|her)\b", texts)) > len(re.findall(r"\b(?:he|his|him)\b", texts))
        for _ in range(round(times * len(of) / FORMS_OF_A_PERSON)):
            name = filled("{female} {family}" if female else "{male} {family}", rng)
            yield [about(form, person, name, rng) for form in rng.sample(of, min(len(of), FORMS_OF_A_PERSON))]


def made(name: str, form: Sequence[str], known: Mapping[str, str], rng: random.Random) -> QARecord:
    """The record of a form of the table about a made-up person or place."""
    value, *texts = form
    question, paraphrased, answer, other = (text.format_map(known) for text in texts)
    values = drawn(lambda: filled(value, rng))
    versions = [with_value(other, "#", text) for text in values]
    return QARecord("", question, with_value(answer, "#", values[0]), paraphrased, versions[0], tuple(versions[1:]))


def places(count: int, rng: random.Random) -> Iterator[list[QARecord]]:
    """Records by made-up place."""
    for _ in range(count):
        name = filled(rng.choice(_TABLE["place"]["names"]), rng)
        forms = rng.sample(_TABLE["place"]["forms"], FORMS_OF_A_PLACE)
        yield [made(name, form, {"name": name}, rng) for form in forms]


def lives(count: int, rng: random.Random) -> Iterator[list[QARecord]]:
    """Records by made-up person, in forms of the table."""
    for _ in range(count):
        female = rng.random() < 0.5
        name = filled("{female} {family}" if female else "{male} {family}", rng)
        he, his, him = ("she", "her", "her") if female else ("he", "his", "him")
        known = {"name": name, "he": he, "his": his, "him": him, "he_": he.title(), "his_": his.title()}
        known |= {"himself": f"{him}self", "year": str(rng.randint(1960, 2022))}
        forms = rng.sample(_TABLE["life"]["forms"], FORMS_OF_A_LIFE)
        yield [made(name, form, _Once(rng, known), rng) for form in forms]
