"""The main table as Markdown, CSV, LaTeX, and for the terminal within 100 columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from lm_eval_elude.metrics.table import written
from lm_eval_elude.report.frame import Model, chance, columns, heading, long_rows, main_table


def markdown(models: Sequence[Model]) -> str:
    heads, rows = main_table(models)
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def latex(models: Sequence[Model]) -> str:
    """A tabular for booktabs; brackets of intervals as they are."""
    heads, rows = main_table(models)
    escape = str.maketrans({"%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "–": "--", "$": r"\$"})
    lines = [" & ".join(cell.translate(escape) for cell in line) + r" \\" for line in (heads, *rows)]
    body = "\n".join([lines[0], r"\midrule", *lines[1:]])
    return f"\\begin{{tabular}}{{ll{'r' * (len(heads) - 2)}}}\n\\toprule\n{body}\n\\bottomrule\n\\end{{tabular}}\n"


def csv_text(models: Sequence[Model]) -> str:
    """Every number of every model, a row each."""
    rows = long_rows(models)
    out = io.StringIO()
    table = csv.DictWriter(out, rows[0], lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return out.getvalue()


def terminal(models: Sequence[Model]) -> str:
    """The main table without intervals, whole per cents, and the verdicts below it."""
    chosen = [column for column in columns(models) if column.metric != "ks_p_value"]
    width = max(len("retrained (goal)"), *(len(model.name) for model in models)) + 2
    alone = [sum(other.group == column.group for other in chosen) == 1 for column in chosen]
    sizes = [max(len(c.label), len(c.group) * one, 6) + 2 for c, one in zip(chosen, alone, strict=True)]
    groups, heads = " " * width, " " * width
    for i, column in enumerate(chosen):
        first = i == 0 or chosen[i - 1].group != column.group
        # A group's name begins where its first column does, and is cut where the next group begins.
        span = sum(size for size, other in zip(sizes, chosen, strict=True) if other.group == column.group)
        groups += f"{'  ' + column.group.upper():{span}.{span}}" if first else ""
        heads += f"{column.label:>{sizes[i]}}"
    run = models[0].run
    asked = [f"{len(docs)} facts" for task, docs in run.docs.items() if task in ("elude_forget", "tofu_forget")]
    about = ", ".join([*asked, f"data set {run.settings(run.tasks[0])['dataset']}"])
    lines = [f"{heading(models)}: {about}", "", groups.rstrip(), heads]
    for model in models:
        name = f"{model.name} (goal)" if model.role == "retrained" else model.name
        cells = ""
        for column, size in zip(chosen, sizes, strict=True):
            number = model.number(column)
            shown = "–" if number is None else written(number.value, column.metric)
            if number is not None and column.bar:
                shown = f"{100 * number.value:.0f} %"
            cells += f"{shown:>{size}}"
        lines.append(f"{name:<{width}}{cells}")
    known = [i for i, column in enumerate(chosen) if column.metric == "mc_accuracy" and column.label != "worst attack"]
    guess = "".join(f"{f'{100 * chance(models):.0f} %' if i in known else '':>{size}}" for i, size in enumerate(sizes))
    lines.append(f"{'chance':<{width}}{guess}".rstrip())
    judged = [model for model in models if model.verdict]
    if judged:
        lines.append("")
        lines += [f"{model.name:<{width}}{model.verdict.upper()}: {model.reason}" for model in judged]
    return "\n".join(lines) + "\n"
