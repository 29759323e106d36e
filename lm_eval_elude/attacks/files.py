"""Attack prompts in a JSONL file: reading and checking what others wrote."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from lm_eval_elude.attacks.prompt import WORDINGS, AttackPrompt
from lm_eval_elude.data.jsonio import Text, check, lines
from lm_eval_elude.data.records import PERTURBATIONS
from lm_eval_elude.data.targets import Target
from lm_eval_elude.errors import UserError


class _Row(msgspec.Struct):
    """What a row must hold, as :class:`AttackPrompt` says; other columns are not looked at."""

    type: Text
    target: Text
    prompt: Text
    answer: Text
    paraphrased_answer: Text
    perturbed_answer: Annotated[list[Text], msgspec.Meta(min_length=PERTURBATIONS, max_length=PERTURBATIONS)]
    question: str = ""
    record: int = -1


def load_attack_file(path: Path, target: Target, attack: str, others: Sequence[Target] = ()) -> list[AttackPrompt]:
    """Read the prompts of one type and target from a file that replaces the built ones.

    The file is JSONL; a row has the fields of :class:`AttackPrompt`, of which ``question`` and ``record`` may be left
    out. Other columns are ignored. Every row is checked, also those of other types.

    Args:
        path: the file.
        target: whose prompts are wanted.
        attack: the type wanted.
        others: further targets of the same run, whose rows may stand in the file too.

    Raises:
        UserError: the file cannot be read, a row is wrong (file, row and field are named), or no row has that type.
    """
    names = tuple(dict.fromkeys((target.name, *(other.name for other in others))))
    stamp = path.stat().st_mtime_ns if path.is_file() else 0
    prompts = [item for item in _read(path, stamp, names) if item.type == attack and item.target == target.name]
    if not prompts:
        raise UserError(f"{path.name}: no row has the type {attack!r} and the target {target.name!r}")
    return prompts


def parse_attack(row: Any, where: str, targets: Sequence[str]) -> AttackPrompt:
    """Validate one row of an attack file. White space at the ends of a text is no part of it, as in a data set.

    Args:
        row: what was read.
        where: how an error calls it.
        targets: display names that the run is about.

    Raises:
        UserError: a field is missing or wrong.
    """
    fields = msgspec.structs.asdict(check(row, _Row, where))
    fields |= {name: text.strip() for name, text in fields.items() if isinstance(text, str)}
    for field, known in (("type", WORDINGS), ("target", targets)):
        if fields[field] not in known:
            raise UserError(f"{where}: field {field!r} is {fields[field][:80]!r}, expected one of {', '.join(known)}")
    return AttackPrompt(**fields | {"perturbed_answer": tuple(text.strip() for text in fields["perturbed_answer"])})


@lru_cache(maxsize=2)
def _read(path: Path, stamp: int, targets: tuple[str, ...]) -> tuple[AttackPrompt, ...]:
    return tuple(parse_attack(row, where, targets) for where, row in lines(path, nan=True))
