"""The one attacked question, and what its parts are called."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

CONTROL = "none"
LETTERS = "ABCDEF"
CORRECT = "The correct option is "
# How each language says "English": every cross-lingual prompt asks for an answer in it, in its own language.
LANGUAGES = {"fr": "anglais", "de": "englisch", "es": "inglés", "ja": "英語", "zh": "英语"}


@dataclass(frozen=True, slots=True)
class AttackPrompt:
    """One attacked question; also the schema of a row in an attack file (see :func:`load_attack_file`).

    Attributes:
        type: one of :data:`ATTACKS`, or :data:`CONTROL` for the plain question.
        target: display name of the entity.
        prompt: the whole user turn.
        answer, paraphrased_answer, perturbed_answer: what *this* prompt is scored with (five wrong answers).
        question: the plain question of the record behind it (of the first fact's record in a reverse query).
        record: index of that record, -1 where a file does not say.
    """

    type: str
    target: str
    prompt: str
    answer: str
    paraphrased_answer: str
    perturbed_answer: tuple[str, ...]
    question: str = ""
    record: int = -1

    def row(self) -> dict[str, Any]:
        """The prompt as a JSON-ready row of an attack file."""
        return asdict(self)


def language_of(prompt: str) -> str | None:
    """The language in which a prompt asks for an English answer, or None where it does not."""
    folded = prompt.casefold()
    return next((language for language, english in LANGUAGES.items() if english in folded), None)
