"""The scripts behind docs: tables between markers, plans of runs, made-up authors."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lm_eval_elude.data import tofu
from optout_train.presets import METHODS
from tests.support import MINI, ROOT, called


@pytest.fixture(autouse=True)
def scripts(monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@pytest.fixture
def outcome() -> Any:
    return importlib.import_module("outcome")


def test_a_table_replaces_what_stands_between_its_markers_and_nothing_else(tmp_path: Path) -> None:
    tables = importlib.import_module("tables")
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- one -->\nold\n<!-- /one -->\nb\n<!-- two -->\n<!-- /two -->\n")
    for _ in range(2):
        tables.put(page, "one", tables.markdown(["x", "y"], [["1", "2"]]))
        tables.put(page, "two", ["new"])
    table = "| x | y |\n| --- | --- |\n| 1 | 2 |"
    assert page.read_text() == f"a\n<!-- one -->\n{table}\n<!-- /one -->\nb\n<!-- two -->\nnew\n<!-- /two -->\n"
    with pytest.raises(ValueError, match=r"page\.md needs the lines '<!-- three -->' and '<!-- /three -->' once each"):
        tables.put(page, "three", ["new"])


def test_every_method_is_explained_where_training_is() -> None:
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    assert not [name for name in METHODS if "+" not in name and f"`{name}`" not in text]


def test_made_up_authors_are_laid_out_as_tofu_and_their_wrong_answers_are_wrong(tmp_path: Path) -> None:
    mini = importlib.import_module("tofu_mini")
    one, two, other = (mini.write_data(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    files = {path.name: path.read_bytes() for path in one.iterdir()}
    assert files == {path.name: path.read_bytes() for path in two.iterdir()}
    assert files != {path.name: path.read_bytes() for path in other.iterdir()}
    sets = {name: tofu.load(str(one), name) for name in ("full", mini.SPLIT, tofu.RETAIN_OF[mini.SPLIT])}
    full, forget, retain = ({(r.question, r.answer) for r in records} for records in sets.values())
    assert full == forget | retain and not forget & retain
    assert len(forget) == mini.FORGOTTEN * len(mini.KINDS) and len(full) == mini.AUTHORS * len(mini.KINDS)
    known = "".join((MINI / f"{name}.jsonl").read_text() for name in ("forget_qa-train", "retain_qa-train"))
    assert not [name for name in (*mini.TEXTS["given"], *mini.TEXTS["family"]) if name in known]
    for spec in tofu.SETS.values():
        for record in tofu.scored_records(str(one), spec, mini.SPLIT):
            texts = {record.answer, record.paraphrased_answer, *record.perturbed_answer}
            own = spec.name in ("tofu_forget", "tofu_retain")
            assert len(texts) == (7 if own else 4) and len(record.perturbed_answer) == (5 if own else 3)
            assert not own or (record.question, record.answer) in (forget if spec.forgotten else retain)


PLAN = """
[[runs]]
targets = ["Cristiano Ronaldo"]
methods = ["original", "npo+rt"]
seeds = [0, 1]

[[runs]]
targets = ["Taylor Swift"]
methods = ["undo+rt"]
settings = ["--learning_rate 1e-4", "--learning_rate 1e-3"]
start = "npo+rt --learning_rate 3e-4"
"""


def test_a_run_whose_row_is_there_is_not_done_again(outcome: Any, tmp_path: Path, monkeypatch: Any) -> None:
    plan, work, done = tmp_path / "plan.toml", tmp_path / "work", []
    plan.write_text(PLAN)

    def measure(run: Any, models: Any, folder: Path) -> dict[str, Any]:
        done.append(run)
        if len(done) == 4:
            raise KeyboardInterrupt
        return run._asdict() | {"FQ": 0.12345, "mc": float("nan"), "seconds": 1800.4}

    monkeypatch.setattr(outcome, "measure", measure)
    table = tmp_path / "plan.csv"
    words = [str(plan), "--work", str(work), "--out", str(table)]
    with pytest.raises(KeyboardInterrupt):
        called(outcome.main, *words)
    rows = outcome.read_rows(table)
    assert [(r["method"], r["seed"], r["FQ"], r["mc"]) for r in rows][1:] == [
        ("npo+rt", "0", "0.1235", ""), ("original", "1", "0.1235", ""),
    ]  # fmt: skip
    told = called(outcome.main, *words)
    assert told.out.startswith(f"3 runs to do, 3 are in {table}; about 1.5 hours\n")
    assert [run.key for run in done[3:]] == [done[3].key, *(run.key for run in done[4:])] and len(done) == 7
    assert {run.key for run in done} == {run.key for run in outcome.read_plan(plan)} and done[-1].start
    assert called(outcome.main, *words).out.startswith("0 runs to do, 6 are in") and len(done) == 7


def test_recovery_is_the_largest_of_the_rates_that_leave_both_models_their_utility(
    outcome: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Of four records the original knows all and the retrained model none."""
    known = {"original": 4, "retrained": 0, "checkpoint": 1}
    after = {("checkpoint", "low"): (2, 1.0), ("checkpoint", "middle"): (3, 0.8), ("checkpoint", "high"): (4, 0.5)}

    def attacked(model: Path, role: str, *_: Any) -> list[Any]:
        points = {("none", "", 0.0): (known[role], 1.0)}
        if role != "original":
            points |= {
                ("relearn_half", rate, 5.0): after.get((role, rate), (0, 1.0)) for rate in ("low", "middle", "high")
            }
        rows = []
        for place, (right, utility) in points.items():
            rows += [outcome.Row(*place, role, str(i), "mc_accuracy", float(i < right)) for i in range(4)]
            rows.append(outcome.Row(*place, role, "", "retain_quality", utility))
        return rows

    monkeypatch.setattr(outcome, "attacked", attacked)
    models = outcome.Models(lambda *_: tmp_path, lambda *_: tmp_path)
    run = outcome.Run("npo+rt", "Cristiano Ronaldo", "0", "", "", "", ("relearn_half",))
    found = outcome.recoveries(tmp_path, run, models, tmp_path)
    assert found["recovery_5"] == 0.75 and found["recovery_80"] != found["recovery_80"] and "depth" not in found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compat", "outcome", "readme", "smollm2", "startup"])
def test_help_says_what_a_script_does_and_does_nothing_else(name: str, tmp_path: Path) -> None:
    """``--help`` was once the folder of a model that was fetched, or began the run."""
    script = ROOT / "benchmarks" / f"{name}.py"
    done = subprocess.run([sys.executable, script, "--help"], cwd=tmp_path, capture_output=True, text=True)
    described = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    assert done.returncode == 0 and described in done.stdout and not [*tmp_path.iterdir()]
