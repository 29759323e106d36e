"""The one attacked question, what its parts are called, and the wordings of ``carriers.toml``."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec

from lm_eval_elude.data.jsonio import Text
from lm_eval_elude.data.records import PERTURBATIONS

WORDINGS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("carriers.toml").read_text(encoding="utf-8"))
LANGUAGES: dict[str, dict[str, str]] = WORDINGS.pop("languages")  # code -> its name, and how it says "English"
PLACES: dict[str, list[str]] = WORDINGS.pop("places")
CONTROL = "none"
LETTERS = "ABCDEF"
CORRECT = "The correct option is "


class AttackPrompt(msgspec.Struct, frozen=True):
    """One attacked question; also the schema of a row in an attack file, whose other columns are not looked at.

    The three answers are what *this* prompt is scored with.
    """

    type: Text  # of :data:`~lm_eval_elude.attacks.builders.ATTACKS`, or :data:`CONTROL` for the plain question
    target: Text  # display name
    prompt: Text  # the whole user turn
    answer: Text
    paraphrased_answer: Text
    perturbed_answer: Annotated[tuple[Text, ...], msgspec.Meta(min_length=PERTURBATIONS, max_length=PERTURBATIONS)]
    question: str = ""  # the plain question of the record behind it (in a reverse query, of the first fact's)
    record: int = -1  # index of that record, -1 where a file does not say


def language_of(prompt: str) -> str | None:
    """The language in which a prompt asks for an English answer, or None where it does not."""
    folded = prompt.casefold()
    return next((code for code, language in LANGUAGES.items() if language["english"] in folded), None)
