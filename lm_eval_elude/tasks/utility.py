"""The eight utility benchmarks of the paper (section 5.1) by the harness's own tasks, averaged as in its tables."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from lm_eval.api.group import Group
from lm_eval.tasks import TaskManager

from lm_eval_elude.tasks.settings import one_of, read_metadata

# Column of the paper's table -> the harness's task or group, all without examples and by plain accuracy.
UTILITY_BENCHMARKS = {
    "ARC-C": "arc_challenge", "CSQA": "commonsense_qa", "Hella.": "hellaswag", "Lamba.": "lambada_openai",
    "MMLU": "mmlu", "OBQA": "openbookqa", "PIQA": "piqa", "Wino.": "winogrande",
}  # fmt: skip
FAST = 100  # documents of each task with `utility: fast` in --metadata
KEYS = {"utility": one_of("full", "fast")}


class EludeUtility(Group):
    """``elude_utility``: accuracy on each of the eight and their unweighted mean; a fast subset is named as such."""

    def __init__(self, config: dict[str, Any]) -> None:
        metadata = dict(config.get("metadata") or {})
        fast = read_metadata(metadata, KEYS).get("utility") == "fast"
        alias = f"{config['task']} (fast: the first {FAST} of each)" if fast else None
        super().__init__(name=config["task"], alias=alias, metadata=metadata | {"version": 1.0})
        loaded = TaskManager(metadata=metadata).load(list(UTILITY_BENCHMARKS.values()))
        for name in UTILITY_BENCHMARKS.values():
            self.add(loaded["groups"].get(name) or loaded["tasks"][name])
        for task in self.get_all_tasks():
            task.config.metadata = {**(task.config.metadata or {}), "data": origin(task)}
            if fast:
                split = task.config.test_split if task.has_test_docs() else task.config.validation_split
                task.dataset[split] = task.dataset[split].select(range(min(FAST, len(task.dataset[split]))))

    @property
    def has_aggregation(self) -> bool:
        return True

    def aggregate(self, task_metrics: dict[str, Any]) -> Any:
        """The mean of the eight; MMLU's own value is that of its group, weighted by size as everywhere."""
        row: dict[str, Any] = {"alias": self.alias or self.name, "name": self.name}
        # 0.5 calls a task by its group, too.
        names = [getattr(task, "_qualified_name", task.task_name) for task in self.get_all_tasks()]
        row["sample_len"] = sum(task_metrics[name]["sample_len"] for name in names)
        if any("acc,none" not in task_metrics[name] for name in UTILITY_BENCHMARKS.values()):  # --predict_only
            return row
        values = [task_metrics[name]["acc,none"] for name in UTILITY_BENCHMARKS.values()]
        errors = [task_metrics[name]["acc_stderr,none"] for name in UTILITY_BENCHMARKS.values()]
        row["acc,none"] = sum(values) / len(values)
        known = all(isinstance(error, float) for error in errors)
        row["acc_stderr,none"] = math.hypot(*errors) / len(errors) if known else "N/A"
        return row


def origin(task: Any) -> str:
    """Repository of a task's data and the commit, after which `datasets` names the folder where it keeps the Hub's."""
    files = [file["filename"] for split in task.dataset.values() for file in split.cache_files]
    commits = {name for file in files if re.fullmatch("[0-9a-f]{40}", name := Path(file).parent.name)}
    return "@".join([task.config.dataset_path, *sorted(commits)])
