"""A sample of a data set for people to judge, as CSV, and what several of them say."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lm_eval_elude.data.dataset import has, load_records
from lm_eval_elude.data.sets import Split, Subset
from lm_eval_elude.errors import UserError

CRITERIA = ("relevance", "diversity", "factuality")
# Shares that the paper's judges gave (appendix on human evaluation).
PAPER = {"forget": (0.89, 0.90, 0.99), "retain": (0.96, 0.995, 0.985)}
_FILES: tuple[tuple[Subset, Split], ...] = (
    ("forget", "train"), ("retain", "train"), ("retain", "validation"), ("retain", "test"),
)  # fmt: skip


def sample(source: str, size: int, seed: int) -> pd.DataFrame:
    """``size`` rows of the forget and of the retain set, with empty columns for the judgements (1 or 0)."""
    rows: list[dict[str, Any]] = []
    for subset, split in (place for place in _FILES if has(source, *place)):
        records = load_records(source, subset, split).records
        file = Path(source) / f"{subset}_qa-{split}.parquet"
        texts = pd.read_parquet(file).get("paragraph") if file.is_file() else None  # of `elude build`
        for number, r in enumerate(records):
            text = "" if texts is None else texts[number]
            names = {"id": f"{subset}_qa-{split}, row {number + 1}", "set": subset, "about": r.subject or r.entity}
            rows.append(names | {"question": r.question, "answer": r.answer, "source": r.source, "paragraph": text})
    drawn = pd.DataFrame(rows).sample(frac=1, random_state=seed).groupby("set").head(size)
    return drawn.sort_values("set", kind="stable").assign(**dict.fromkeys(CRITERIA, ""))


def merge(files: Sequence[Path]) -> pd.DataFrame:
    """By set and criterion: share of yes over all judges, a file each; the paper's; rows; Krippendorff's alpha."""
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
    for subset, shares in PAPER.items():
        for criterion, paper in zip(CRITERIA, shares, strict=True):
            columns = [pd.to_numeric(judge.loc[judge["set"] == subset, criterion]) for judge in judges]
            table = pd.concat(columns, axis=1, keys=range(len(judges))).dropna(how="all")
            alpha = float("nan") if len(judges) < 2 else 1.0  # all say the same, where the formula is 0 / 0
            if len(judges) > 1 and table.stack().nunique() > 1:
                alpha = krippendorff.alpha(table.to_numpy(dtype=float).T, level_of_measurement="nominal")
            results.append((subset, criterion, table.stack().mean(), paper, len(table), alpha))
    return pd.DataFrame(results, columns=["set", "criterion", "share", "paper", "rows", "alpha"])
