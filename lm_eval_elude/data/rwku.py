"""RWKU (Jin et al. 2024, arXiv 2406.10890): probes and texts about 200 famous people and their neighbours; CC BY 4.0.

A configuration of the Hub each. A folder holds them as files under the configuration's name, or under the name that
they have in the Hub's folders ``All`` and ``Target/1_Stephen_King``. A probe, and a text:

    {"query": "He wrote ___.", "answer": "Carrie", "level": "1", "type": "...", "subject": "Stephen King"}
    {"text": "...", "subject": "Stephen King"}
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from lm_eval_elude.data.hub import HubData
from lm_eval_elude.data.records import QARecord, entity_name
from lm_eval_elude.data.targets import Target, resolve_target
from lm_eval_elude.errors import UserError

HUB = HubData(
    "rwku", "jinzhuoran/RWKU", "README.md", "", "--dataset (rwku_data in --metadata) a folder of RWKU's files"
)
SOURCE = HUB.source
PASSAGES, BLANKS, NEIGHBOURS = "train_original_passage", "forget_level1", "neighbor_level1"
_FILES = {PASSAGES: "passage", "mia_forget": "forget_mia", "mia_retain": "retain_mia"}  # of the Hub's folders


def is_rwku(source: str) -> bool:
    """Whether a data set is RWKU's, on the Hub or in a folder with its passages or blanks."""
    folder = Path(os.path.expanduser(source))
    return HUB.revision(source) is not None or any(any(folder.glob(f"{n}.*")) for n in (PASSAGES, "passage", BLANKS))


@lru_cache(maxsize=32)
def read(source: str, configuration: str) -> tuple[tuple[QARecord, str], ...]:
    """The records of a configuration with the type of their attack; a text is its own question and answer.

    Texts are left as they are, white space included. UserError where they cannot be had, or a row lacks a field.
    """
    split, stems = "train" if configuration == PASSAGES else "test", (configuration, _FILES.get(configuration, ""))
    records = []
    for where, row in HUB.rows(source, configuration, split, *filter(None, stems)):
        texts = [row.get(name) for name in (("text", "text") if "text" in row else ("query", "answer"))]
        if not all(isinstance(text, str) and text.strip() for text in (*texts, row.get("subject"))):
            raise UserError(f"{where}: expected are a subject, and a text or a query with its answer")
        wrong, paraphrase = tuple(row.get("perturbed_answer") or ()), row.get("paraphrased_answer") or ""
        record = QARecord(entity_name(row["subject"]), *texts, paraphrased_answer=paraphrase, perturbed_answer=wrong)
        records.append((record, str(row.get("type") or "")))
    return tuple(records)


def of_targets(source: str, configuration: str, targets: Sequence[str]) -> Iterator[tuple[QARecord, str]]:
    """The records about some targets, as of :func:`read`."""
    return ((record, kind) for record, kind in read(source, configuration) if record.entity in targets)


def resolve_targets(source: str, configuration: str, names: Iterable[str] = ()) -> list[str]:
    """The targets that a user means among those of a configuration, all without names; UserError for an unknown one."""
    known = list(dict.fromkeys(record.entity for record, _ in read(source, configuration)))
    return list(dict.fromkeys(resolve_target(name, map(Target, known)).name for name in names)) or known


def sentences(records: Iterable[tuple[QARecord, str]]) -> list[QARecord]:
    """Blanks filled with their answers, as texts."""
    texts = []
    for record, _ in records:
        before, gap, after = re.match("(.*?)(_{2,}|$)(.*)", record.question, re.DOTALL).groups()  # type: ignore[union-attr]
        text = f"{before}{record.answer}{after}" if gap else f"{before} {record.answer}"
        texts.append(QARecord(record.entity, text, text))
    return texts
