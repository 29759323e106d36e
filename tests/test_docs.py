"""The scripts behind docs: tables between markers, and the stages of a real model's whole path (without a model)."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from scipy import stats

from lm_eval_elude.data import bundled, tofu
from lm_eval_elude.data.files import file_hashes
from lm_eval_elude.report import kept, paper
from lm_eval_elude.report.rows import COLLAPSED, Row
from lm_eval_elude.scoring.estimates import Estimate, Observation, combine, mean_over_targets
from lm_eval_elude.stress.outcome import CHECKPOINT, ORIGINAL, RECOVERED, REFERENCE, Worst, recoveries
from optout_train.presets import METHODS
from tests.support import MINI, ROOT, called


@pytest.fixture(autouse=True)
def scripts(monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@pytest.fixture
def real_model() -> Any:
    return importlib.import_module("real_model")


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


def test_every_table_of_numbers_is_written_by_a_script() -> None:
    for name in ("results.md", "pretrained.md", "benchmarks.md"):
        text = (ROOT / "docs" / name).read_text()
        own = re.sub(r"^<!-- ((table)? ?[^\n]+?) -->$.*?^<!-- /(\2|\1) -->$", "", text, flags=re.DOTALL | re.MULTILINE)
        assert own != text and not [line for line in own.splitlines() if line.startswith("|")]


@pytest.fixture
def results() -> Any:
    return importlib.import_module("results")


@cache
def rows(targets: tuple[str, ...]) -> list[Row]:
    """The rows of the kept runs on some targets, or on all."""
    runs = kept.read(ROOT / "docs" / "results.json")
    assert runs
    return kept.rows(runs, targets)


def test_the_tables_of_results_are_those_of_the_runs_on_the_models_of_today(results: Any) -> None:
    runs = kept.read(results.DATA)
    assert runs and runs.base == results.base() == file_hashes(bundled.MODEL)["model.safetensors"][:12]
    page = results.PAGE.read_text()
    command = "elude tables docs/results.json --page docs/results.md"
    assert paper.fill(page, lambda targets: rows(tuple(targets)), "llama-3.1", "page") == page, command
    first = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    planned = {row: [*arguments] for _, rows in results.PARTS.values() for row, arguments in rows.items()}
    planned |= {row: [] for row in results.BASELINES}
    assert runs.arguments == {row: planned[row] for row in runs.arguments}
    assert runs.arguments.keys() <= {name.removesuffix(f", {COLLAPSED}") for name in first}


def test_every_method_is_explained_where_training_is() -> None:
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    assert not [name for name in METHODS if "+" not in name and f"`{name}`" not in text]


@pytest.mark.parametrize(
    ("name", "table"),
    [("differences", "difference_table"), ("differences of other authors' methods", "others_table"),
     ("gradients", "gradient_table")],
)  # fmt: skip
def test_a_table_that_the_script_writes_is_that_of_what_is_kept(name: str, table: str, results: Any) -> None:
    lines = [f"<!-- {name} -->", *getattr(results, table)(), f"<!-- /{name} -->"]
    assert "\n".join(lines) in results.PAGE.read_text()
    assert json.loads(results.NORMS.read_text())["base"] == results.base()


# Sentences of the results, with places for the numbers that they quote.
QUOTED = (ROOT / "tests" / "quoted.md").read_text(encoding="utf-8").split("\n\n")[1:]
QUOTING = [ROOT / "docs" / "results.md"]


@cache
def cells(table: str, target: str) -> pd.DataFrame:
    """A table of all targets, or of one, as text."""
    texts = paper.table(table, rows(() if target == "all" else (target or "cristiano_ronaldo",)), "llama-3.1").cells
    return texts.set_axis([label.removesuffix(f", {COLLAPSED}") for label in texts.index])


@pytest.mark.parametrize("sentence", QUOTED)
def test_a_sentence_of_the_results_quotes_the_numbers_of_the_runs(sentence: str) -> None:
    def number(place: re.Match[str]) -> str:
        name, table, column = place[1].split("|")
        row, _, target = name.partition(" of ")
        text = str(cells(table, target)[column][row])
        return text.removesuffix(" < .05") if "<" in text else text.split(" ")[0].split("\n")[0]

    text = " ".join(word for page in QUOTING for word in page.read_text(encoding="utf-8").split())
    assert re.sub(r"{(.+?)}", number, " ".join(sentence.split())) in text


def test_an_interval_of_a_difference_is_that_of_the_paired_test(results: Any) -> None:
    """SciPy's own, over the five targets."""
    runs, lines = kept.read(results.DATA), results.difference_table()
    assert runs
    numbers = runs.frame.groupby(["run", "task", "metric", "target"])["value"].mean()
    pairs = results.PLAN["pairs"]
    for label, (task, metric) in results.COMPARED.items():
        # Of a pair whose two sides were measured so.
        place = next(i for i, pair in enumerate(pairs) if all((side, task, metric) in numbers for side in pair))
        sides = [numbers[side, task, metric].reindex(results.TARGETS).to_numpy() for side in pairs[place]]
        low, high = stats.ttest_rel(*sides).confidence_interval(0.95)
        factor = 1 if metric == "oddness" else 100
        (line,) = [line for line in lines if line.startswith(f"| {label} | ")]
        assert f"[{factor * low:+.1f}, {factor * high:+.1f}]" in line.split("|")[2 + place], label


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


def test_a_stage_runs_once_and_only_what_ended_well_counts(real_model: Any, tmp_path: Path) -> None:
    work = real_model.Work(tmp_path / "w", {"seed": "0"})
    code = ["-c", f"open({str(tmp_path / 'ran')!r}, 'a').write('x')"]
    first = work.stage("one", code)
    assert first == work.stage("one", code) == real_model.Work(tmp_path / "w", {"seed": "0"}).stage("one", code)
    assert (tmp_path / "ran").read_text() == "x" and first.seconds > 0 and first.peak_mib > 1
    with pytest.raises(SystemExit, match="two ended with exit code 3; the same command goes on from there"):
        work.stage("two", ["-c", "raise SystemExit(3)"])
    work.stage("two", code)
    assert (tmp_path / "ran").read_text() == "xx"
    with pytest.raises(SystemExit, match="was begun with seed '0'"):
        real_model.Work(tmp_path / "w", {"seed": "1"})


class FakeRun:
    """A run's log as the script reads it."""

    def __init__(self) -> None:
        self.results = {"results": {"elude_forget": {"forget_quality,none": 0.25}}}

    def rows(self, task: str) -> list[dict[str, Any]]:
        return [{"doc": {"generated": "a | b", "question": "Q", "answer": "A"}}]

    def samples(self, task: str) -> list[Any]:
        return [SimpleNamespace(values={"truth_ratio_raw": 0.5})]


@pytest.mark.parametrize("teach", [False, True])
def test_the_path_of_a_model_that_knows_too_little(
    teach: bool, real_model: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Untaught it ends at the gate; taught, all is compared with the model that was taught without the target."""
    trained: list[tuple[str, str]] = []
    scored: list[str] = []

    def known(self: Any, name: str, *rest: Any) -> float:
        return 0.9 if name == "taught" else 0.1

    def evaluate(self: Any, name: str, *rest: Any) -> FakeRun:
        scored.append(name)
        return FakeRun()

    def train(self: Any, name: str, model: str, data: Path, target: str, flags: list[str]) -> Any:
        trained.append((name, Path(model).name))
        asked, own = (
            {json.loads(line)["question"] for line in (folder / "forget_qa-train.jsonl").read_text().splitlines()}
            for folder in (data, self.root / "data")
        )
        if name.startswith("taught"):
            assert (own <= asked) == (name == "taught") and len(asked) > len(own)
            assert "--forget_weight" in flags
        else:
            assert asked == own and flags[-4:].count("--eta") == (name == "npo+rt")
            assert name != "npo+rt" or flags[-2:] == ["--transport_weight", "0.2"]
        return str(self.root / name), real_model.Stage(1.0, 2.0, 3.0)

    for name, fake in (("known", known), ("evaluate", evaluate), ("train", train)):
        monkeypatch.setattr(real_model.Work, name, fake)
    flags = [
        "--records",
        "3",
        "--methods",
        "paper",
        "npo+rt --transport_weight 0.2",
        "--work",
        str(tmp_path),
        "--eta",
        "0.5",
    ]
    told = called(real_model.main, bundled.MODEL, *flags, *(["--teach"] if teach else []))
    assert told.code == (0 if teach else 1)
    assert "Of Cristiano Ronaldo the original knows 10% of 3 facts" in told.out
    if not teach:
        assert not trained and not scored and "Teach it first: --teach" in told.err
        return
    assert trained == [("taught", "tiny"), ("taught-without", "tiny"), ("paper", "taught"), ("npo+rt", "taught")]
    assert scored == ["taught", "taught-without", "paper", "npo+rt"]
    assert "| npo+rt |  |  | 25.0 |" in told.out and "- taught: a \\| b" in told.out
    assert "--records 3" in told.out and "--eta 0.5 --methods paper 'npo+rt --transport_weight 0.2'`" in told.out


def test_what_came_back_is_one_table_and_the_difference_is_paired(real_model: Any) -> None:
    def shares(*values: float) -> dict[str, Estimate]:
        return dict.fromkeys(RECOVERED, mean_over_targets(Observation("t", str(i), v) for i, v in enumerate(values)))

    known = {ORIGINAL: shares(1, 1, 1, 1), REFERENCE: shares(0, 0, 0, 0), CHECKPOINT: shares(0, 0, 0, 0)}

    def attacked(*values: float) -> Any:
        after = known | {CHECKPOINT: shares(*values)}
        worst = Worst("prune", "all", 0.1, after, recoveries(after, known))
        return SimpleNamespace(known=known, attacks={"prune": {}}, worst={"prune": worst}, depth=None)

    lines = real_model.brought_back({"mine": attacked(1, 0, 0, 1), "theirs": attacked(1, 1, 1, 1)})
    assert [line.split("|")[1].strip() for line in lines if line.startswith("|")][2:] == [
        "mine, before any attack", "mine, prune", "theirs, before any attack", "theirs, prune",
    ]  # fmt: skip
    (line,) = [line for line in lines if line.startswith("-")]
    assert line.startswith("- prune, mine less theirs, of what came back: first -50.0 [-")
    low, high = re.findall(r"first -50.0 \[(.*?), (.*?)\]", line)[0]
    both, fewer = shares(1, 0, 0, 1), shares(1, 1, 1, 1)
    paired = combine(0, [both[RECOVERED[0]], fewer[RECOVERED[0]]], [1, -1]).stderr
    assert float(high) - float(low) == pytest.approx(100 * 2 * 1.96 * paired, abs=0.11)
    lines = real_model.brought_back({"mine": attacked(1, 0, 0, 1)})
    assert not [line for line in lines if line.startswith("-")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compat", "readme", "report", "smollm2", "startup"])
def test_help_says_what_a_script_does_and_does_nothing_else(name: str, tmp_path: Path) -> None:
    """``--help`` was once the folder of a model that was fetched, or began the run."""
    script = ROOT / "benchmarks" / f"{name}.py"
    done = subprocess.run([sys.executable, script, "--help"], cwd=tmp_path, capture_output=True, text=True)
    described = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    assert done.returncode == 0 and described in done.stdout and not [*tmp_path.iterdir()]
