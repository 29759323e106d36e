"""What the Hub shows of results, by its own classes: a card's model index and ``.eval_results/*.yaml``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from huggingface_hub.repocard_data import EvalResult

CARD, RESULTS = "README.md", ".eval_results/{}.yaml"  # of a benchmark


def plain(text: str) -> str:
    """Text as text in a card: no markup, one line."""
    return " ".join("".join(f"\\{c}" if c in "\\`*_[]<>#|" else c for c in text if c.isprintable()).split())


class Headline(NamedTuple):
    """A number that a card shows: its name for readers, its metric, its value."""

    name: str
    metric: str
    value: float


def model_index(
    headlines: Sequence[Headline], dataset: str, revision: str | None, benchmark: str = "ELUDe"
) -> list[EvalResult]:
    """Numbers for a card's ``eval_results``."""
    from huggingface_hub.repocard_data import EvalResult

    return [
        EvalResult(
            task_type="text-generation", task_name=name, dataset_type=dataset, dataset_name=benchmark,
            dataset_revision=revision, metric_type=metric, metric_name=name, metric_value=round(value, 6),
        )
        for name, metric, value in headlines
    ]  # fmt: skip


def results_yaml(
    headlines: Sequence[Headline], dataset: str, revision: str | None, notes: str, benchmark: str = "ELUDe"
) -> str:
    """Numbers as the Hub's own evaluation results, one task of the benchmark for each, with notes for the reader."""
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml
    from huggingface_hub.utils import yaml_dump

    entries = [
        EvalResultEntry(
            dataset_id=dataset, dataset_revision=revision, task_id=f"{benchmark.lower()}_{metric}",
            value=round(value, 6), notes=notes,
        )
        for _, metric, value in headlines
    ]  # fmt: skip
    return yaml_dump(eval_result_entries_to_yaml(entries), sort_keys=False)
