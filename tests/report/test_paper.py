"""`elude tables`: the paper's values, rows named by manifests, means over targets, and missing cells."""

import csv
import hashlib
import io
import json
import shutil
import statistics
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import hmean

from lm_eval_elude.cli import main
from lm_eval_elude.data.manifest import FILE_NAME, Manifest, write_manifest
from lm_eval_elude.report import kept, paper, paper_files
from lm_eval_elude.report.comparison import named_runs
from lm_eval_elude.scoring.benchmarks import UTILITY_BENCHMARKS
from lm_eval_elude.scoring.runs import Run
from optout_train.config import build_config
from tests.report.made import SETS, made_run
from tests.support import GOLDEN

RONALDO, MESSI = "Cristiano Ronaldo", "Lionel Messi"


@pytest.mark.parametrize("row", json.loads((GOLDEN / "paper_rows.json").read_text()), ids=lambda r: r["method"])
def test_the_papers_values_are_exact_and_make_its_own_means(row):
    model, method = paper.MODELS["Phi" in row["model"]], row["method"].lower()
    fq, rq, *eight, mean = paper.PAPER["main"][model][method]
    parts = paper.PAPER["full"][model][method]
    assert (fq, rq) == (row["forget_quality"], row["retain_quality"])
    assert parts == [*row["forget"], *row["retain"], *row["world"]]
    shares = np.array(parts) / 100
    assert 100 * hmean([1 - shares[0], 1 - shares[1], shares[2]]) == pytest.approx(fq, abs=0.13)
    assert (100 * hmean(shares[3:]) if shares[3:].all() else 0) == pytest.approx(rq, abs=0.13)
    assert statistics.mean(eight) == pytest.approx(mean, abs=0.1)


def checkpoint(folder: Path, method: str, target: str, **settings) -> dict:
    """A folder with nothing but a manifest, as a results file calls it."""
    folder.mkdir(parents=True)
    known = build_config({"target": (target,), "method": method, "model": "org/Phi-3.5-mini-instruct", **settings})
    write_manifest(folder, Manifest(
        (target,), "mini", method, settings=known.to_json(), base_model={"name": known.model},
        epochs=[{"epoch": 0}, {"epoch": 2}],
    ))  # fmt: skip
    return {"name": str(folder), "manifest": hashlib.sha256((folder / FILE_NAME).read_bytes()).hexdigest()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("paper")
    jobs = [
        ("a", "npo+rt", RONALDO, 0.3, {}), ("b", "npo+rt", MESSI, 0.1, {"seed": 1}),
        ("c", "opt-out", RONALDO, 0.2, {}), ("d", "opt-out", RONALDO, 0.4, {"transport_weight": 10.0}),
        ("e", "npo+rt", RONALDO, 0.2, {"retain_weight": 0.0}),
    ]  # fmt: skip
    for name, method, target, known, settings in jobs:
        said = checkpoint(base / "models" / name, method, target, **settings)
        made_run(
            base / "runs" / name, known=known, says="He was there.", entity=target, seed=ord(name), checkpoint=said
        )
    made_run(base / "runs" / "original", known=0.9, tasks=tuple(SETS))
    found = json.loads((base / "runs" / "a" / "results_2026.json").read_text())
    rows = {
        task: {"acc,none": 0.5 + i / 100, "acc_stderr,none": 0.01} for i, task in enumerate(UTILITY_BENCHMARKS.values())
    }
    found |= {
        "results": {**rows, "elude_utility": {"acc,none": 0.535, "acc_stderr,none": 0.004, "sample_len": 80}},
        "configs": {task: {} for task in rows}, "n-samples": {task: {"effective": 10} for task in rows},
        "config": {"model_args": {"pretrained": str(base / "models" / "c")}, "model_num_parameters": 3_800_000},
        "total_evaluation_time_seconds": "61.5",
    }  # fmt: skip
    (base / "runs" / "utility").mkdir()
    (base / "runs" / "utility" / "results_2026.json").write_text(json.dumps(found))
    return base / "runs"


@pytest.fixture(scope="module")
def rows(folder):
    return paper.rows(named_runs([str(folder)], utility=True))


def test_rows_are_named_by_method_and_by_the_settings_that_differ(rows):
    named = {(row.base, row.name): row.runs for row in rows}
    base = "Phi-3.5-mini-instruct"
    assert named == {
        (base, "npo+rt"): 2, (base, "npo+rt world only"): 1, ("made-up", "original"): 1,
        (base, "opt-out, transport-weight 0.1"): 2, (base, "opt-out, transport-weight 10.0"): 1,
    }  # fmt: skip


def test_a_utility_run_whose_checkpoint_is_not_here_is_not_taken_for_the_original(folder, tmp_path):
    found = json.loads((folder / "utility" / "results_2026.json").read_text())
    for name, model in (("lost", "runs/gone/models/c"), ("hub", "org/model"), ("beside", "models/c")):
        (tmp_path / name).mkdir()
        found["config"]["model_args"] = f"pretrained={model},dtype=bfloat16"
        (tmp_path / name / "results_2026.json").write_text(json.dumps(found))
    shutil.copytree(folder.parent / "models", tmp_path / "models")
    named = {run.name: paper.rows([run])[0].method for run in named_runs([str(tmp_path)], utility=True)}
    assert named == {"lost": "lost", "hub": "original", "beside": "opt-out"}
    found["n-samples"] = {"piqa": 3}
    (tmp_path / "hub" / "results_2026.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match="field 'n-samples'"):
        paper.rows(named_runs([str(tmp_path / "hub")], utility=True))


def test_values_are_averaged_over_targets_before_fq_and_rq_are_formed(rows, folder):
    (row,) = (row for row in rows if row.name == "npo+rt")
    parts = {}
    for name in ("a", "b"):
        run = Run(folder / name)
        for task in SETS:
            for metric in ("probability", "rougeL_recall", "truth_ratio"):
                mean = np.mean([s.values[metric] for s in run.samples(task)])
                parts.setdefault((task, metric), []).append(mean)
    shares = [np.mean(values) for values in parts.values()]
    fq = hmean([1 - shares[0], 1 - shares[1], shares[2]])
    assert row.numbers["elude_quality", "forget_quality"].value == pytest.approx(fq)
    assert row.numbers["elude_forget", "probability"].value == pytest.approx(shares[0])
    assert row.numbers["elude_quality", "retain_quality"].value == pytest.approx(hmean(shares[3:]))
    aucs = [Run(folder / name).numbers["elude_mia"]["mia_auc"]["value"] for name in ("a", "b")]
    assert row.numbers["elude_mia", "mia_auc"].value == pytest.approx(np.mean(aucs))


def cells(table) -> dict[tuple[str, str], dict[str, str]]:
    return {(r["row"], r["column"]): r for r in csv.DictReader(io.StringIO(paper_files.csv_text(table)))}


def test_every_table_shows_ours_the_papers_and_what_is_missing(rows):
    made = {table.name: table for table in (make(rows, "llama-3.1") for make in paper.TABLES.values())}
    assert set(made) == set(paper.PAPER["where"])
    main = cells(made["main"])
    ours = main["Phi-3.5-mini-instruct: opt-out, transport-weight 0.1", "Avg."]
    assert (ours["value"], ours["paper"], ours["runs"]) == ("53.5000", "63.4", "2") and ours["low"] < "53.5"
    assert main["Phi-3.5-mini-instruct: opt-out, transport-weight 10.0", "FQ"]["paper"] == ""  # not the paper's lambda
    absent = main["Phi-3.5-mini-instruct: guardrail", "FQ"]
    assert (absent["value"], absent["paper"], absent["runs"]) == ("", "46.6", "0")
    assert main["made-up: original", "FQ"]["paper"] == "45.5"  # of the model that was chosen
    assert cells(made["membership"])["ga+rt", "accuracy"] == absent | {
        "row": "ga+rt", "column": "accuracy", "paper": "49.7"
    }  # fmt: skip
    assert cells(made["distances"])["opt-out, transport-weight 0.1", "Util."]["value"] == "53.5000"
    both = cells(made["neighbours"])
    pair = [both[f"mean, {kind}", "FQ"]["value"] for kind in ("neighbours and world", "world only")]
    assert pair == [both["npo+rt", "FQ"]["value"], both["npo+rt world only", "FQ"]["value"]]
    assert cells(made["cost"])["opt-out, transport-weight 0.1", "epochs"]["value"] == "2"
    assert cells(made["cost"])["dpo+rt", "training time"]["paper"] == "O(5L²)"
    assert cells(made["attacks"])["npo+rt", "none"]["paper"] == ""
    assert all(value["value"] == "" for value in cells(made["tofu"]).values())
    text = paper_files.markdown(list(made.values()))
    assert "| – (46.6) " in text or " – (46.6) |" in text
    for line in text.splitlines():
        assert not line.startswith("|") or line.endswith("|")
    for table in made.values():
        body = [line for line in paper_files.latex(table).splitlines() if line.endswith(r"\\") or "midrule" in line]
        assert {line.count(" & ") for line in body} == {len(table.head) + 1}


def test_figures_hold_one_bar_for_each_number(rows):
    table = paper.attacks(rows, "llama-3.1")
    svg = "{http://www.w3.org/2000/svg}"
    root = ET.fromstring(paper_files.attacks_figure(rows, "llama-3.1"))
    shown = [entry for name, entries, _ in table.rows if "world only" not in name for entry in entries]
    heights = [float(r.get("height")) for r in root.iter(f"{svg}rect") if r.get("height") not in ("12", "100%")]
    numbers = [entry.ours.value for entry in shown if entry.ours]
    assert sorted(heights) == pytest.approx(sorted(220 * n for n in numbers), abs=0.06) and len(numbers) > 5
    empty = ET.fromstring(paper_files.ablation_figure([], "llama-3.1"))
    assert "not measured" in [text.text for text in empty.iter(f"{svg}text")]
    names = ["<b>&", "x"]
    assert "<b>&" in [
        t.text for t in ET.fromstring(paper_files.bars("t", ["g"], {name: [None] for name in names})).iter()
    ]


def run(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["elude", "tables", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code, *capsys.readouterr()


def test_the_command_writes_every_form_and_says_what_it_cannot_read(folder, tmp_path, monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, str(folder), "--out", str(tmp_path / "o"), "--paper", "phi-3.5")
    assert code == 0 and "11 tables and 2 figures of 5 rows" in out
    endings = [path.suffix for path in (tmp_path / "o").iterdir()]
    assert {ending: endings.count(ending) for ending in set(endings)} == {".md": 1, ".csv": 11, ".tex": 11, ".svg": 2}
    code, out, _ = run(monkeypatch, capsys, str(folder), "--out", str(tmp_path / "m"), "--target", "messi")
    assert code == 0 and "of 2 rows" in out  # one of its two runs of npo+rt, and the utility of an opt-out
    for words, said in (
        ([str(folder)], "name RESULTS and --out or --page"),
        (["nowhere", "--out", str(tmp_path / "no")], "no such results file"),
    ):  # fmt: skip
        code, out, err = run(monkeypatch, capsys, *words)
        assert (code, out) == (2, "") and said in err and err.count("\n") == 1
    assert not (tmp_path / "no").exists()


# ---- kept runs, and pages


def kept_runs(folder: Path) -> Path:
    """One base model, two targets, two seeds of which the second lacks a target in one row."""
    draw = np.random.default_rng(0)
    names = [
        f"elude_{s}/{m}" for s in ("forget", "retain", "world") for m in ("probability", "rougeL_recall", "truth_ratio")
    ]
    runs = [
        {"row": row, "target": target, "seed": seed, "arguments": ["--x"], "base": "b", "seconds": 10 * seed,
         "values": {name: draw.uniform(0.3, 0.7) if row != "lost" else 0.01 for name in names}}
        for row in ("original", "lost", "opt-out", "lambda 1")
        for seed in (1, 2) for target in ("lionel_messi", "taylor_swift")
    ]  # fmt: skip
    path = folder / "runs.json"
    path.write_text(json.dumps([run for run in runs if (run["row"], run["seed"], run["target"]) != GONE]))
    return path


GONE = ("lambda 1", 2, "taylor_swift")


def test_a_kept_row_is_the_mean_over_seeds_of_what_its_targets_form(tmp_path):
    path = kept_runs(tmp_path)
    runs = json.loads(path.read_text())
    found = {row.method: row for row in kept.rows(kept.read(path))}
    of_seed = []
    for seed in (1, 2):
        own = [run["values"] for run in runs if run["row"] == "opt-out" and run["seed"] == seed]
        p, rouge, ratio = (
            np.mean([v[f"elude_forget/{m}"] for v in own]) for m in ("probability", "rougeL_recall", "truth_ratio")
        )
        of_seed.append(hmean([1 - p, 1 - rouge, ratio]))
    row = found["opt-out"]
    assert row.numbers[paper.FQ].value == pytest.approx(statistics.mean(of_seed))
    assert row.spread[paper.FQ] == pytest.approx(statistics.stdev(of_seed)) and row.runs == 4
    assert found["lambda 1"].runs == 2 and paper.FQ not in found["lambda 1"].spread
    assert [row.name for row in found.values()] == ["original", "lost, collapsed", "opt-out", "lambda 1"]
    assert {row.method: row.runs for row in kept.rows(kept.read(path), ["lionel_messi"])}["lambda 1"] == 2
    assert cells(paper.cost(list(found.values()), "llama-3.1"))["opt-out", "training, s"]["value"] == "15"
    table = cells(paper.TABLES["main"](list(found.values()), "llama-3.1"))["opt-out", "FQ"]
    assert float(table["deviation"]) == pytest.approx(100 * row.spread[paper.FQ], abs=1e-4) and table["paper"] == "87.8"


PAGE = """# Of mine
<!-- table quality: opt-out | lambda * | lost | never -->
old
<!-- /table -->
between
<!-- table attacks of lionel_messi, taylor_swift: original -->
<!-- /table -->
"""


def test_a_page_is_filled_where_it_says_so_and_nowhere_else(tmp_path, monkeypatch, capsys):
    data, page = kept_runs(tmp_path), tmp_path / "page.md"
    page.write_text(PAGE)
    for _ in range(2):
        assert run(monkeypatch, capsys, str(data), "--page", str(page)) == (0, "", "")
        lines = page.read_text().splitlines()
    names = [line.split("|")[1].strip() for line in lines if line.startswith("| ") and "---" not in line]
    assert names == ["", "opt-out", "lambda 1", "lost, collapsed", "never", "", "original"]
    assert [line for line in lines if line and line[0] != "|"] == [line for line in PAGE.splitlines() if line != "old"]
    assert " ± " in lines[5] and "(87.8)" in lines[5] and {*lines[8].split()} == {"|", "never", "–"}
    code, out, _ = run(monkeypatch, capsys, str(data), "--target", "messi", "--out", str(tmp_path / "o"))
    assert code == 0 and "tables and 2 figures of 4 rows" in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PAGE.replace("quality", "quantity"), "no table 'quantity'; there are main, full"),
        ("nothing", "is expected once"),
        (PAGE.replace("old\n<!-- /table -->", "old"), "is expected once or more"),
    ],
)  # fmt: skip
def test_a_page_that_cannot_be_filled_is_left_as_it_was(text, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "page.md").write_text(text)
    code, out, err = run(monkeypatch, capsys, str(kept_runs(tmp_path)), "--page", str(tmp_path / "page.md"))
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1
    assert (tmp_path / "page.md").read_text() == text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda runs: runs[0].pop("seed"), "run 1: field 'seed' is missing"),
        (lambda runs: runs[1]["values"].pop("elude_world/truth_ratio"), "run 2: field 'values' has no 'elude_world/tr"),
        (lambda runs: runs.append(runs[2]), "run 16: the same row, target, seed and base as run 3"),
        (lambda runs: runs[3]["values"].update({"elude_mia/mia_auc": "high"}), "expected `float`, got `str`"),
    ],
)  # fmt: skip
def test_kept_runs_that_cannot_be_read_are_one_line(change, said, tmp_path, monkeypatch, capsys):
    path = kept_runs(tmp_path)
    change(runs := json.loads(path.read_text()))
    path.write_text(json.dumps(runs))
    code, out, err = run(monkeypatch, capsys, str(path), "--out", str(tmp_path / "o"))
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1 and not (tmp_path / "o").exists()
