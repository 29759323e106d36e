"""Kept runs: the numbers of many runs as one frame in a JSON file, without their samples.

``benchmarks/results.py`` keeps them. Columns are run (a row of the tables), target (slug), seed (of the training),
task, metric and value. The task ``cost`` holds what a run took. In the tables each number is formed for every seed
over the targets, as in the paper; a row has the mean over seeds and their standard deviation. A p-value stands for each
target and seed, since the mean of several is none.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd

from lm_eval_elude.data import jsonio, sets
from lm_eval_elude.errors import UserError
from lm_eval_elude.report.rows import FQ, MIA_AUC, RQ, Row, marked
from lm_eval_elude.scoring.estimates import exact
from lm_eval_elude.scoring.likelihood import goodness, harmonic_mean
from lm_eval_elude.scoring.metrics import THREE
from lm_eval_elude.scoring.units import unit

COLUMNS = ("run", "target", "seed", "task", "metric", "value")


class Kept(msgspec.Struct, forbid_unknown_fields=True):
    """A file of kept runs: a row for each number, and the arguments of ``optout-train`` by run.

    ``base`` tells the weights of the base model from others.
    """

    base: str
    arguments: dict[str, list[str]]
    columns: list[str]
    data: list[tuple[str, str, int, str, str, float]]

    @property
    def frame(self) -> pd.DataFrame:
        return pd.DataFrame(self.data, columns=self.columns)


def read(path: Path) -> Kept | None:
    """The runs of a file; None where it is not one of kept runs.

    UserError where a row has another form, a run lacks a number, or a number stands twice.
    """
    if not path.is_file() or not isinstance(content := jsonio.load(path), dict) or "data" not in content:
        return None
    kept = jsonio.read(path, Kept)
    if tuple(kept.columns) != COLUMNS:
        raise UserError(f"{path}: field 'columns' must be {', '.join(COLUMNS)}")
    numbers = kept.frame
    if len(twice := numbers[numbers.duplicated(list(COLUMNS[:-1]))]):
        raise UserError(f"{path}: the same run, target, seed, task and metric stand twice: {list(twice.iloc[0])}")
    for run, rows in numbers.groupby(["run", "target", "seed"]):
        names = set(zip(rows.task, rows.metric, strict=True))
        for name in ("forget", "retain", "world"):
            if lacking := [metric for metric in THREE if (f"elude_{name}", metric) not in names]:
                raise UserError(f"{path}: {list(run)} has no {lacking[0]} of elude_{name}")
    return kept


def write(path: Path, kept: Kept) -> None:
    """Write a file with one line for each number."""
    head = msgspec.json.encode({"base": kept.base, "arguments": kept.arguments, "columns": kept.columns}).decode()
    data = ",\n".join(msgspec.json.encode(row).decode() for row in sorted(kept.data))
    path.write_text(f'{head[:-1]},\n"data":[\n{data}\n]}}\n', encoding="utf-8")


def rows(kept: Kept, targets: Collection[str] = ()) -> list[Row]:
    """The rows that the runs make on some targets (all of them by default); a seed counts where it has every one."""
    numbers = kept.frame
    wanted = set(targets) or set(numbers.target)
    numbers = numbers[numbers.target.isin(wanted)]
    if numbers.empty:
        return []
    seed = ["run", "seed"]
    wide = numbers.pivot(index=[*seed, "target"], columns=["task", "metric"], values="value")
    wide = wide[wide.groupby(seed).transform("size") == len(wanted)]
    by_seed = wide.groupby(seed).sum(min_count=len(wanted)) / len(wanted)  # of what every target has
    by_seed[FQ] = [harmonic_mean(goodness(sets.FORGET, *of_set)) for of_set in _triples(by_seed, "forget")]
    six = zip(_triples(by_seed, "retain"), _triples(by_seed, "world"), strict=True)
    by_seed[RQ] = [harmonic_mean([*retain, *world]) for retain, world in six]
    _interval_of_mean(by_seed, wide, len(wanted))
    made = []
    for name in [name for name in numbers.run.unique() if name in by_seed.index]:
        values = {key: column.dropna().tolist() for key, column in by_seed.loc[name].items()}
        p_values = [key for key in values if unit(key[1]) == "p-value"]
        values |= {key: wide.loc[name][key].dropna().tolist() for key in p_values}
        of_seeds = {key: of_key for key, of_key in values.items() if of_key}
        estimates = {key: exact(sum(of_key) / len(of_key)) for key, of_key in of_seeds.items()}
        made.append(Row(name, kept.base, {}, estimates, len(wide.loc[name]), of_seeds=of_seeds))
    return marked(made)


def _interval_of_mean(by_seed: pd.DataFrame, wide: pd.DataFrame, targets: int) -> None:
    """Put the ends of the mean AUC's interval in the place of the mean ends; targets are independent of each other."""
    ends = [("elude_mia", "mia_auc_low"), ("elude_mia", "mia_auc_high")]
    if targets > 1 and {MIA_AUC, *ends} <= {*wide.columns}:
        # The longer of the two arms: the other one may have been cut at 0 or 1.
        arms = np.maximum(*((wide[end] - wide[MIA_AUC]).abs() for end in ends))
        half = (arms**2).groupby(["run", "seed"]).sum(min_count=targets) ** 0.5 / targets
        for end, sign in zip(ends, (-1, 1), strict=True):
            by_seed[end] = (by_seed[MIA_AUC] + sign * half).clip(0, 1)


def _triples(numbers: pd.DataFrame, name: str) -> list[list[float]]:
    """The three measures of a set, for each row."""
    return numbers[[(f"elude_{name}", metric) for metric in THREE]].to_numpy().tolist()
