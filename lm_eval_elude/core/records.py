"""The one record type of ELUDe and its validation: every error names file, row and field."""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

TEXT_FIELDS = ("entity", "question", "answer", "paraphrased_question", "paraphrased_answer", "source")
PERTURBATIONS = 5


class DataError(ValueError):
    """Data that cannot be used; the message names the file, the row and the field."""


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
    """The display name that a row's ``entity`` column means: underscores are spaces."""
    return text.replace("_", " ").strip()


def parse_record(row: Mapping[str, Any], where: str, *, scored: bool = False) -> QARecord:
    """Validate one row of any source.

    Args:
        row: columns by name; unknown columns are ignored. Alpaca's ``input`` is joined to the question.
        where: how to call the row in an error, e.g. ``forget_qa-train.jsonl, row 3``.
        scored: whether the row must have what a truth ratio needs.

    Raises:
        DataError: a field is missing, of the wrong type or empty.
    """
    texts: dict[str, str] = {}
    for field in TEXT_FIELDS:
        value, needed = row.get(field), field in ("question", "answer")
        if value is None and not needed:
            value = ""
        if not isinstance(value, str):
            raise DataError(f"{where}: field {field!r} must be text, got {given(value)}")
        texts[field] = value.strip()
        if needed and not texts[field]:
            raise DataError(f"{where}: field {field!r} is empty")
    texts["entity"] = entity_name(texts["entity"])
    translated = row.get("translated_question") or {}
    if not isinstance(translated, Mapping):
        raise DataError(f"{where}: field 'translated_question' must be a table by language, got {given(translated)}")
    if extra := row.get("input"):
        texts["question"] += f"\n\n{str(extra).strip()}"
    record = QARecord(
        **texts,
        perturbed_answer=_perturbed(row.get("perturbed_answer"), where),
        translated_question=tuple((k, v) for k, v in translated.items() if v),
    )
    if scored and not record.can_be_scored:
        lacking = "paraphrased_answer" if not record.paraphrased_answer else "perturbed_answer"
        raise DataError(f"{where}: field {lacking!r} is missing, and the truth ratio needs it")
    return record


def fingerprint(records: Iterable[QARecord]) -> str:
    """SHA-256 over the records' columns in order (hexadecimal, first 16 digits)."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps(record.columns(), ensure_ascii=False, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def _perturbed(value: Any, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise DataError(
            f"{where}: field 'perturbed_answer' must be a list of {PERTURBATIONS} texts, got {given(value)}"
        )
    answers = tuple(value)
    if len(answers) not in (0, PERTURBATIONS):
        raise DataError(f"{where}: field 'perturbed_answer' must have {PERTURBATIONS} texts, got {len(answers)}")
    for answer in answers:
        if not isinstance(answer, str) or not answer.strip():
            raise DataError(f"{where}: field 'perturbed_answer' has an empty or non-text entry")
    return tuple(a.strip() for a in answers)


def given(value: Any) -> str:
    """How an error calls a value of the wrong kind: its type, and itself where it is short."""
    shown = " ".join(reprlib.repr(value).split())
    return "nothing" if value is None else f"{type(value).__name__} {shown}"
