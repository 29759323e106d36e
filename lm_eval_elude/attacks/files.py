"""Attack prompts in a JSONL file: reading and checking what others wrote."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from lm_eval_elude.attacks.prompt import WORDINGS, AttackPrompt
from lm_eval_elude.data.files import Stamp, stamp
from lm_eval_elude.data.jsonio import check, lines
from lm_eval_elude.data.targets import Target
from lm_eval_elude.errors import UserError


def load_attack_file(path: Path, target: Target, attack: str, others: Sequence[Target] = ()) -> list[AttackPrompt]:
    """The prompts of one type and target in a JSONL file of :class:`AttackPrompt` rows that replaces the built ones.

    Every row is checked, also those of other types and of ``others``, the further targets of the same run.

    Raises:
        UserError: the file cannot be read, a row is wrong (file, row and field are named), or no row has that type.
    """
    names = tuple(dict.fromkeys((target.name, *(other.name for other in others))))
    rows = _read(path, stamp(path), names)
    prompts = [item for item in rows if item.type == attack and item.target == target.name]
    if not prompts:
        raise UserError(f"{path.name}: no row has the type {attack!r} and the target {target.name!r}")
    return prompts


def parse_attack(row: Any, where: str, targets: Sequence[str]) -> AttackPrompt:
    """Validate one row. White space at the ends of a text is no part of it, as in a data set.

    Raises:
        UserError: a field is missing or wrong, or the target is none of ``targets`` (display names).
    """
    fields = asdict(check(row, AttackPrompt, where))
    fields |= {name: text.strip() for name, text in fields.items() if isinstance(text, str)}
    for field, known in (("type", WORDINGS), ("target", targets)):
        if fields[field] not in known:
            raise UserError(f"{where}: field {field!r} is {fields[field][:80]!r}, expected one of {', '.join(known)}")
    return AttackPrompt(**fields | {"perturbed_answer": tuple(map(str.strip, fields["perturbed_answer"]))})


@lru_cache(maxsize=2)
def _read(path: Path, stamp: Stamp, targets: tuple[str, ...]) -> tuple[AttackPrompt, ...]:
    return tuple(parse_attack(row, where, targets) for where, row in lines(path, nan=True))
