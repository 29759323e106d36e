"""The one attacked question, as it is built and as a file of others has it, and the prompts of ``templates.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict

from lm_eval_elude.data import jsonio
from lm_eval_elude.data.files import Stamp, stamp
from lm_eval_elude.data.jsonio import Text
from lm_eval_elude.data.targets import Target
from lm_eval_elude.errors import UserError

TEMPLATES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("templates.toml").read_text(encoding="utf-8"))
LANGUAGES: dict[str, dict[str, str]] = TEMPLATES.pop("languages")  # code -> its name, and how it says "English"
PLACES: dict[str, list[str]] = TEMPLATES.pop("places")
CONTROL = "none"
LETTERS = "ABCDEF"
CORRECT = "The correct option is "


class AttackPrompt(msgspec.Struct, frozen=True):
    """One attacked question; also the schema of a row in an attack file, whose other columns are not looked at.

    The answers are what *this* prompt is scored with.
    """

    type: Text  # of :data:`~lm_eval_elude.attacks.builders.ATTACKS`, or :data:`CONTROL` for the plain question
    target: Text  # display name
    prompt: Text  # the whole user turn
    answer: Text
    paraphrased_answer: str = ""
    perturbed_answer: tuple[Text, ...] = ()
    question: str = ""  # the plain question of the record behind it (in a reverse query, of the first fact's)
    record: int = -1  # index of that record, -1 where a file does not say


def language_of(prompt: str) -> str | None:
    """The language in which a prompt asks for an English answer, or None where it does not."""
    folded = prompt.casefold()
    return next((code for code, language in LANGUAGES.items() if language["english"] in folded), None)


def load_attack_file(path: Path, target: Target, attack: str, others: Sequence[Target] = ()) -> list[AttackPrompt]:
    """The prompts of one type and target in a JSONL file of :class:`AttackPrompt` rows that replaces the built ones.

    ``others`` are the further targets of the same run. UserError where the file cannot be read, a row is wrong (file,
    row and field are named), or no row has that type.
    """
    rows = _read(path, stamp(path), (target.name, *(other.name for other in others)))
    if not (prompts := [item for item in rows if item.type == attack and item.target == target.name]):
        raise UserError(f"{path.name}: no row has the type {attack!r} and the target {target.name!r}")
    return prompts


def parse_attack(row: Any, where: str, targets: Sequence[str]) -> AttackPrompt:
    """Validate one row; UserError where a field is missing or wrong, or the target is none of ``targets`` (names)."""
    fields = asdict(jsonio.check(row, AttackPrompt, where))
    fields |= {name: text.strip() for name, text in fields.items() if isinstance(text, str)}
    for field, known in (("type", TEMPLATES), ("target", targets)):
        if fields[field] not in known:
            known = ", ".join(dict.fromkeys(known))
            raise UserError(f"{where}: field {field!r} is {fields[field]!r:.80}, expected one of {known}")
    return AttackPrompt(**fields | {"perturbed_answer": tuple(map(str.strip, fields["perturbed_answer"]))})


@lru_cache(maxsize=2)
def _read(path: Path, stamp: Stamp, targets: tuple[str, ...]) -> tuple[AttackPrompt, ...]:
    return tuple(parse_attack(row, where, targets) for where, row in jsonio.lines(path))
