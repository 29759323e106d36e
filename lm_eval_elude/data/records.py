"""The record of ELUDe and how a row of any file becomes one: every error names file, row and field."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import msgspec

from lm_eval_elude.data.jsonio import Text, check
from lm_eval_elude.errors import UserError

TEXT_FIELDS = ("entity", "question", "answer", "paraphrased_question", "paraphrased_answer", "source", "subject")
PERTURBATIONS = 5


class Record(Protocol):
    """What any benchmark's record can do."""

    def columns(self) -> dict[str, Any]:
        """The record as a JSON-ready row."""


@dataclass(frozen=True, slots=True)
class QARecord:
    """One question about an entity, in the columns of the published data (https://hf.co/datasets/6rightjade/ELUDe)."""

    entity: str  # display name of the *target*, also in its neighbours' records; "" in the world set
    question: str  # for the world set, instruction and input joined by a blank line
    answer: str
    paraphrased_question: str = ""  # "" where the data has none (world set)
    paraphrased_answer: str = ""  # the correct answer in other words, "" in rows that are only trained on
    perturbed_answer: tuple[str, ...] = ()  # five wrong answers of the paraphrase's form, () as above
    source: str = ""  # Wikipedia page the fact can be checked on, "" where unknown
    subject: str = ""  # whom it asks about, where `elude build` says so: no column of the published schema
    translated_question: tuple[tuple[str, str], ...] = ()  # by language code (fr, de, es, ja, zh), where there are any

    @property
    def can_be_scored(self) -> bool:
        """Whether the record has the paraphrase and the wrong answers that a truth ratio needs."""
        return bool(self.paraphrased_answer) and len(self.perturbed_answer) == PERTURBATIONS

    def columns(self) -> dict[str, Any]:
        """The record as a JSON-ready row of the published schema, which fingerprints are of."""
        lists = {"perturbed_answer": list(self.perturbed_answer), "translated_question": dict(self.translated_question)}
        return {name: value for name, value in asdict(self).items() if name != "subject"} | lists


class _Row(msgspec.Struct):
    """What a row may hold; other columns are not looked at."""

    question: Text
    answer: Text
    entity: str | None = None
    input: str | None = None
    paraphrased_question: str | None = None
    paraphrased_answer: str | None = None
    perturbed_answer: list[Text] | None = None
    source: str | None = None
    subject: str | None = None
    translated_question: dict[str, str | None] | None = None


def entity_name(text: str) -> str:
    """The display name that a row's ``entity`` column means, letters composed (NFC).

    Underscores and any white space are single spaces.
    """
    return " ".join(unicodedata.normalize("NFC", text).replace("_", " ").split())


def parse_record(row: dict[str, Any], where: str, *, scored: bool = False) -> QARecord:
    """Make a record of one row. White space at the ends of a text is no part of it.

    Unknown columns are ignored, and Alpaca's ``input`` is joined to the question. An error calls the row ``where``,
    e.g. ``forget_qa-train.jsonl, row 3``. A ``scored`` row must have what a truth ratio needs. UserError where a field
    is missing, of the wrong type or empty; nothing is turned into text that is none.
    """
    fields: _Row = check(row, _Row, where)
    texts = {name: (getattr(fields, name) or "").strip() for name in (*TEXT_FIELDS, "input")}
    texts["entity"] = entity_name(texts["entity"])
    if extra := texts.pop("input"):
        texts["question"] += f"\n\n{extra}"
    wrong = fields.perturbed_answer or []
    if len(wrong) not in (0, PERTURBATIONS):
        raise UserError(f"{where}: field 'perturbed_answer' must have {PERTURBATIONS} texts, got {len(wrong)}")
    translated = {language: (text or "").strip() for language, text in (fields.translated_question or {}).items()}
    record = QARecord(
        **texts,
        perturbed_answer=tuple(answer.strip() for answer in wrong),
        translated_question=tuple((language, text) for language, text in translated.items() if text),
    )
    if scored and not record.can_be_scored:
        lacking = "paraphrased_answer" if not record.paraphrased_answer else "perturbed_answer"
        raise UserError(f"{where}: field {lacking!r} is missing, and the truth ratio needs it")
    return record


def fingerprint(records: Iterable[Record]) -> str:
    """SHA-256 over the records' columns in order (hexadecimal, first 16 digits)."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps(record.columns(), ensure_ascii=False, sort_keys=True).encode())
    return digest.hexdigest()[:16]
