"""What a board shows: the page of its tables, the same as JSON and CSV, and each row's rank in its report."""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lm_eval_elude import __version__
from lm_eval_elude.board import score as scores
from lm_eval_elude.board.verify import LEVELS, MEANING
from lm_eval_elude.data import jsonio
from lm_eval_elude.data.files import write_bytes, write_text
from lm_eval_elude.report import plots
from lm_eval_elude.report.frame import csv_text
from lm_eval_elude.report.page import render
from lm_eval_elude.report.verdict import GIBBERISH
from lm_eval_elude.scoring.estimates import Z95
from lm_eval_elude.scoring.metrics import METRICS
from lm_eval_elude.scoring.units import FORMS, PER_CENT

PAGE = Path(__file__).with_name("page")
COMPANIONS = {"original": "original", "retrained": "reference"}  # what stands beside a row in its report, by role


class PageColumn(NamedTuple):
    """A column of the page."""

    label: str
    sentence: str
    text: bool = False  # whether it holds texts, otherwise numbers
    form: tuple[int, int] = PER_CENT  # of numbers: the factor, and the digits after the point


PARTS = {
    "forgets": "how near FQ and what is still first come to the reference, the worst of plain questions and attacks; "
    "where attacks on the weights count, also how little is known after the worst of them.",
    "keeps": "how near RQ comes to the reference.",
    "speaks": "whether it answers about the target, as fluently as the reference and not the same to every question.",
    "hides": "how near the worst membership attack comes to what it finds in the reference.",
}
_ATTACKS = {
    scores.BACK: "the worst of elude stress", "relearned": "fine-tuning", "rounded": "rounding the weights",
    "pruned": "setting the smallest weights to 0", "inside": "reading inner layers or fitting a soft prompt",
}  # fmt: skip
PAGE_COLUMNS = {
    "rank": PageColumn("#", "1 + how many of the rows shown have a higher score; = where several share it; a row that "
                       "the keeper has not scored again has none."),
    "model": PageColumn("model", "Opens the report of its run, beside the table's original and reference.", True),
    "method": PageColumn("method", "How it was made, and who submits it.", True),
    "score": PageColumn("score", "Harmonic mean of forgets, keeps, speaks and hides, with its 95 % interval."),
    **{name: PageColumn(name, f"Part of the score: {sentence}") for name, sentence in PARTS.items()},
    **{
        name: PageColumn((m := METRICS[metric]).label, m.sentence, form=FORMS.get(m.unit, PER_CENT))
        for name, (_, metric) in scores.COLUMNS.items()
    },
    **{
        name: PageColumn(name, f"How much of what the original knows beyond the reference is known after {attack}.")
        for name, attack in _ATTACKS.items()
    },
    "proof": PageColumn(
        "proof", f"How far it was checked: {'; '.join(f'{name}, {means}' for name, means in MEANING.items())}.", True
    ),
    "cost": PageColumn("hours", "Of one device, as the submitter says."),
}  # fmt: skip


def write_tables(site: Path, tables: list[dict[str, Any]]) -> None:
    """The page of a board, and all that is in it as JSON and as CSV."""
    about = (PAGE / "score.txt").read_text(encoding="utf-8")
    tables = jsonio.finite(tables)
    board = {"version": __version__, "score": about, "tables": tables}
    write_text(site / "leaderboard.json", json.dumps(board, ensure_ascii=False) + "\n")
    flat = [
        {"table": table["name"], **row, "rank": row["rank"] or "", "remarks": "; ".join(row["remarks"])}
        for table in tables
        for row in table["rows"]
    ]
    left_out = ("versions", "weights")
    rows = [{name: value for name, value in row.items() if name not in left_out} for row in flat]
    write_text(site / "leaderboard.csv", csv_text(pd.json_normalize(rows, sep="_")))
    shown = {"tables": [{"id": table["id"], "rows": [_page_row(row) for row in table["rows"]]} for table in tables]}
    block = gzip.compress(json.dumps(shown, ensure_ascii=False, separators=(",", ":")).encode(), mtime=0)
    page = render(
        PAGE / "board.html.j2", tables=tables, planes=[_plane(table["rows"]) for table in tables], levels=LEVELS,
        version=__version__, about=about, columns=PAGE_COLUMNS, gibberish=GIBBERISH,
        block=base64.b64encode(block).decode(),
    )  # fmt: skip
    write_text(site / "index.html", page)


_NOT_KNOWN = {("stderr", name) for name in scores.COLUMNS}  # shown as ? where it is not known
_WORST = {"fq": "FQ in", "known": "known in", "auc": "membership by", scores.BACK: "weights by"}


def _page_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as the page's script reads it."""
    names = ("digest", "model", "method", "submitter", "hardware", "cost", "links", "level", "status", "role", "rank")
    worst = [
        f"{_WORST.get(kind, kind)} {re.sub('^elude_(attack_)?|^mia_|_auc$', '', name).replace('_', ' ')}"
        for kind, name in row["score"]["worst"].items()
    ]
    dated = [f"scored again on {row['date'][:10]}"] if row["date"] else []
    numbers = {
        "score": {"value": row["score"]["value"], "stderr": row["score"]["stderr"]},
        **{name: {"value": part} for name, part in row["score"]["parts"].items()},
        **{
            name: {k: v for k, v in row[name].items() if v is not None or k == "value" or (k, name) in _NOT_KNOWN}
            for name in scores.NAMES
        },
    }
    return {
        **{name: row[name] for name in names},
        **{name: {key: value and round(value, 5) for key, value in number.items()} for name, number in numbers.items()},
        "proof": LEVELS.index(row["level"]), "reason": row["reason"],
        "broken": (row["degenerate"]["value"] or 0) > GIBBERISH,
        "notes": [*filter(None, [row["reason"]]), *row["remarks"], f"worst: {', '.join(worst)}", *dated],
    }  # fmt: skip


def _plane(rows: Sequence[Mapping[str, Any]]) -> str:
    """The picture of a table, with its references; the page's script draws the other rows."""
    marks = {
        COMPANIONS[row["role"]]: (row["fq"]["value"], row["rq"]["value"])
        for row in rows
        if row["role"] in COMPANIONS and None not in (row["fq"]["value"], row["rq"]["value"])
    }
    drawing = plots.plane(marks, COMPANIONS["retrained"])
    return drawing[drawing.index("<svg") :]


def write_standings(site: Path, tables: Sequence[Mapping[str, Any]]) -> None:
    """Put the rank of each row, its score and the parts of it into its report, where they changed."""
    for table in tables:
        ranked = sum(row["rank"] is not None for row in table["rows"])
        for row in table["rows"]:
            score, file = row["score"], site / "submissions" / f"{row['digest']}.html"
            place = f"rank {row['rank']} of {ranked}" if row["rank"] else row["reason"] or f"the {row['role']} model"
            parts = ", ".join(f"{name} {_percent(part)}" for name, part in score["parts"].items())
            scored = f"score {_percent(score['value'])} ± {_percent(Z95 * score['stderr'])} ({parts})"
            line = html.escape(f"{table['name']}: {place}; {scored}; proof: {row['level']}")
            before = file.read_bytes()
            start, old, end = before.partition(b'<p id="standing">')
            _, close, end = end.partition(b"</p>")
            after = start + old + line.encode() + close + end
            if old and after != before:
                write_bytes(file, after)


def _percent(value: float) -> str:
    return "?" if math.isnan(value) else f"{100 * value:.1f}"
