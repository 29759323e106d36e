"""Paragraphs to checked question-answer pairs, by a language model that is asked in five ways and never believed.

Whatever is dropped is a :class:`Rejection` with its reason. A call that got no answer at all is no reason to drop
something: the run stops, and the same command goes on.
"""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lm_eval_elude.attacks.prompt import LANGUAGES
from lm_eval_elude.build.checks import pair_flaw, quoted, rewording_flaw
from lm_eval_elude.build.documents import Paragraph
from lm_eval_elude.build.duplicates import duplicates
from lm_eval_elude.core.records import PERTURBATIONS
from lm_eval_elude.llm import CUT, BadReply, Client, EndpointError, Outcome, estimate, parse_table

PROMPTS: dict[str, str] = {
    name: text.strip() for name, text in
    tomllib.loads(Path(__file__).with_name("prompts.toml").read_text(encoding="utf-8")).items()
}  # fmt: skip
# Tokens of a reply by kind of call, to foresee the cost; a pair has some 40, five wrong answers 120.
_REPLY = {"pairs": 45, "verify": 30, "reword": 190, "check": 15, "translate": 120}
T = TypeVar("T")


def _schema(**fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


def schema(kind: str, count: int) -> dict[str, Any]:
    """What a call asks for, as a JSON schema; ``count`` pairs at most."""
    text: dict[str, Any] = {"type": "string"}

    def several(items: dict[str, Any], least: int, most: int) -> dict[str, Any]:
        return {"type": "array", "items": items, "minItems": least, "maxItems": most}

    fields: dict[str, dict[str, Any]] = {
        "pairs": {"pairs": several(_schema(question=text, answer=text), 0, count)},
        "verify": {"supported": {"type": "boolean"}, "quote": text},
        "reword": {"question": text, "answer": text, "wrong": several(text, PERTURBATIONS, PERTURBATIONS)},
        "check": {"same": {"type": "boolean"}, "true": several({"type": "integer"}, 0, PERTURBATIONS)},
        "translate": dict.fromkeys(LANGUAGES, text),
    }
    return _schema(**fields[kind])


@dataclass(frozen=True)
class Pair:
    """A question-answer pair on its way into a record."""

    paragraph: Paragraph
    question: str
    answer: str
    quote: str = ""
    paraphrased_question: str = ""
    paraphrased_answer: str = ""
    wrong: tuple[str, ...] = ()
    translated: dict[str, str] = field(default_factory=dict)


class Rejection(NamedTuple):
    """Something that was dropped, at which stage and why."""

    stage: str
    paragraph: str
    question: str
    answer: str
    reason: str


class Subject(NamedTuple):
    """Whom pairs are about: the target or a neighbour, and what they are called (full name first)."""

    names: tuple[str, ...]
    target: str

    @property
    def is_target(self) -> bool:
        return self.names[0] == self.target


class Estimate(NamedTuple):
    """What a build will cost at most: every pair asked for comes back and passes."""

    calls: int
    tokens_in: int
    tokens_out: int


def task(kind: str, material: dict[str, Any], **values: object) -> str:
    """The user turn of one call: the task, and the material as one JSON object."""
    return f"{PROMPTS[kind].format(**values)}\n\n{json.dumps(material, ensure_ascii=False, indent=1)}"


class Maker:
    """Makes the pairs of a data set.

    Args:
        client: where to ask.
        subjects: by the name that paragraphs have as their subject.
        count: pairs to ask for from each paragraph.
        translate: whether the target's questions are translated for the cross-lingual attack.
        attempts: calls for each thing that has to come out right.
    """

    def __init__(
        self, client: Client, subjects: dict[str, Subject], count: int, translate: bool, attempts: int = 3
    ) -> None:
        self.client, self.subjects, self.count = client, subjects, count
        self.translate, self.attempts = translate, attempts
        self.rejections: list[Rejection] = []

    async def make(self, parts: Sequence[Paragraph]) -> list[Pair]:
        """All pairs of all paragraphs, in their order, whatever order the replies come in.

        Raises:
            EndpointError: some calls got no answer, or the budget is used up.
        """
        drafted = await self._all("asking", parts, self._pairs)
        pairs = [pair for part in drafted for pair in part]
        pairs = [p for p in await self._all("checking", self._without_duplicates(pairs), self._verified) if p]
        return [p for p in await self._all("rewording", pairs, self._reworded) if p]

    async def _all(self, name: str, items: Sequence[Any], work: Callable[[Any], Awaitable[T]]) -> list[T]:
        """``work`` done on every item; results and rejections in the items' order."""
        from tqdm import tqdm

        unanswered: list[str] = []
        kept, self.rejections = self.rejections, []
        dropped: list[list[Rejection]] = [[] for _ in items]
        results: list[Any] = [None] * len(items)
        with tqdm(total=len(items), disable=None, desc=name) as bar:

            async def one(index: int) -> None:
                try:
                    results[index] = await work((items[index], dropped[index]))
                except _NoAnswer as error:
                    unanswered.append(str(error))
                bar.update()
                if self.client.gone:
                    raise _stopped(unanswered, self.client)

            tasks = [asyncio.ensure_future(one(index)) for index in range(len(items))]
            try:
                await asyncio.gather(*tasks)
            finally:
                for running in tasks:
                    running.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        if unanswered:
            raise _stopped(unanswered, self.client)
        self.rejections = [*kept, *(rejection for each in dropped for rejection in each)]
        return results

    async def _ask(self, kind: str, material: dict[str, Any], check: Callable[[dict[str, Any]], T]) -> Outcome[T]:
        text, count = task(kind, material, count=self.count), self.count

        def shorter(reason: str) -> str:
            nonlocal count
            count = max(1, count // 2) if reason == CUT else count
            return task(kind, material, count=count)

        outcome = await self.client.until(
            text, lambda reply: check(parse_table(reply)), system=PROMPTS["system"], attempts=self.attempts,
            again=shorter, schema=schema(kind, self.count),
        )  # fmt: skip
        if outcome.failed:
            raise _NoAnswer(outcome.rejects[-1][1])
        return outcome

    async def _pairs(self, job: tuple[Paragraph, list[Rejection]]) -> list[Pair]:
        part, dropped = job
        subject = self.subjects[part.subject]

        def check(reply: dict[str, Any]) -> list[tuple[str, str]]:
            rows = _field(reply, "pairs", list)
            if not all(isinstance(row, dict) for row in rows):
                raise BadReply('"pairs" is no list of objects')
            return [(_text(row, "question"), _text(row, "answer")) for row in rows[: 2 * self.count]]

        outcome = await self._ask("pairs", {"subject": part.subject, "paragraph": part.text}, check)
        if outcome.value is None:
            dropped.append(Rejection("asking", part.key, "", "", f"no usable reply: {outcome.rejects[-1][1]}"))
        pairs = []
        for question, answer in outcome.value or ():
            if flaw := pair_flaw(question, answer, part.text, part.subject, subject.names, subject.target):
                dropped.append(Rejection("rules", part.key, question, answer, flaw))
            else:
                pairs.append(Pair(part, question, answer))
        return pairs

    def _without_duplicates(self, pairs: list[Pair]) -> list[Pair]:
        lost: dict[int, int] = {}
        for name in self.subjects:
            own = [index for index, pair in enumerate(pairs) if pair.paragraph.subject == name]
            found = duplicates([(pairs[i].question, pairs[i].answer) for i in own], name)
            lost |= {own[late]: own[early] for late, early in found.items()}
        for late, early in sorted(lost.items()):
            reason = f"a duplicate: of {pairs[early].question!r} in {pairs[early].paragraph.key}"
            pair = pairs[late]
            self.rejections.append(Rejection("duplicates", pair.paragraph.key, pair.question, pair.answer, reason))
        return [pair for index, pair in enumerate(pairs) if index not in lost]

    async def _verified(self, job: tuple[Pair, list[Rejection]]) -> Pair | None:
        pair, dropped = job
        part = pair.paragraph

        def check(reply: dict[str, Any]) -> str:
            if not _field(reply, "supported", bool):
                return ""
            if not quoted(quote := _text(reply, "quote"), part.text):
                raise BadReply("its quote does not stand in the paragraph")
            return quote

        outcome = await self._ask("verify", _material(pair), check)
        if not outcome.value:
            reason = "the paragraph does not say so" if outcome.value == "" else f"no quote: {outcome.rejects[-1][1]}"
            dropped.append(_rejected("checking", pair, reason))
            return None
        return replace(pair, quote=outcome.value)

    async def _reworded(self, job: tuple[Pair, list[Rejection]]) -> Pair | None:
        pair, dropped = job
        part, subject = pair.paragraph, self.subjects[pair.paragraph.subject]

        def check(reply: dict[str, Any]) -> Pair:
            wrong = tuple(" ".join(text.split()) for text in _field(reply, "wrong", list) if isinstance(text, str))
            question, answer = _text(reply, "question"), _text(reply, "answer")
            if flaw := rewording_flaw(
                (pair.question, pair.answer), question, answer, wrong, part.text, subject.names,
                "" if subject.is_target else subject.target,
            ):  # fmt: skip
                raise BadReply(flaw)
            return replace(pair, paraphrased_question=question, paraphrased_answer=answer, wrong=wrong)

        outcome = await self._ask("reword", _material(pair), check)
        if (done := outcome.value) is None:
            dropped.append(_rejected("rewording", pair, outcome.rejects[-1][1]))
            return None
        judged = await self._ask(
            "check",
            _material(pair) | {
                "paraphrased_question": done.paraphrased_question, "paraphrase": done.paraphrased_answer,
                "candidates": {str(number): text for number, text in enumerate(done.wrong, 1)},
            },
            lambda reply: (_field(reply, "same", bool), _field(reply, "true", list)),
        )  # fmt: skip
        if judged.value != (True, []):
            reason = (
                f"no usable check: {judged.rejects[-1][1]}" if judged.value is None
                else "a wrong answer is true" if judged.value[1] else "the paraphrase says something else"
            )  # fmt: skip
            dropped.append(_rejected("checking back", pair, reason))
            return None
        if not (self.translate and subject.is_target):
            return done
        translated = await self._ask(
            "translate", {"question": pair.question}, lambda reply: {code: _text(reply, code) for code in LANGUAGES}
        )
        if translated.value is None:
            # The pair is good without them; the cross-lingual attack goes without it.
            dropped.append(_rejected("translating", pair, f"kept without: {translated.rejects[-1][1]}"))
        return replace(done, translated=translated.value or {})


def foresee(parts: Iterable[Paragraph], subjects: dict[str, Subject], count: int, translate: bool) -> Estimate:
    """The calls and tokens of a build in which every pair asked for comes back and passes."""
    calls = tokens_in = tokens_out = 0
    for part in parts:
        stand_in = Pair(part, "q" * 80, "a" * 100)
        kinds = {"pairs": 1, "verify": count, "reword": count, "check": count}
        if translate and subjects[part.subject].is_target:
            kinds["translate"] = count
        for kind, times in kinds.items():
            size = estimate(PROMPTS["system"] + task(kind, _material(stand_in), count=count))
            size += {"check": 180, "translate": -estimate(part.text) - 25}.get(kind, 0)
            calls += times
            tokens_in += times * size
            tokens_out += times * _REPLY[kind] * (count if kind == "pairs" else 1)
    return Estimate(calls, tokens_in, tokens_out)


class _NoAnswer(Exception):
    """A call got no answer."""


def _stopped(unanswered: Sequence[str], client: Client) -> EndpointError:
    return EndpointError(
        f"--llm {client.shown}: {len(unanswered)} calls got no answer ({unanswered[-1]}); the same command goes on "
        "from there"
    )


def _material(pair: Pair) -> dict[str, Any]:
    part = pair.paragraph
    return {"subject": part.subject, "paragraph": part.text, "question": pair.question, "answer": pair.answer}


def _rejected(stage: str, pair: Pair, reason: str) -> Rejection:
    return Rejection(stage, pair.paragraph.key, pair.question, pair.answer, reason)


def _field(reply: dict[str, Any], name: str, kind: type[T]) -> T:
    value = reply.get(name)
    if not isinstance(value, kind):
        raise BadReply(f'the reply has no "{name}" as asked for')
    return value


def _text(reply: dict[str, Any], name: str) -> str:
    return " ".join(_field(reply, name, str).split())
