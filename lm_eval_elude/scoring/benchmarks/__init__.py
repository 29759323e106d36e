"""Every task by name, and every group: each file of this folder adds its ``BENCHMARKS`` and its ``GROUPS``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from lm_eval_elude.scoring.benchmark import Benchmark, BenchmarkGroup, report
from lm_eval_elude.scoring.samples import Sample

BENCHMARKS: dict[str, Benchmark] = {}
GROUPS: dict[str, BenchmarkGroup] = {}
for _module in iter_modules(__path__):
    _benchmarks = import_module(f"{__name__}.{_module.name}")
    BENCHMARKS |= _benchmarks.BENCHMARKS
    GROUPS |= getattr(_benchmarks, "GROUPS", {})

# The group of the paper's utility benchmarks; column of its table -> the harness's task or group, all without examples
# and by plain accuracy.
UTILITY = "elude_utility"
UTILITY_BENCHMARKS = {
    "ARC-C": "arc_challenge", "CSQA": "commonsense_qa", "Hella.": "hellaswag", "Lamba.": "lambada_openai",
    "MMLU": "mmlu", "OBQA": "openbookqa", "PIQA": "piqa", "Wino.": "winogrande",
}  # fmt: skip


def task_report(task: str, samples: Sequence[Sample], settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A task's numbers as a results file has them (see :func:`lm_eval_elude.scoring.benchmark.report`)."""
    return report(lambda tasks: BENCHMARKS[task].numbers(tasks[task], settings), {task: samples})


def group_report(group: str, tasks: Mapping[str, Sequence[Sample]]) -> dict[str, dict[str, Any]]:
    """A group's numbers as a results file has them, from the samples of all its tasks."""
    return report(GROUPS[group].numbers, tasks)
