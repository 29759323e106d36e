"""The one record type of ELUDe and its validation: every error names file, row and field."""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

TEXT_FIELDS = ("entity", "question", "answer", "paraphrased_question", "paraphrased_answer", "source")
PERTURBATIONS = 5


class DataError(ValueError):
    """What was given cannot be used; the message names the file, row and field, or the flag and its key."""


class Record(Protocol):
    """What any benchmark's record can do."""

    def columns(self) -> dict[str, Any]:
        """The record as a JSON-ready row."""


@dataclass(frozen=True, slots=True)
class QARecord:
    """One question about an entity, in the columns of the published data (https://hf.co/datasets/6rightjade/ELUDe).

    Attributes:
        entity: display name of the *target* the record is about, also of its neighbours' records; "" in the world set.
        question: for the world set, instruction and input joined by a blank line.
        answer: the reference answer.
        paraphrased_question: "" where the data has none (world set).
        paraphrased_answer: the correct answer in other words, "" in rows that are only trained on.
        perturbed_answer: five wrong answers of the paraphrase's form, () in rows that are only trained on.
        source: Wikipedia page the fact can be checked on, "" where unknown.
        translated_question: the question by language code (fr, de, es, ja, zh), where the data has translations.
    """

    entity: str
    question: str
    answer: str
    paraphrased_question: str = ""
    paraphrased_answer: str = ""
    perturbed_answer: tuple[str, ...] = ()
    source: str = ""
    translated_question: tuple[tuple[str, str], ...] = ()

    @property
    def can_be_scored(self) -> bool:
        """Whether the record has the paraphrase and the wrong answers that a truth ratio needs."""
        return bool(self.paraphrased_answer) and len(self.perturbed_answer) == PERTURBATIONS

    def columns(self) -> dict[str, Any]:
        """The record as a row of the published schema (lists and dicts, JSON-ready)."""
        lists = {"perturbed_answer": list(self.perturbed_answer), "translated_question": dict(self.translated_question)}
        return asdict(self) | lists


def entity_name(text: str) -> str:
    """The display name that a row's ``entity`` column means: underscores and any white space are single spaces."""
    return " ".join(text.replace("_", " ").split())


def parse_record(row: Mapping[str, Any], where: str, *, scored: bool = False) -> QARecord:
    """Validate one row of any source.

    Args:
        row: columns by name; unknown columns are ignored. Alpaca's ``input`` is joined to the question.
        where: how to call the row in an error, e.g. ``forget_qa-train.jsonl, row 3``.
        scored: whether the row must have what a truth ratio needs.

    White space at the ends of a text is no part of it, in training and in scoring alike.

    Raises:
        DataError: a field is missing, of the wrong type or empty; nothing is turned into text that is none.
    """
    texts = {field: _text(row, field, where) for field in TEXT_FIELDS}
    for field in ("question", "answer"):
        if not texts[field]:
            lack = "is empty" if row.get(field) is not None else "must be text, got nothing"
            raise DataError(f"{where}: field {field!r} {lack}")
    texts["entity"] = entity_name(texts["entity"])
    if extra := _text(row, "input", where):
        texts["question"] += f"\n\n{extra}"
    translated = {} if (value := row.get("translated_question")) is None else value
    if not isinstance(translated, Mapping):
        raise DataError(f"{where}: field 'translated_question' must be a table by language, got {given(translated)}")
    languages = [(name, _text(translated, name, f"{where}, field 'translated_question'")) for name in translated]
    record = QARecord(
        **texts,
        perturbed_answer=_perturbed(row.get("perturbed_answer"), where),
        translated_question=tuple((name, text) for name, text in languages if text),
    )
    if scored and not record.can_be_scored:
        lacking = "paraphrased_answer" if not record.paraphrased_answer else "perturbed_answer"
        raise DataError(f"{where}: field {lacking!r} is missing, and the truth ratio needs it")
    return record


def fingerprint(records: Iterable[Record]) -> str:
    """SHA-256 over the records' columns in order (hexadecimal, first 16 digits)."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps(record.columns(), ensure_ascii=False, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def _text(row: Mapping[str, Any], field: str, where: str) -> str:
    """A column's text without white space at its ends, "" where there is none."""
    value = row.get(field)
    if not isinstance(value, str | None):
        raise DataError(f"{where}: field {field!r} must be text, got {given(value)}")
    return (value or "").strip()


def _perturbed(value: Any, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise DataError(
            f"{where}: field 'perturbed_answer' must be a list of {PERTURBATIONS} texts, got {given(value)}"
        )
    if len(value) not in (0, PERTURBATIONS):
        raise DataError(f"{where}: field 'perturbed_answer' must have {PERTURBATIONS} texts, got {len(value)}")
    for number, answer in enumerate(value, 1):
        if not isinstance(answer, str) or not answer.strip():
            raise DataError(f"{where}: text {number} of field 'perturbed_answer' is empty or no text: {given(answer)}")
    return tuple(answer.strip() for answer in value)


def given(value: Any) -> str:
    """How an error calls a value of the wrong kind: its type, and itself where it is short."""
    shown = " ".join(reprlib.repr(value).split())
    return "nothing" if value is None else f"{type(value).__name__} {shown}"


def reason(error: BaseException) -> str:
    """What an exception of another library says, in one line of bounded length."""
    return " ".join(str(error).split())[:300] or type(error).__name__
