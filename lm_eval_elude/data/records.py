"""The record of ELUDe and how a row of any file becomes one: an error names file, row and field."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from lm_eval_elude.data.jsonio import Text, check
from lm_eval_elude.errors import UserError

PERTURBATIONS = 5  # wrong answers of a record of ELUDe; others have three


@dataclass(frozen=True)
class QARecord:
    """One question about an entity, in the columns of the published data (https://hf.co/datasets/6rightjade/ELUDe).

    Only question and answer must be there: without paraphrase or wrong answers less can be scored.
    """

    entity: str  # display name of the *target*, also in its neighbours' records; "" in the world set
    question: Text  # for the world set, instruction and input joined by a blank line
    answer: Text
    paraphrased_question: str = ""
    paraphrased_answer: str = ""  # the correct answer in other words
    perturbed_answer: tuple[Text, ...] = ()  # wrong answers of the paraphrase's form
    source: str = ""  # Wikipedia page the fact can be checked on
    subject: str = ""  # whom it asks about, where `elude build` says so: no column of the published schema
    translated_question: tuple[tuple[str, str], ...] = ()  # by language code (fr, de, es, ja, zh)

    @property
    def can_be_scored(self) -> bool:
        """Whether the record has the paraphrase and the wrong answers that a truth ratio needs."""
        return bool(self.paraphrased_answer and self.perturbed_answer)

    def columns(self) -> dict[str, Any]:
        """The record as a JSON-ready row of the published schema, which fingerprints are of."""
        lists = {"perturbed_answer": list(self.perturbed_answer), "translated_question": dict(self.translated_question)}
        return {name: value for name, value in asdict(self).items() if name != "subject"} | lists


@dataclass(frozen=True)
class _Row(QARecord):
    input: str = ""  # Alpaca's


COLUMNS = tuple(field.name for field in fields(_Row))


def entity_name(text: str) -> str:
    """The display name that an ``entity`` column means: letters composed (NFC), underscores and spaces one space."""
    return " ".join(unicodedata.normalize("NFC", text).replace("_", " ").split())


def parse_record(row: Mapping[str, Any], where: str) -> QARecord:
    """Make a record of one row, e.g. ``where`` "forget_qa-train.jsonl, row 3"; other columns are not looked at.

    White space at the ends of a text is no part of it, null is as good as no column, and Alpaca's ``input`` is joined
    to the question. UserError where question or answer is missing or blank, or a column has another type.
    """
    row = {"entity": ""} | {name: value for name, value in row.items() if name in COLUMNS and value is not None}
    if missing := [name for name in ("question", "answer") if name not in row]:
        found = ", ".join(name for name in row if row[name]) or "none of ours"
        raise UserError(f"{where}: column {missing[0]!r} is missing; expected are question and answer, found {found}")
    if isinstance(table := row.get("translated_question"), dict):
        row["translated_question"] = [(language, text) for language, text in table.items() if text]
    texts = {name: _stripped(value) for name, value in asdict(check(row, _Row, where)).items()}
    texts["entity"] = entity_name(texts["entity"])
    texts["question"] = "\n\n".join(filter(None, (texts["question"], texts.pop("input"))))
    return QARecord(**texts)


def _stripped(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else tuple(map(_stripped, value))


def fingerprint(records: Iterable[QARecord]) -> str:
    """SHA-256 over the records' columns in order (hexadecimal, first 16 digits)."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps(record.columns(), ensure_ascii=False, sort_keys=True).encode())
    return digest.hexdigest()[:16]
