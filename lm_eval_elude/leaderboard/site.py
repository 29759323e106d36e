"""The page of a board, its CSV, and the starter repository."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from lm_eval_elude import __version__
from lm_eval_elude.errors import UserError, reason
from lm_eval_elude.leaderboard.board import (
    FILE,
    RESULTS,
    SUBMISSIONS,
    Submission,
    Table,
    baseline_slug,
    board,
    results_of,
    submissions,
    table_of,
)
from lm_eval_elude.leaderboard.rank import Scored, row
from lm_eval_elude.metrics.estimates import Estimate
from lm_eval_elude.report.frame import models_of
from lm_eval_elude.report.page import write_report
from lm_eval_elude.report.verdicts import judge_models
from lm_eval_elude.stress.table import FILE as ATTACKS
from lm_eval_elude.tasks.runs import Run

HERE = Path(__file__).parent
COLUMNS = ("score", "mc_accuracy", "utility", "repetition", "recovery", "mia_auc")


def check(folder: Path, online: bool = False) -> list[Submission]:
    """All submissions, each for a table of the board; ``online`` asks the Hub whether the weights are there.

    UserError names the file.
    """
    found = submissions(folder)
    for each in found:
        table_of(folder, each.table)
        if online:
            _on_hub(each)
    return found


def _on_hub(submitted: Submission) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi(token=False).model_info(submitted.model, revision=submitted.revision, files_metadata=True)
    except HfHubHTTPError as error:
        raise UserError(f"{SUBMISSIONS}/{submitted.slug}.yaml: {submitted.weights}: {reason(error)}") from None
    names = {file.rfilename for file in info.siblings or ()}
    if "config.json" not in names or not any(n.startswith("model") and n.endswith(".safetensors") for n in names):
        raise UserError(f"{SUBMISSIONS}/{submitted.slug}.yaml: {submitted.weights} has no config.json and safetensors")


def run_of(folder: Path, slug: str, weights: str) -> Run | None:
    """The maintainer's run; UserError where its results are not what the samples give."""
    if (place := results_of(folder, slug, weights)) is None:
        return None
    if wrong := (run := Run(place)).mismatches():
        raise UserError(f"{place}: {wrong[0]} (and {len(wrong) - 1} more); score it again")
    return run


def rows_of(folder: Path, table: Table) -> tuple[list[tuple[Submission, Scored]], list[Submission], dict[str, Run]]:
    """Scored submissions in their order, those that were not scored, and all runs by slug."""
    runs, scored, waiting = dict[str, Run](), list[tuple[Submission, Scored]](), list[Submission]()
    for role in ("original", "retrained"):
        if run := run_of(folder, baseline_slug(table, role), getattr(table, role)):
            runs[role] = run
    for each in submissions(folder):
        if each.table != table.name:
            continue
        run = run_of(folder, each.slug, each.weights) if len(runs.keys() & {"original", "retrained"}) == 2 else None
        if run is None:
            waiting.append(each)
        else:
            runs[each.slug] = run
            scored.append((each, row(run, runs["original"], runs["retrained"])))
    return sorted(scored, key=lambda pair: pair[1].key), waiting, runs


def build(folder: Path, out: Path) -> int:
    """Write ``index.html``, ``board.csv`` and one report a row into a folder; returns how many rows have a rank."""
    from jinja2 import Environment, FileSystemLoader

    out.mkdir(parents=True, exist_ok=True)
    tables, lines, ranked = [], list[dict[str, Any]](), 0
    for table in board(folder).tables:
        scored, waiting, runs = rows_of(folder, table)
        baselines = [
            {"role": role, **_cells(row(runs[role], runs["original"], runs["retrained"]), keep_score=False)}
            for role in ("original", "retrained") if {"original", "retrained"} <= runs.keys()
        ]  # fmt: skip
        ranks = list[dict[str, Any]]()
        for rank, (each, found) in enumerate(scored, 1):
            cells = _cells(found)
            ranks.append({"rank": rank, "about": each, **cells})
            write_page(each, runs, out / "reports" / f"{each.slug}.html")
            ranks[-1]["report"] = f"reports/{each.slug}.html"
            values = {name: cells[name].value if cells[name] else "" for name in COLUMNS}
            lines.append({"table": table.name, "rank": rank, "model": each.model, "revision": each.revision,
                          "method": each.method, "verdict": found.verdict, **values})  # fmt: skip
        ranked += len(ranks)
        tables.append({"table": table, "rows": ranks, "baselines": baselines, "waiting": waiting})
    environment = Environment(loader=FileSystemLoader(HERE), autoescape=True)
    environment.filters |= {"percent": _percent, "spread": _spread}
    page = environment.get_template("page.html.j2").render(
        title=board(folder).title, tables=tables, version=__version__, columns=COLUMNS
    )
    (out / "index.html").write_text(page, encoding="utf-8")
    with (out / "board.csv").open("w", encoding="utf-8", newline="") as stream:
        names = ("table", "rank", "model", "revision", "method", "verdict", *COLUMNS)
        writer = csv.DictWriter(stream, names)
        writer.writeheader()
        writer.writerows(lines)
    return ranked


def write_page(submitted: Submission, runs: dict[str, Run], page: Path) -> None:
    """A row's report, beside the two baselines of its table."""
    page.parent.mkdir(exist_ok=True)
    run = runs[submitted.slug]
    of_page = {"original": runs["original"], submitted.model: run, "retrained": runs["retrained"]}
    models = models_of(of_page, "retrained", "original")
    attacked = run.path.with_name(ATTACKS)
    points = judge_models(models, [f"{submitted.model}={attacked}"] if attacked.is_file() else [])
    write_report(models, page, stress=points)


def _cells(found: Scored, keep_score: bool = True) -> dict[str, Any]:
    cells = found._asdict()
    return cells if keep_score else cells | {"score": None, "recovery": None, "verdict": ""}


def _percent(value: Estimate | None) -> str:
    return "–" if value is None or value.value != value.value else f"{100 * value.value:.0f} %"


def _spread(value: Estimate | None) -> str:
    """Half the 95 % interval, in points."""
    if value is None or value.stderr != value.stderr:
        return ""
    low, high = value.bounds
    return f"± {50 * (high - low):.0f}"


def start(folder: Path, package: str) -> list[Path]:
    """Write the starter repository; ``package`` is what pip installs. UserError where the folder is not empty."""
    if folder.exists() and any(path.name != ".git" for path in folder.iterdir()):
        raise UserError(f"{folder} is not empty; name a new folder")
    written = []
    for source in sorted(path for path in (HERE / "starter").rglob("*") if path.is_file()):
        target = folder / source.relative_to(HERE / "starter")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source.read_text(encoding="utf-8").replace("PACKAGE", package), encoding="utf-8")
        written.append(target)
    for name in (SUBMISSIONS, RESULTS):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / ".gitkeep").touch()
    assert (folder / FILE).is_file()
    return written
