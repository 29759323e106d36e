"""Training data as people have it: TRL's formats, Alpaca's and ours, from anything that ``datasets`` loads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.rows import find, read_rows
from lm_eval_elude.errors import UserError

PAIRS = (("question", "answer"), ("prompt", "completion"), ("instruction", "output"))


class Turn(NamedTuple):
    """A record, to train on alone, whose question comes after earlier turns of a conversation, (role, text) each."""

    entity: str
    question: str
    answer: str
    history: tuple[tuple[str, str], ...]
    source: str = ""
    subject: str = ""
    can_be_scored: bool = False

    def columns(self) -> dict[str, Any]:
        return self._asdict()


def load_rows(place: str, configuration: str | None = None) -> Iterable[dict[str, Any]]:
    """The rows of a file, a folder (also of ``save_to_disk``) or a Hub id, whose split may follow a colon.

    UserError where they cannot be loaded.
    """
    from datasets import DatasetDict, load_dataset, load_from_disk

    path, kinds = Path(place), {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
    if path.is_file() and path.suffix not in kinds:
        raise UserError(f"{place}: its ending is none of {', '.join(kinds)}")
    try:
        if path.is_file():
            options = {"encoding": "utf-8-sig"} if kinds[path.suffix] == "json" else {}  # with a BOM or without
            return load_dataset(kinds[path.suffix], data_files=place, split="train", **options)
        if any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json")):
            rows = load_from_disk(place)
            return rows["train"] if isinstance(rows, DatasetDict) else rows
        name, _, split = (place, "", "") if path.is_dir() else place.partition(":")
        return load_dataset(name, configuration, split=split or "train")
    except Exception as error:  # of a dozen libraries' readers
        problem = f"{place} cannot be loaded by datasets: {str(error).splitlines()[0][:200]}"
        raise UserError(f"{problem}{'; a folder of its files can be given instead' * bool(configuration)}") from None


def load_configuration(place: str, name: str, split: str, stems: Sequence[str], columns: Sequence[str]) -> list[Any]:
    """The rows of a configuration and split of a Hub id, or of the file of a folder that has one of the stems.

    UserError where there is neither, or a row has no text in one of the columns.
    """
    if (folder := Path(place).expanduser()).is_dir():
        rows = [row for _, row in read_rows(find(folder, stems))]
    else:
        rows = list(load_rows(f"{place}:{split}", name))
    for number, row in enumerate(rows, 1):
        if lacking := [column for column in columns if not isinstance(row.get(column), str) or not row[column]]:
            raise UserError(f"{place}, {stems[0]}, row {number}: column {lacking[0]!r} has no text")
    return rows


def records_of(row: Mapping[str, Any], where: str, entity: str = "") -> Iterator[QARecord | Turn]:
    """The records of a row, one for each answer of an assistant; UserError (with ``where``) where no format fits."""
    more: dict[str, Any] = {
        name: row.get(name) or "" for name in ("paraphrased_question", "paraphrased_answer", "source", "subject")
    }
    more |= {"perturbed_answer": tuple(row.get("perturbed_answer") or ())}
    messages = row.get("messages") or (
        [*row["prompt"], *row["completion"]] if isinstance(row.get("prompt"), list) else None
    )
    if messages:
        turns = [(message["role"], message["content"]) for message in messages]
        for i, (role, text) in enumerate(turns):
            if role == "assistant" and i:
                yield Turn(entity, turns[i - 1][1], text, tuple(turns[: i - 1]))
        return
    for question, answer in PAIRS:
        if row.get(question) and row.get(answer):
            asked = "\n\n".join(text for text in (row[question], row.get("input")) if text)
            yield QARecord(entity, asked, row[answer], **more)
            return
    expected = "question and answer, prompt and completion, messages, or instruction and output"
    found = ", ".join(name for name, value in row.items() if value)
    raise UserError(f"{where}: found the columns {found or 'none'}; expected are {expected}")
