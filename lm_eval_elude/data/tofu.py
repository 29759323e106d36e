"""TOFU (Maini et al. 2024): questions about 200 made-up authors and where they lie.

The data have no entities; a forget split is a share of the authors. Laid out as on the Hub, one file of JSON rows for
each set: ``full``, ``forget05``, ``retain95`` (question, answer) and, with a paraphrase and wrong answers,
``forget05_perturbed``, ``retain_perturbed``, ``real_authors_perturbed``, ``world_facts_perturbed`` (the last two with
three wrong answers and no paraphrase).
"""

from __future__ import annotations

from pathlib import Path

from lm_eval_elude.data.hub import HubData
from lm_eval_elude.data.records import QARecord, parse_record
from lm_eval_elude.data.rows import find, read_rows
from lm_eval_elude.data.sets import SetSpec

HUB = HubData(
    "tofu", "locuslab/TOFU", "retain_perturbed.json", "TOFU_REPOSITORY",
    "--dataset (tofu_data in --metadata) a folder of TOFU's files",
)  # fmt: skip
# What is forgotten, and what a model that was never taught it was trained on.
RETAIN_OF = {"forget01": "retain99", "forget05": "retain95", "forget10": "retain90"}
FORGET = SetSpec("tofu_forget", "test", ("{split}_perturbed",), forgotten=True, of_target=False)
RETAIN = SetSpec("tofu_retain", "test", ("retain_perturbed",), of_target=False)
REAL_AUTHORS = SetSpec("tofu_real_authors", "test", ("real_authors_perturbed",), choice=True, of_target=False)
WORLD_FACTS = SetSpec("tofu_world_facts", "test", ("world_facts_perturbed",), choice=True, of_target=False)
SETS = {spec.name: spec for spec in (FORGET, RETAIN, REAL_AUTHORS, WORLD_FACTS)}


def load(source: str, name: str) -> tuple[QARecord, ...]:
    """The records of the file ``name`` (without ending) of ``tofu``, ``tofu@REVISION`` or a folder laid out alike.

    UserError where it cannot be had, or a row lacks a field.
    """
    revision = HUB.revision(source)
    path = find(Path(source).expanduser(), [name]) if revision is None else HUB.file(f"{name}.json", revision)
    return tuple(parse_record(row, where) for where, row in read_rows(path))
