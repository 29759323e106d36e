"""Kept runs as rows of the tables: a JSON list of runs by row, target and seed, with their numbers but no samples.

``benchmarks/results.py`` keeps them. Each number is formed for every seed over the targets, as in the paper; a row has
the mean over seeds and their standard deviation.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lm_eval_elude.data import jsonio, sets
from lm_eval_elude.errors import UserError
from lm_eval_elude.report.paper import FQ, RQ, TRIPLE, Row, marked
from lm_eval_elude.report.tables import Key
from lm_eval_elude.scoring.estimates import exact
from lm_eval_elude.scoring.likelihood import goodness, harmonic_mean


@dataclass(frozen=True)
class Kept:
    """A run.

    Attributes:
        row: of the tables.
        target: slug.
        seed: of the training.
        arguments: of ``optout-train``.
        base: what tells the base model's weights from others.
        seconds: of training, 0 where nothing was trained.
        values: numbers by ``TASK/METRIC``.
    """

    row: str
    target: str
    seed: int
    arguments: list[str]
    base: str
    seconds: float
    values: dict[str, float]


def read(path: Path) -> list[Kept] | None:
    """The runs of a file; None where it is no list.

    Raises:
        UserError: a run lacks a field or a number, or two are the same.
    """
    if not path.is_file() or not isinstance(found := jsonio.load(path, nan=True), list):
        return None
    runs = [jsonio.check(run, Kept, f"{path}, run {number}") for number, run in enumerate(found, 1)]
    lacking = [f"elude_{s}/{metric}" for s in ("forget", "retain", "world") for _, metric in TRIPLE]
    known: dict[tuple[str, str, str, int], int] = {}
    for number, run in enumerate(runs, 1):
        if absent := [key for key in lacking if key not in run.values]:
            raise UserError(f"{path}, run {number}: field 'values' has no {absent[0]!r}")
        if (first := known.setdefault((run.base, run.row, run.target, run.seed), number)) != number:
            raise UserError(f"{path}, run {number}: the same row, target, seed and base as run {first}")
    return runs


def rows(runs: Sequence[Kept], targets: Collection[str] = ()) -> list[Row]:
    """The rows that the runs make on some targets (all of them by default); a seed counts where it has every one."""
    wanted = set(targets) or {run.target for run in runs}
    groups: dict[tuple[str, str], dict[int, list[Kept]]] = {}
    for run in runs:
        if run.target in wanted:
            groups.setdefault((run.base, run.row), {}).setdefault(run.seed, []).append(run)
    found = []
    for (base, name), seeds in groups.items():
        whole = [of_seed for of_seed in seeds.values() if len(of_seed) == len(wanted)]
        by_seed = [_over_targets([run.values for run in of_seed]) for of_seed in whole]
        keys = sorted({key for one in by_seed for key in one})
        values = {key: [one[key] for one in by_seed if key in one] for key in keys}
        if whole:
            numbers = {key: exact(statistics.mean(of_key)) for key, of_key in values.items()}
            spread = {key: statistics.stdev(of_key) for key, of_key in values.items() if len(of_key) > 1}
            trained = [run.seconds for of_seed in whole for run in of_seed if run.seconds]
            facts = {"training": f"{statistics.mean(trained):.0f}"} if trained else {}
            found.append(Row(name, base, {}, numbers, sum(map(len, whole)), facts, (), spread))
    return marked(found)


def _over_targets(of_seed: Sequence[Mapping[str, float]]) -> dict[Key, float]:
    """Each number averaged over targets, then FQ and RQ formed of the averages."""
    shared = set[str].intersection(*({*values} for values in of_seed))
    found: dict[Key, float] = {}
    for name in shared:
        task, _, metric = name.partition("/")
        found[task, metric] = statistics.mean(values[name] for values in of_seed)
    forget, retain, world = (
        [found[f"elude_{name}", metric] for _, metric in TRIPLE] for name in ("forget", "retain", "world")
    )
    return found | {FQ: harmonic_mean(goodness(sets.FORGET, *forget)), RQ: harmonic_mean([*retain, *world])}
