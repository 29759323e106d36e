"""TOFU (Maini et al. 2024): questions about 200 made-up authors, where they lie, and how its evaluators ask them.

The data have no entities; a forget split is a share of the authors. Laid out as on the Hub, one file of JSON rows for
each set: ``full``, ``forget05``, ``retain95`` (question, answer) and, with a paraphrase and wrong answers,
``forget05_perturbed``, ``retain_perturbed``, ``real_authors_perturbed``, ``world_facts_perturbed`` (the last two with
three wrong answers and no paraphrase).
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_elude.core import jsonio
from lm_eval_elude.core.chat import Wording
from lm_eval_elude.core.dataset import hub_commit, hub_file
from lm_eval_elude.core.records import DataError, given
from lm_eval_elude.core.sets import SetSpec

REPOSITORY = "locuslab/TOFU"
SOURCE = "tofu"
# What is forgotten, and what a model that never knew it was trained on.
RETAIN_OF = {"forget01": "retain99", "forget05": "retain95", "forget10": "retain90"}
FORGET = SetSpec("tofu_forget", "test", ("{split}_perturbed",), forgotten=True, of_target=False)
RETAIN = SetSpec("tofu_retain", "test", ("retain_perturbed",), of_target=False)
REAL_AUTHORS = SetSpec("tofu_real_authors", "test", ("real_authors_perturbed",), choice=True, of_target=False)
WORLD_FACTS = SetSpec("tofu_world_facts", "test", ("world_facts_perturbed",), choice=True, of_target=False)
SETS = {spec.name: spec for spec in (FORGET, RETAIN, REAL_AUTHORS, WORLD_FACTS)}


class Convention(NamedTuple):
    """How an evaluator asks and scores.

    Attributes:
        wording: of prompt and answer; None for the model's chat template.
        system: text of the system turn, "" for none.
        records: at most so many of a set, 0 for all.
        new_tokens: of an answer, with the prompt's counted in where ``with_prompt``.
    """

    wording: Wording | None
    system: str
    records: int
    new_tokens: int = 200
    with_prompt: bool = True


# The released evaluator's two prompts (its loss takes in the answer's tag), and open-unlearning's.
CONVENTIONS = {
    "released": Convention(Wording("Question: {question}\n", "Answer: "), "", 300),
    "released-llama2": Convention(Wording("[INST] {question} [/INST]", ""), "", 300),
    "open-unlearning": Convention(None, "You are a helpful assistant.", 0, with_prompt=False),
}


@dataclass(frozen=True, slots=True)
class TofuRecord:
    """One question; where the data have no paraphrase the answer stands for it, as in the released evaluator."""

    question: str
    answer: str
    paraphrased_answer: str = ""
    perturbed_answer: tuple[str, ...] = ()

    def columns(self) -> dict[str, Any]:
        """The record as a JSON-ready row."""
        return asdict(self) | {"perturbed_answer": list(self.perturbed_answer)}


def load(source: str, name: str) -> tuple[TofuRecord, ...]:
    """The records of one file of a set.

    Args:
        source: ``tofu`` (the Hub's), ``tofu@REVISION``, or a folder laid out alike.
        name: of the file, without ending.

    Raises:
        DataError: it cannot be had, or a row lacks a field.
    """
    path = _path(source, name)
    return _read(path, path.stat().st_mtime_ns)


def scored_records(source: str, spec: SetSpec, split: str) -> tuple[TofuRecord, ...]:
    """The records of a scored set, each with its wrong answers.

    Raises:
        DataError: as :func:`load`, or a row cannot be scored.
    """
    name = spec.stems[0].format(split=split)
    records = load(source, name)
    for number, record in enumerate(records, 1):
        if not record.perturbed_answer:
            raise DataError(f"{name}, row {number}: field 'perturbed_answer' is missing, and the truth ratio needs it")
    return records


def describe(source: str) -> dict[str, str]:
    """Where the rows come from, for results and manifests."""
    if (revision := _revision(source)) is None:
        return {"dataset": source}
    return {"dataset": source, "repository": _repository(), "revision": hub_commit(_repository(), revision)}


@lru_cache(maxsize=16)
def _read(path: Path, stamp: int) -> tuple[TofuRecord, ...]:
    text = jsonio.read_text(path)
    if text.lstrip().startswith("["):
        rows = [(f"{path.name}, row {n}", row) for n, row in enumerate(jsonio.loads(text, path.name), 1)]
    else:
        rows = list(jsonio.lines(path))
    if not rows:
        raise DataError(f"{path}: no rows")
    return tuple(_record(row, where) for where, row in rows)


def _record(row: Any, where: str) -> TofuRecord:
    if not isinstance(row, dict):
        raise DataError(f"{where}: an object is expected, got {given(row)}")
    for field in ("question", "answer"):
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise DataError(f"{where}: field {field!r} must be text, got {given(row.get(field))}")
    wrong, paraphrase = row.get("perturbed_answer") or [], row.get("paraphrased_answer") or row["answer"]
    wrong = [wrong] if isinstance(wrong, str) else wrong
    if not isinstance(wrong, list) or not all(isinstance(text, str) and text.strip() for text in wrong):
        raise DataError(f"{where}: field 'perturbed_answer' must be a list of texts, got {given(wrong)}")
    if not isinstance(paraphrase, str):
        raise DataError(f"{where}: field 'paraphrased_answer' must be text, got {given(paraphrase)}")
    return TofuRecord(row["question"].strip(), row["answer"].strip(), paraphrase.strip(), tuple(map(str.strip, wrong)))


def _path(source: str, name: str) -> Path:
    if (revision := _revision(source)) is not None:
        return hub_file(_repository(), f"{name}.json", revision, SOURCE)
    found = [path for ending in ("json", "jsonl") if (path := Path(source) / f"{name}.{ending}").is_file()]
    if not found:
        raise DataError(f"TOFU's data in {source!r} have no {name}.json")
    return found[0]


def _revision(source: str) -> str | None:
    name, at, revision = source.partition("@")
    return None if name != SOURCE or (at and not revision) else revision


def _repository() -> str:
    return os.environ.get("TOFU_REPOSITORY") or REPOSITORY
