"""Attack prompts in a JSONL file: reading and checking what others wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lm_eval_elude.attacks.builders import ATTACKS
from lm_eval_elude.attacks.prompt import AttackPrompt
from lm_eval_elude.core import jsonio
from lm_eval_elude.core.records import PERTURBATIONS, DataError, given
from lm_eval_elude.core.targets import Target


def load_attack_file(path: Path, target: Target, attack: str, others: Sequence[Target] = ()) -> list[AttackPrompt]:
    """Read the prompts of one type and target from a file that replaces the built ones.

    The file is JSONL; a row has the fields of :class:`AttackPrompt`, of which ``question`` and ``record`` may be left
    out. Other columns are ignored. Every row is checked, also those of other types.

    Args:
        path: the file.
        target: whose prompts are wanted.
        attack: the type wanted, a key of :data:`ATTACKS`.
        others: further targets of the same run, whose rows may stand in the file too.

    Raises:
        DataError: the file cannot be read, a row is wrong (file, row and field are named), or no row has that type.
    """
    prompts = [
        parse_attack(line, f"{path.name}, row {number}", (target, *others))
        for number, line in enumerate(jsonio.read_text(path).split("\n"), 1)
        if line.strip()
    ]
    found = [item for item in prompts if item.type == attack and item.target == target.name]
    if not found:
        raise DataError(f"{path.name}: no row has the type {attack!r} and the target {target.name!r}")
    return found


def parse_attack(line: str, where: str, targets: Sequence[Target]) -> AttackPrompt:
    """Validate one row of an attack file (see :func:`load_attack_file`); ``where`` names it in errors.

    White space at the ends of a text is no part of it, as in a data set.

    Raises:
        DataError: not JSON, or a field is missing or wrong.
    """
    row = jsonio.loads(line, where, nan=True)
    if not isinstance(row, dict):
        raise DataError(f"{where}: an object is expected, got {given(row)}")
    texts = {}
    for field in ("type", "target", "prompt", "answer", "paraphrased_answer"):
        value = row.get(field)
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{where}: field {field!r} is missing, empty or not text: {given(value)}")
        texts[field] = value.strip()
    if texts["type"] not in ATTACKS:
        raise DataError(f"{where}: field 'type' is {texts['type'][:80]!r}; the types are {', '.join(ATTACKS)}")
    if texts["target"] not in {target.name for target in targets}:
        names = ", ".join(repr(target.name) for target in targets)
        raise DataError(f"{where}: field 'target' is {texts['target'][:80]!r}, but the run is about {names}")
    wrong = row.get("perturbed_answer")
    if (
        not isinstance(wrong, list)
        or len(wrong) != PERTURBATIONS
        or not all(isinstance(text, str) and text.strip() for text in wrong)
    ):
        raise DataError(
            f"{where}: field 'perturbed_answer' must be a list of {PERTURBATIONS} texts, got {given(wrong)}"
        )
    question, record = row.get("question", ""), row.get("record", -1)
    if not isinstance(question, str):
        raise DataError(f"{where}: field 'question' must be text, got {given(question)}")
    if type(record) is not int:  # a bool is an int too
        raise DataError(f"{where}: field 'record' must be a whole number, got {given(record)}")
    wrong = tuple(text.strip() for text in wrong)
    return AttackPrompt(**texts, perturbed_answer=wrong, question=question.strip(), record=record)
