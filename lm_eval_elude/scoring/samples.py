"""What one logged document contributes to the numbers, and the few things that every number does with samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lm_eval_elude.scoring.estimates import Estimate, Observation, mean_over_targets


class Sample(NamedTuple):
    """The measurements of one document.

    Attributes:
        target: the entity it counts for ("" in the world set).
        record: the question of the record behind it, the same for all prompts and targets that share it.
        doc_id: its place in the task.
        values: measurements by name; those of the membership attacks are pairs (member, non-member). ``reference``
            holds the reference model's measurements of the same document, where there is a reference.
    """

    target: str
    record: str
    doc_id: int
    values: Mapping[str, Any]


def mean(samples: Sequence[Sample], name: str) -> Estimate:
    """The mean over targets of one measurement."""
    return mean_over_targets(Observation(s.target, s.record, s.values[name]) for s in samples)


def by_target(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Samples by the target they count for, in the order in which the targets first stand."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.target, []).append(sample)
    return groups


def of_reference(samples: Sequence[Sample]) -> list[Sample]:
    """The reference model's samples of the same documents."""
    return [sample._replace(values=sample.values["reference"]) for sample in samples]


def has_reference(samples: Sequence[Sample]) -> bool:
    """Whether every sample holds what a reference answered to the same document."""
    return bool(samples) and all("quality" in sample.values.get("reference", ()) for sample in samples)


def same_answers(doc: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two documents have the same answers to be scored."""
    columns = ("answer", "paraphrased_answer", "perturbed_answer", "named_answers")
    return all([*(doc.get(column) or ())] == [*(other.get(column) or ())] for column in columns)
