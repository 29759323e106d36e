"""The one attacked question, what its parts are called, and the wordings of ``carriers.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WORDINGS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("carriers.toml").read_text(encoding="utf-8"))
LANGUAGES: dict[str, dict[str, str]] = WORDINGS.pop("languages")  # code -> its name, and how it says "English"
PLACES: dict[str, list[str]] = WORDINGS.pop("places")
CONTROL = "none"
LETTERS = "ABCDEF"
CORRECT = "The correct option is "


@dataclass(frozen=True, slots=True)
class AttackPrompt:
    """One attacked question; also the schema of a row in an attack file (see :mod:`lm_eval_elude.attacks.files`).

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
    return next((code for code, language in LANGUAGES.items() if language["english"] in folded), None)
