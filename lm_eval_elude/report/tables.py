"""The tables of a report, for a page, a terminal or a paper, and the same numbers as plain rows for a spreadsheet."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lm_eval_elude.data import jsonio
from lm_eval_elude.report.comparison import NamedRun, change, warnings
from lm_eval_elude.scoring.benchmarks.elude import ATTACK, CONTROL
from lm_eval_elude.scoring.estimates import Z95, Estimate
from lm_eval_elude.scoring.metrics import TOKEN_ATTACKS

Key = tuple[str, str]  # task or group, metric
# The headline columns: group of columns, name, number.
HEADLINE: tuple[tuple[str, str, Key], ...] = (
    ("forget set", "FQ", ("elude_forget", "forget_quality")),
    ("forget set", "P", ("elude_forget", "probability")),
    ("forget set", "ROUGE", ("elude_forget", "rougeL_recall")),
    ("forget set", "TR", ("elude_forget", "truth_ratio")),
    ("forget set", "degen.", ("elude_forget", "degenerate")),
    ("retain (neighbours)", "RQ", ("elude_quality", "retain_quality")),
    ("retain (neighbours)", "P", ("elude_retain", "probability")),
    ("retain (neighbours)", "ROUGE", ("elude_retain", "rougeL_recall")),
    ("retain (neighbours)", "TR", ("elude_retain", "truth_ratio")),
    ("retain (neighbours)", "degen.", ("elude_retain", "degenerate")),
    ("attacks", "FQ", ("elude_attacks", "forget_quality")),
    ("membership", "AUC", ("elude_mia", "mia_auc")),
)
# Numbers that a run has where a reference is known.
DISTANCE: tuple[tuple[str, Key], ...] = (
    ("FQ", ("elude_forget", "forget_quality_gap")),
    ("P", ("elude_forget", "probability_gap")),
    ("ROUGE", ("elude_forget", "rougeL_recall_gap")),
    ("attacked FQ", ("elude_attacks", "forget_quality_gap")),
    ("membership AUC", ("elude_mia", "mia_auc_gap")),
    ("PrivLeak", ("elude_mia", "privleak")),
)
KS = ("elude_forget", "ks_p_value")
MEMBERSHIP = (
    ("loss", "mia_auc"),
    *((name[4:-4].replace("_plus", "+").replace("_", "-"), name) for name in TOKEN_ATTACKS),
)


class Cell(NamedTuple):
    """What stands in a table: a text, and in small print beside it an interval or a count."""

    text: str
    small: str = ""


class Table(NamedTuple):
    """A table with a caption; ``groups`` stand above the columns that they head, as (name, columns)."""

    name: str
    caption: str
    head: list[str]
    rows: list[list[Cell]]
    groups: Sequence[tuple[str, int]] = ()


def tables(runs: Sequence[NamedRun]) -> list[Table]:
    """Every table that the runs have numbers for."""
    found = [
        headline(runs),
        differences(runs),
        distance(runs),
        attacks(runs),
        membership(runs),
        by_target(runs),
    ]
    return [table for table in found if table.rows]


def headline(runs: Sequence[NamedRun]) -> Table:
    """FQ, RQ and what they are made of, a row for each run, with n below."""
    columns = [column for column in HEADLINE if any(column[2] in run.estimates for run in runs)]
    rows = [[Cell(_title(run)), *(_cell(run.estimates.get(key)) for _, _, key in columns)] for run in runs]
    rows.append([Cell("n"), *(_records([run.estimates.get(key) for run in runs]) for _, _, key in columns)])
    groups = [(g, sum(c[0] == g for c in columns)) for g in dict.fromkeys(c[0] for c in columns)]
    caption = (
        "Per cent, with 95 % intervals; n distinct records. Read FQ beside the "
        "share of gibberish (degen.) and the reference's FQ: beyond that, higher is not better."
    )
    return Table("Scores", caption, ["", *(name for _, name, _ in columns)], rows, [("", 1), *groups])


def differences(runs: Sequence[NamedRun]) -> Table:
    """What changed between the first run and each other one, paired by record."""
    before, *others = runs
    rows = []
    for group, name, key in HEADLINE:
        if key not in before.estimates or not any(key in run.estimates for run in others):
            continue
        row, shared = [Cell(f"{group}: {name}")], []
        for run in others:
            found = change(run.estimates[key], before.estimates[key]) if key in run.estimates else None
            if found is None or not found.shared:
                row += [Cell("–"), Cell("–")]
                continue
            shared.append(str(found.shared))
            p = found.p_value
            row.append(Cell(f"{100 * found.estimate.value:+.1f}", span(*found.interval, "+.1f")))
            row.append(Cell("–" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"))
        rows.append([*row, Cell(" / ".join(dict.fromkeys(shared)) or "–")])
    caption = (
        "Points of per cent, with 95 % intervals and the two-sided test of no difference, paired by record; – where no "
        "error can be formed."
    )
    groups = [("", 1), *((run.name, 2) for run in others), ("", 1)]
    head = ["", *(text for _ in others for text in ("change", "p")), "n"]
    return Table(f"Differences from {before.name}", caption, head, rows, groups)


def distance(runs: Sequence[NamedRun]) -> Table:
    """How far each run is from the reference."""
    having = [run for run in runs if KS in run.estimates or any(key in run.estimates for _, key in DISTANCE)]
    columns = [column for column in DISTANCE if any(column[1] in run.estimates for run in having)]
    rows = []
    for run in having:
        row = [Cell(_title(run)), Cell(f"{run.estimates[KS].value:.3g}" if KS in run.estimates else "–")]
        for _, key in columns:
            found = run.estimates.get(key)
            half = Z95 * found.stderr if found else math.nan
            row.append(
                Cell(f"{100 * found.value:+.1f}", span(found.value - half, found.value + half, "+.1f"))
                if found and not math.isnan(found.value)
                else Cell("–")
            )
        rows.append(row)
    caption = (
        "This model less the reference in points of per cent, with 95 % intervals paired by record; 0 is ideal. KS p: "
        "of equal truth ratios on the forget set (TOFU's forget quality); a high one cannot tell the two apart."
    )
    return Table("Distance from the reference", caption, ["", "KS p", *(name for name, _ in columns)], rows)


def attacks(runs: Sequence[NamedRun]) -> Table:
    """Forget quality under each attack beside the same records asked plainly."""
    rows = []
    for task in attack_tasks(runs):
        found = [run.estimates.get((task, "forget_quality")) for run in runs]
        name = "asked plainly" if task == CONTROL else task.removeprefix(ATTACK).replace("_", " ")
        rows.append([Cell(name), *map(_cell, found), _records(found)])
    mean = [run.estimates.get(("elude_attacks", "forget_quality")) for run in runs]
    if any(mean):
        rows.append([Cell("mean of the attacks"), *map(_cell, mean), _records(mean)])
    return Table(
        "Attacks",
        "FQ in per cent, with 95 % intervals; n distinct records, which several prompts may ask.",
        ["", *map(_title, runs), "n"],
        rows,
    )


def attack_tasks(runs: Sequence[NamedRun]) -> list[str]:
    """The attack suites of the runs, the control first."""
    found = dict.fromkeys(task for run in runs for task in run.run.tasks if task.startswith(ATTACK))
    return sorted(found, key=lambda task: task != CONTROL)


def membership(runs: Sequence[NamedRun]) -> Table:
    """The membership attacks of the runs that have them."""
    having = [run for run in runs if ("elude_mia", "mia_auc") in run.estimates]
    columns = [(name, ("elude_mia", metric)) for name, metric in MEMBERSHIP]
    columns = [column for column in columns if any(column[1] in run.estimates for run in having)]
    rows = []
    for run in having:
        accuracy, spread = (run.estimates["elude_mia", m].value for m in ("mia_accuracy", "mia_accuracy_std"))
        said = Cell(percent(accuracy), "" if math.isnan(spread) else f"± {percent(spread)}")
        rows.append(
            [
                Cell(_title(run)),
                said,
                *(_cell(run.estimates.get(key)) for _, key in columns),
                _records([run.estimates["elude_mia", "mia_auc"]]),
            ]
        )
    caption = (
        "Forget set against its paraphrase, per cent; 50 is ideal. AUC with 95 % intervals: above 50 the forget set is "
        "still known, below it the model is over-unlearned. Accuracy ± standard deviation over ten splits."
    )
    return Table("Membership inference", caption, ["", "accuracy", *(f"AUC {name}" for name, _ in columns), "n"], rows)


def by_target(runs: Sequence[NamedRun]) -> Table:
    """FQ of each target, where there are several."""
    found = [run.run.numbers.get("elude_forget", {}).get("forget_quality", {}).get("per_target", {}) for run in runs]
    targets = list(dict.fromkeys(target for by in found for target in by))
    rows = [[Cell(target), *(_number(by.get(target)) for by in found)] for target in targets]
    caption = "FQ on the forget set in per cent, with 95 % intervals."
    return Table("Targets", caption, ["", *map(_title, runs)], rows if len(rows) > 1 else [])


def markdown(runs: Sequence[NamedRun]) -> str:
    """All tables and warnings, for a terminal or a paper."""
    parts = [grid(table) for table in tables(runs)]
    if said := warnings(runs):
        parts.append("### Mind\n\n" + "\n".join(f"- {_plain(text)}" for text in said))
    return "\n\n".join(parts) + "\n"


def grid(table: Table) -> str:
    """A table in Markdown, with its name and caption."""
    return f"### {_plain(table.name)}\n\n{table.caption}\n\n" + "\n".join(lines(table))


def lines(table: Table) -> list[str]:
    """The lines of a table in Markdown."""
    head = [f"{group} {name}" if group else name for name, group in zip(table.head, _spread(table), strict=True)]
    cells = [[_plain(text) for text in head]]
    cells += [[_plain(f"{c.text} {c.small}".strip()) for c in row] for row in table.rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    found = [
        _line([t.ljust(w) if i == 0 else t.rjust(w) for i, (t, w) in enumerate(zip(row, widths, strict=True))])
        for row in cells
    ]
    found.insert(1, _line(["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]))
    return found


def rows(runs: Sequence[NamedRun]) -> Iterator[dict[str, Any]]:
    """Every number of every run over all targets ("") and for each, with error, interval, samples and records."""
    for run in runs:
        for task, metrics in run.run.numbers.items():
            for metric, row in metrics.items():
                for target, one in {"": row, **row["per_target"]}.items():
                    value, error = one["value"], one["stderr"]
                    yield {
                        "run": run.name, "task": task, "metric": metric, "target": target, "value": value,
                        "stderr": error, "low": value - Z95 * error, "high": value + Z95 * error, "n": one["n"],
                        "records": one["records"],
                    }  # fmt: skip


def csv_text(runs: Sequence[NamedRun]) -> str:
    """:func:`rows` as CSV; an empty field is a number that cannot be had, and no text is a spreadsheet's formula."""
    found = list(rows(runs))
    out = io.StringIO()
    writer = csv.DictWriter(out, list(found[0]), lineterminator="\n")
    writer.writeheader()
    for row in found:
        writer.writerow({key: field(value) for key, value in row.items()})
    return out.getvalue()


def json_ready(runs: Sequence[NamedRun]) -> dict[str, Any]:
    """Numbers, differences from the first run, settings and warnings; null is a number that cannot be had."""
    changes = []
    for run in runs[1:]:
        for key in [key for key in runs[0].estimates if key in run.estimates]:
            found = change(run.estimates[key], runs[0].estimates[key])
            low, high = found.interval
            changes.append({
                "run": run.name, "before": runs[0].name, "task": key[0], "metric": key[1],
                "difference": found.estimate.value, "stderr": found.estimate.stderr, "low": low, "high": high,
                "p_value": found.p_value, "records": found.shared,
            })  # fmt: skip
    about = [
        {"name": r.name, "reference": r.reference, "settings": {t: _settings(r, t) for t in r.run.tasks}} for r in runs
    ]
    return {
        "runs": about,
        "numbers": jsonio.finite(list(rows(runs))),
        "differences": jsonio.finite(changes),
        "warnings": warnings(runs),
    }


def _settings(run: NamedRun, task: str) -> dict[str, Any]:
    return {key: value for key, value in run.run.settings(task).items() if key != "aggregates"}


def field(value: Any) -> Any:
    """A value as a spreadsheet may read it: no number where there is none, no text that is a formula."""
    if isinstance(value, float):
        return "" if math.isnan(value) else value
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def _title(run: NamedRun) -> str:
    return f"{run.name} (reference)" if run.reference and "reference" not in run.name else run.name


def _cell(estimate: Estimate | None) -> Cell:
    if estimate is None:
        return Cell("–")
    return Cell(percent(estimate.value), "" if math.isnan(estimate.stderr) else span(*estimate.interval))


def _number(row: dict[str, Any] | None) -> Cell:
    """As :func:`_cell`, of a row of :attr:`Run.numbers`."""
    if row is None:
        return Cell("–")
    low, high = (min(1.0, max(0.0, row["value"] + sign * Z95 * row["stderr"])) for sign in (-1, 1))
    return Cell(percent(row["value"]), "" if math.isnan(row["stderr"]) else span(low, high))


def span(low: float, high: float, form: str = ".1f") -> str:
    return "" if math.isnan(low) else f"[{100 * low:{form}}, {100 * high:{form}}]"


def percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.1f}"


def _records(estimates: Sequence[Estimate | None]) -> Cell:
    """How many distinct records are behind a number, in each run where they differ."""
    return Cell(" / ".join(dict.fromkeys(str(e.records) for e in estimates if e)) or "–")


def _spread(table: Table) -> list[str]:
    """The group above each column."""
    return [name for name, columns in table.groups for _ in range(columns)] or [""] * len(table.head)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """Text of a run in a table of Markdown: one line, no markup."""
    shown = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(re.sub(r"[\\|`*]|<(?=[\w/!?])|(?<=])\(", r"\\\g<0>", shown).split())
