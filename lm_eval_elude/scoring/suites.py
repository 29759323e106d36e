"""For report and board until they call the benchmarks."""

from typing import Any

from lm_eval_elude.scoring.benchmarks import BENCHMARKS as _ALL
from lm_eval_elude.scoring.benchmarks import GROUPS as _GROUPS
from lm_eval_elude.scoring.benchmarks import UTILITY, task_report
from lm_eval_elude.scoring.benchmarks import UTILITY_BENCHMARKS as BENCHMARKS
from lm_eval_elude.scoring.benchmarks.elude import ATTACK, CONTROL

__all__ = ["ATTACK", "BENCHMARKS", "CONTROL", "GROUPS", "UTILITY", "suite", "task_report"]
GROUPS = {name: group.numbers for name, group in _GROUPS.items()}


class _Suite:
    def __init__(self, benchmark: Any) -> None:
        self.sample, self.numbers = benchmark.measure, benchmark.numbers


def suite(task: str) -> _Suite | None:
    return _Suite(_ALL[task]) if task in _ALL else None
