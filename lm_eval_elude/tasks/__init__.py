"""Every task and group by name. A benchmark is one file of this folder, its line here, and its YAMLs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lm_eval_elude.metrics.samples import Numbers, Sample
from lm_eval_elude.tasks import elude, muse, rwku, tofu
from lm_eval_elude.tasks.task import Task, TaskGroup

TASKS: dict[str, Task] = elude.TASKS | tofu.TASKS | rwku.TASKS | muse.TASKS
GROUPS: dict[str, TaskGroup] = elude.GROUPS | tofu.GROUPS | rwku.GROUPS | muse.GROUPS


def leaves(name: str) -> list[str]:
    """The tasks below a group, or the task itself."""
    return [leaf for child in GROUPS[name].children for leaf in leaves(child)] if name in GROUPS else [name]


def group_numbers(name: str, samples: Mapping[str, Sequence[Sample]]) -> Numbers:
    """The numbers of a group from the samples of the tasks below it."""
    return GROUPS[name].numbers(samples)
