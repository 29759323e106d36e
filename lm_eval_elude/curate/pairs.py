"""Paragraphs to checked question-answer pairs, by a language model that is asked in five ways and never believed.

Whatever is dropped is a :class:`Rejection` with its reason. A call that got no answer at all is no reason to drop
something: the run stops, and the same command goes on.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from lm_eval_elude.attacks.prompt import LANGUAGES
from lm_eval_elude.curate.checks import pair_flaw, quoted, rewording_flaw, translation_flaw
from lm_eval_elude.curate.documents import Paragraph
from lm_eval_elude.curate.duplicates import duplicates
from lm_eval_elude.data.records import PERTURBATIONS
from lm_eval_elude.fetch import FetchError
from lm_eval_elude.llm import CUT, BadReply, Client, Usage, estimate, gather_all, parse_table
from lm_eval_elude.text.letters import same_letters

PROMPTS: dict[str, str] = {
    name: text.strip() for name, text in
    tomllib.loads(Path(__file__).with_name("prompts.toml").read_text(encoding="utf-8")).items()
}  # fmt: skip
T = TypeVar("T")
_Five = msgspec.Meta(extra_json_schema={"minItems": PERTURBATIONS, "maxItems": PERTURBATIONS})


# ---- what the model replies
class _Written(msgspec.Struct):
    question: str
    answer: str


class _Pairs(msgspec.Struct):
    pairs: list[_Written]


class _Support(msgspec.Struct):
    supported: bool
    quote: str | msgspec.UnsetType = msgspec.UNSET


class _Reworded(msgspec.Struct):
    question: str
    answer: str
    wrong: Annotated[list[str], _Five]


class _Judged(msgspec.Struct):
    same: bool
    true: list[int]


# By kind of call: the form of its reply, and the tokens of one, to foresee the cost.
REPLIES: dict[str, tuple[type[msgspec.Struct], int]] = {
    "pairs": (_Pairs, 45),
    "verify": (_Support, 30),
    "reword": (_Reworded, 190),
    "check": (_Judged, 15),
    "translate": (msgspec.defstruct("_Translated", [(code, str) for code in LANGUAGES]), 120),
}


def schema(kind: str, count: int) -> dict[str, Any]:
    """What a call asks for, as a JSON schema: no field may lack or be added; ``count`` pairs at most."""
    whole = msgspec.json.schema(REPLIES[kind][0])
    parts = whole["$defs"]
    for part in parts.values():
        part |= {"required": [*part["properties"]], "additionalProperties": False}
    top: dict[str, Any] = parts.pop(REPLIES[kind][0].__name__)
    if kind == "pairs":
        top["properties"]["pairs"]["maxItems"] = count
    return top | ({"$defs": parts} if parts else {})


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


def rejection(stage: str, pair: Pair, reason: str) -> Rejection:
    return Rejection(stage, pair.paragraph.key, pair.question, pair.answer, reason)


class _Dropped(Exception):
    """No reply to a call was of use: stage and reason."""


def task(kind: str, material: dict[str, Any], **values: object) -> str:
    """The user turn of one call: the task, and the material as one JSON object."""
    return f"{PROMPTS[kind].format(**values)}\n\n{json.dumps(material, ensure_ascii=False, indent=1)}"


class Maker:
    """Makes the pairs of a data set.

    ``names`` is what each subject of the paragraphs is called, full name first; the target's come first. ``called`` is
    all that the target is called (:func:`~lm_eval_elude.text.names.called`). ``count`` pairs are asked for from each
    paragraph; with ``translate`` the target's questions are translated, too.
    """

    def __init__(
        self, client: Client, names: Mapping[str, Sequence[str]], count: int, translate: bool, called: Sequence[str]
    ) -> None:
        self.client, self.names, self.target = client, names, next(iter(names))
        self._called = called
        self.count, self.translate = count, translate
        self.rejections: list[Rejection] = []

    async def make(self, parts: Sequence[Paragraph]) -> list[Pair]:
        """All pairs of all paragraphs, in their order, whatever order the replies come in.

        FetchError where some calls got no answer, UserError where the budget is used up.
        """
        drafted = await self._each("asking", [Pair(part, "", "") for part in parts], self._pairs)
        verified = await self._each("checking", self._without_duplicates(drafted), self._verified)
        return await self._each("rewording", verified, self._reworded)

    async def _each(
        self, name: str, pairs: Sequence[Pair], work: Callable[[Pair], Awaitable[list[Pair | Rejection]]]
    ) -> list[Pair]:
        """The pairs that ``work`` makes of each; those and the rejections are kept in the order of ``pairs``."""
        from tqdm import tqdm

        unanswered: list[str] = []

        async def run(pair: Pair) -> list[Pair | Rejection]:
            try:
                return await work(pair)
            except _Dropped as dropped:
                return [rejection(dropped.args[0], pair, dropped.args[1])]
            except FetchError as error:
                unanswered.append(str(error))
                if self.client.gone:
                    raise
                return []
            finally:
                bar.update()

        made: list[list[Pair | Rejection]] = []
        with tqdm(total=len(pairs), disable=None, desc=name) as bar, suppress(FetchError):
            made = await gather_all(pairs, run)
        if unanswered:
            raise FetchError(
                f"--llm {self.client.shown}: {len(unanswered)} calls got no answer ({unanswered[-1]}); the same "
                "command goes on from there (of a slow server: with a longer --timeout or fewer --workers)"
            )
        self.rejections += [each for several in made for each in several if isinstance(each, Rejection)]
        return [each for several in made for each in several if isinstance(each, Pair)]

    async def _ask(
        self, kind: str, material: dict[str, Any], check: Callable[[Any], T], stage: str, complaint: str = ""
    ) -> T:
        """Ask until ``check`` takes a reply; with half the pairs where the last reply was cut off.

        FetchError for no answer; _Dropped where no reply was taken: the ``complaint``, then what is wrong with the last
        one.
        """
        text, count = task(kind, material, count=self.count), self.count

        def shorter(reason: str) -> str:
            nonlocal count
            count = max(1, count // 2) if reason == CUT else count
            return task(kind, material, count=count)

        def checked(reply: str) -> T:
            try:
                return check(msgspec.convert(parse_table(reply), REPLIES[kind][0]))
            except msgspec.ValidationError as error:
                raise BadReply(f"the reply is not of the form asked for: {error}") from None

        form = schema(kind, self.count)
        outcome = await self.client.until(text, checked, system=PROMPTS["system"], again=shorter, schema=form)
        if outcome.failed:
            raise FetchError(outcome.rejects[-1][1])
        if outcome.value is None:
            raise _Dropped(stage, complaint + outcome.rejects[-1][1])
        return outcome.value

    async def _pairs(self, empty: Pair) -> list[Pair | Rejection]:
        part = empty.paragraph

        def check(reply: _Pairs) -> list[Pair]:
            return [Pair(part, _line(each.question), _line(each.answer)) for each in reply.pairs[: 2 * self.count]]

        material = {"subject": part.subject, "paragraph": part.text}
        made: list[Pair | Rejection] = []
        for pair in await self._ask("pairs", material, check, "asking", "no usable reply: "):
            names = self.names[part.subject]
            flaw = pair_flaw(pair.question, pair.answer, part.text, part.subject, names, self._called)
            made.append(rejection("rules", pair, flaw) if flaw else pair)
        return made

    def _without_duplicates(self, pairs: list[Pair]) -> list[Pair]:
        subjects = [pair.paragraph.subject for pair in pairs]
        earlier = duplicates([(pair.question, pair.answer) for pair in pairs], subjects)
        for late, early in sorted(earlier.items()):
            reason = f"a duplicate: of {pairs[early].question!r} in {pairs[early].paragraph.key}"
            self.rejections.append(rejection("duplicates", pairs[late], reason))
        return [pair for index, pair in enumerate(pairs) if index not in earlier]

    async def _verified(self, pair: Pair) -> list[Pair | Rejection]:
        def check(reply: _Support) -> str:
            if not reply.supported:
                raise _Dropped("checking", "the paragraph does not say so")
            if not quoted(quote := _line(reply.quote or ""), pair.paragraph.text):
                raise BadReply("its quote does not stand in the paragraph")
            return quote

        return [replace(pair, quote=await self._ask("verify", _material(pair), check, "checking", "no quote: "))]

    async def _reworded(self, pair: Pair) -> list[Pair | Rejection]:
        subject = pair.paragraph.subject
        names = self.names[subject]

        def check(reply: _Reworded) -> Pair:
            question, answer, wrong = _line(reply.question), _line(reply.answer), tuple(map(_line, reply.wrong))
            if flaw := rewording_flaw(
                (pair.question, pair.answer), question, answer, wrong, pair.paragraph.text, names,
                () if subject == self.target else self._called,
            ):  # fmt: skip
                raise BadReply(flaw)
            return replace(pair, paraphrased_question=question, paraphrased_answer=answer, wrong=wrong)

        reworded = await self._ask("reword", _material(pair), check, "rewording")
        rewording = {
            "paraphrased_question": reworded.paraphrased_question, "paraphrase": reworded.paraphrased_answer,
            "candidates": {str(number): text for number, text in enumerate(reworded.wrong, 1)},
        }  # fmt: skip
        judged: _Judged = await self._ask(
            "check", _material(pair) | rewording, lambda reply: reply, "checking back", "no usable check: "
        )
        if judged.true or not judged.same:
            reason = "a wrong answer is true" if judged.true else "the paraphrase says something else"
            return [rejection("checking back", pair, reason)]
        if not (self.translate and subject == self.target):
            return [reworded]

        def translation(reply: msgspec.Struct) -> dict[str, str]:
            texts = {code: _line(text) for code, text in msgspec.structs.asdict(reply).items()}
            for code, text in texts.items():
                if flaw := translation_flaw(code, text, pair.question, pair.answer, names):
                    raise BadReply(f"{code}: {flaw}")
            return texts

        try:
            material = {"question": pair.question}
            translated = await self._ask("translate", material, translation, "translating", "kept without: ")
        except _Dropped as dropped:  # the pair is good without them; the cross-lingual attack goes without it
            return [rejection(dropped.args[0], pair, dropped.args[1]), reworded]
        return [replace(reworded, translated=translated)]


def foresee(parts: Iterable[Paragraph], target: str, count: int, translate: bool) -> Usage:
    """What a build will cost if all pairs asked for come and each reply passes: one that fails is asked for again."""
    calls = tokens_in = tokens_out = 0
    for part in parts:
        stand_in = Pair(part, "q" * 80, "a" * 100)
        for kind, (_, tokens) in REPLIES.items():
            if kind == "translate" and not (translate and part.subject == target):
                continue
            size = estimate(PROMPTS["system"] + task(kind, _material(stand_in), count=count))
            size += {"check": 180, "translate": -estimate(part.text) - 25}.get(kind, 0)
            times = 1 if kind == "pairs" else count
            calls += times
            tokens_in += times * size
            tokens_out += count * tokens
    return Usage(calls, tokens_in, tokens_out)


def _material(pair: Pair) -> dict[str, Any]:
    part = pair.paragraph
    return {"subject": part.subject, "paragraph": part.text, "question": pair.question, "answer": pair.answer}


def _line(text: str) -> str:
    return same_letters(" ".join(text.split()))
