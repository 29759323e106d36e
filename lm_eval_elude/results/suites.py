"""Which task holds what: how a logged row of it is measured, which numbers its samples give, and what groups form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lm_eval_elude.core import tofu
from lm_eval_elude.core.sets import FORGET, RETAIN, WORLD, SetSpec
from lm_eval_elude.results.numbers import (
    Estimates,
    attack_numbers,
    membership_numbers,
    quality_numbers,
    report,
    set_numbers,
    tofu_numbers,
    utility_numbers,
)
from lm_eval_elude.results.samples import Sample, answered, compared

ATTACK = "elude_attack_"
CONTROL = f"{ATTACK}none"
# The group of the paper's utility benchmarks; column of its table -> the harness's task or group, all without examples
# and by plain accuracy.
UTILITY = "elude_utility"
BENCHMARKS = {
    "ARC-C": "arc_challenge", "CSQA": "commonsense_qa", "Hella.": "hellaswag", "Lamba.": "lambada_openai",
    "MMLU": "mmlu", "OBQA": "openbookqa", "PIQA": "piqa", "Wino.": "winogrande",
}  # fmt: skip
Tasks = Mapping[str, Sequence[Sample]]


class Suite(NamedTuple):
    """A task's part in the results: its logged row to a sample, its samples to numbers; both get the run's settings."""

    sample: Callable[[Mapping[str, Any], Mapping[str, Any]], Sample]
    numbers: Callable[[Sequence[Sample], Mapping[str, Any]], Estimates]


def _questions(spec: SetSpec, numbers: Callable[[SetSpec, Sequence[Sample]], Estimates] = set_numbers) -> Suite:
    return Suite(
        lambda row, settings: answered(spec, row["doc"], settings["truth_ratio"]),
        lambda samples, settings: numbers(spec, samples),
    )


def _membership(row: Mapping[str, Any], settings: Mapping[str, Any]) -> Sample:
    """Token log-probabilities are the responses themselves; without them ``prompt_tokens`` is not logged."""
    return compared(row["doc"], row["filtered_resps"] if "prompt_tokens" in row["doc"] else ())


SUITES: dict[str, Suite] = {
    "elude_forget": _questions(FORGET),
    "elude_retain": _questions(RETAIN),
    "elude_world": _questions(WORLD),
    "elude_mia": Suite(_membership, lambda samples, settings: membership_numbers(samples, settings["seed"])),
    **{name: _questions(spec, tofu_numbers) for name, spec in tofu.SETS.items()},
}


def _quality(tasks: Tasks) -> Estimates:
    return quality_numbers(tasks["elude_forget"], tasks["elude_retain"], tasks["elude_world"])


def _attacks(tasks: Tasks) -> Estimates:
    return attack_numbers([own for task, own in tasks.items() if task.startswith(ATTACK) and task != CONTROL])


def _elude(tasks: Tasks) -> Estimates:
    return {**_quality(tasks), **{f"attacked_{metric}": value for metric, value in _attacks(tasks).items()}}


def _tofu_group(tasks: Tasks) -> Estimates:
    found = utility_numbers([tasks[name] for name, spec in tofu.SETS.items() if not spec.forgotten])
    known = tofu_numbers(tofu.FORGET, tasks["tofu_forget"])
    return {**found, "forget_quality": known["ks_p_value"]} if "ks_p_value" in known else found


# A group's own numbers, from the samples of the tasks of the run.
GROUPS: dict[str, Callable[[Tasks], Estimates]] = {
    "elude_quality": _quality, "elude_attacks": _attacks, "elude": _elude, "tofu": _tofu_group,
}  # fmt: skip


def suite(task: str) -> Suite | None:
    """The suite of a task of ours, None for any other."""
    return SUITES.get(task) or (SUITES["elude_forget"] if task.startswith(ATTACK) else None)


def task_report(task: str, samples: Sequence[Sample], settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A task's own numbers as a results file has them (see :func:`lm_eval_elude.results.numbers.report`)."""
    found = suite(task)
    assert found, task
    return report(lambda tasks: found.numbers(tasks[task], settings), {task: samples})
