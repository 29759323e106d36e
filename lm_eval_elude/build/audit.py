"""A sample of a data set for people to judge, as CSV, and what several of them say.

Relevance, diversity and factuality, as in the paper's appendix on human evaluation, whose shares are :data:`PAPER`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lm_eval_elude.data.dataset import has, load_records
from lm_eval_elude.data.sets import Split, Subset
from lm_eval_elude.errors import UserError

CRITERIA = ("relevance", "diversity", "factuality")
PAPER = {"forget": (0.89, 0.90, 0.99), "retain": (0.96, 0.995, 0.985)}
_FILES: list[tuple[Subset, Split]] = [
    ("forget", "train"), ("retain", "train"), ("retain", "validation"), ("retain", "test"),
]  # fmt: skip


class Judged(NamedTuple):
    """A criterion of a set: share of yes over all judgements, rows, Krippendorff's alpha (NaN for one judge)."""

    subset: str
    criterion: str
    share: float
    rows: int
    alpha: float


def sample(source: str, size: int, seed: int) -> pd.DataFrame:
    """``size`` rows of the forget and of the retain set, with empty columns for the judgements (1 or 0)."""
    rows: list[dict[str, Any]] = []
    for subset, split in _FILES:
        if not has(source, subset, split):
            continue
        records = load_records(source, subset, split).records
        file = Path(source) / f"{subset}_qa-{split}.parquet"
        texts = pd.read_parquet(file).get("paragraph") if file.is_file() else None  # of `elude build`
        rows += [
            {
                "id": f"{subset}_qa-{split}, row {number + 1}", "set": subset, "about": r.subject or r.entity,
                "question": r.question, "answer": r.answer, "source": r.source,
                "paragraph": "" if texts is None else texts[number],
            }
            for number, r in enumerate(records)
        ]  # fmt: skip
    drawn = pd.DataFrame(rows).sample(frac=1, random_state=seed).groupby("set").head(size)
    return drawn.sort_values("set", kind="stable").assign(**dict.fromkeys(CRITERIA, ""))


def merge(files: Sequence[Path]) -> list[Judged]:
    """What the judges say, a file each. UserError where a column is missing, or a judgement is neither 1 nor 0."""
    import krippendorff

    judges = []
    for file in files:
        judge = pd.read_csv(file, dtype=str, keep_default_na=False)
        if lacking := {"id", "set", *CRITERIA} - {*judge.columns}:
            raise UserError(f"{file}: column {min(lacking)!r} is missing; a file of `elude audit` is expected")
        if odd := {*judge[[*CRITERIA]].to_numpy().ravel()} - {"0", "1", ""}:
            raise UserError(f"{file}: a judgement is {min(odd)!r}; write 1, 0 or nothing")
        judges.append(judge.set_index("id"))
        if {*judge["id"]} != {*judges[0].index}:
            raise UserError(f"{file}: has other rows than {files[0]}; all judge the same sample")
    results = []
    for subset in PAPER:
        for criterion in CRITERIA:
            columns = [pd.to_numeric(judge.loc[judge["set"] == subset, criterion]) for judge in judges]
            table = pd.concat(columns, axis=1).dropna(how="all")
            if table.empty:
                continue
            alpha = 1.0 if len(judges) > 1 else math.nan  # all say the same, where the formula is 0 / 0
            if len(judges) > 1 and table.stack().nunique() > 1:
                alpha = float(krippendorff.alpha(table.to_numpy(dtype=float).T, level_of_measurement="nominal"))
            results.append(Judged(subset, criterion, float(table.stack().mean()), len(table), alpha))
    if not results:
        raise UserError(f"{', '.join(map(str, files))}: nothing is judged yet; write 1 or 0")
    return results
