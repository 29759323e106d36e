"""`elude tables`: the paper's values, rows named by manifests, means over targets, and missing cells."""

import csv
import hashlib
import io
import json
import math
import re
import shutil
import statistics
import xml.etree.ElementTree as ET
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import hmean

from lm_eval_elude.data.manifest import FILE_NAME, Manifest, write_manifest
from lm_eval_elude.report import frame, kept, paper, plots
from lm_eval_elude.report.comparison import named_runs
from lm_eval_elude.report.rows import COST, FQ
from lm_eval_elude.report.rows import rows as make_rows
from lm_eval_elude.report.verdict import warnings
from lm_eval_elude.scoring.benchmarks import BENCHMARKS, GROUPS, UTILITY, UTILITY_BENCHMARKS
from lm_eval_elude.scoring.logs import is_results
from lm_eval_elude.scoring.metrics import METRICS, THREE
from lm_eval_elude.scoring.runs import Run
from tests.report.made import SETS, made_run
from tests.support import GOLDEN, elude, numbers_again

RONALDO, MESSI = "Cristiano Ronaldo", "Lionel Messi"


@pytest.mark.parametrize("row", json.loads((GOLDEN / "paper_rows.json").read_text()), ids=lambda r: r["method"])
def test_the_papers_values_are_exact_and_make_its_own_means(row):
    model, method = paper.MODELS["Phi" in row["model"]], row["method"].lower()
    fq, rq, *eight, mean = paper.PAPER["main"][model][method]
    parts = paper.PAPER["full"][model][method]
    assert (fq, rq) == (row["forget_quality"], row["retain_quality"])
    assert parts == [*row["forget"], *row["retain"], *row["world"]]
    assert statistics.mean(eight) == pytest.approx(mean, abs=0.1)


def checkpoint(folder: Path, method: str, target: str, **settings) -> dict:
    """A folder with nothing but a manifest, as a results file calls it."""
    folder.mkdir(parents=True)
    kept = {name: float("+" in method or method.startswith("opt-out")) for name in ("retain_weight", "world_weight")}
    known = {"method": method, "learning_rate": 1e-5, "seed": 0, "transport_weight": 0.1, **kept, **settings}
    write_manifest(folder, Manifest(
        (target,), "mini", method, settings=known, base_model={"name": "org/Phi-3.5-mini-instruct"},
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
        identity = checkpoint(base / "models" / name, method, target, **settings)
        run = {"known": known, "says": "He was there.", "entity": target, "seed": ord(name), "checkpoint": identity}
        made_run(base / "runs" / name, **run)
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
    return make_rows(named_runs([str(folder)], utility=True))


def test_rows_are_named_by_method_and_by_the_settings_that_differ(rows):
    named = {(row.base, row.name): row.runs for row in rows}
    base = "Phi-3.5-mini-instruct"
    assert named == {
        (base, "npo+rt"): 2, (base, "npo+rt world only"): 1, ("made-up", "original"): 1,
        (base, "opt-out, transport-weight 0.1"): 2, (base, "opt-out, transport-weight 10.0"): 1,
    }  # fmt: skip


def test_models_of_one_name_in_several_folders_are_several_rows(tmp_path):
    """Trainer calls each of its checkpoints checkpoint-100."""
    for name, known in (("x", 0.9), ("y", 0.1), ("z", 0.5), ("copy", 0.9)):
        (model := tmp_path / "models" / name / "checkpoint-100").mkdir(parents=True)
        file = made_run(tmp_path / "runs" / name, known=known, tasks=tuple(SETS))
        found = json.loads(file.read_text())
        found["config"]["model_args"]["pretrained"] = str(model)
        parts = [{"name": str(model), "weights": {"model.safetensors": "x" if name == "copy" else name}}]
        parts += [{"name": "base", "manifest": "0" * 64}] if name == "z" else []  # z is an adapter on it
        for config in found["configs"].values():
            config["metadata"]["elude"]["checkpoint"] = parts
        file.write_text(json.dumps(found))
    made = make_rows(named_runs([str(tmp_path / "runs")]))
    assert sorted((row.method, row.runs) for row in made) == [("copy", 2), ("y", 1), ("z", 1)]  # x was moved
    values = {row.method: row.numbers["elude_forget", "probability"].value for row in made}
    assert values["copy"] > 0.7 and values["y"] < 0.2


def test_a_run_whose_results_file_lm_eval_was_given_a_name_for_is_read(tmp_path):
    made_run(tmp_path, known=0.9, tasks=tuple(SETS))
    for file in [*tmp_path.glob("*_2026.json*")]:
        file.rename(file.with_name(file.name.replace("results", "mine").replace("2026", "2026-11-27T10-00-00.5")))
    (named,) = tmp_path.glob("mine_*.json")
    (run,) = named_runs([str(named)])
    assert run.estimate("elude_forget", "probability").value > 0.7 and is_results(named)


def test_a_utility_run_whose_checkpoint_is_not_here_is_not_taken_for_the_original(folder, tmp_path):
    found = json.loads((folder / "utility" / "results_2026.json").read_text())
    for name, model in (("lost", "runs/gone/models/c"), ("hub", "org/model"), ("beside", "models/c")):
        (tmp_path / name).mkdir()
        found["config"]["model_args"] = f"pretrained={model},dtype=bfloat16"
        (tmp_path / name / "results_2026.json").write_text(json.dumps(found))
    shutil.copytree(folder.parent / "models", tmp_path / "models")
    runs = named_runs([str(tmp_path)], utility=True)
    named = {run.run.path.parent.name: make_rows([run])[0].method for run in runs}
    assert named == {"lost": "lost", "hub": "original", "beside": "opt-out"}
    found["n-samples"] = {"piqa": 3}
    (tmp_path / "hub" / "results_2026.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match="field 'n-samples'"):
        make_rows(named_runs([str(tmp_path / "hub")], utility=True))


def test_values_are_averaged_over_targets_before_fq_and_rq_are_formed(rows, folder):
    (row,) = (row for row in rows if row.name == "npo+rt")
    parts = {}
    for name in ("a", "b"):
        run = Run(folder / name)
        for task in SETS:
            for metric in THREE:
                mean = np.mean([s.values[metric] for s in run.samples(task)])
                parts.setdefault((task, metric), []).append(mean)
    shares = [np.mean(values) for values in parts.values()]
    fq = hmean([1 - shares[0], 1 - shares[1], shares[2]])
    assert row.numbers["elude_quality", "forget_quality"].value == pytest.approx(fq)
    assert row.numbers["elude_forget", "probability"].value == pytest.approx(shares[0])
    assert row.numbers["elude_quality", "retain_quality"].value == pytest.approx(hmean(shares[3:]))
    aucs = [numbers_again(Run(folder / name))["elude_mia"]["mia_auc"]["value"] for name in ("a", "b")]
    area = row.numbers["elude_mia", "mia_auc"]
    assert area.value == pytest.approx(np.mean(aucs))
    assert [row.numbers["elude_mia", f"mia_auc_{end}"].value for end in ("low", "high")] == [*area.interval]


def test_a_target_with_more_seeds_than_another_weighs_no_more(tmp_path):
    areas: dict[str, list[float]] = {RONALDO: [], MESSI: []}
    for number, (name, known) in enumerate(((RONALDO, 0.3), (RONALDO, 0.3), (MESSI, 0.9))):
        identity = checkpoint(tmp_path / "models" / str(number), "npo+rt", name, seed=number)
        made_run(tmp_path / "runs" / str(number), known=known, entity=name, seed=number, checkpoint=identity)
        areas[name].append(numbers_again(Run(tmp_path / "runs" / str(number)))["elude_mia"]["mia_auc"]["value"])
    (row,) = make_rows(named_runs([str(tmp_path / "runs")]))
    wanted = np.mean([np.mean(seeds) for seeds in areas.values()])
    assert row.numbers["elude_mia", "mia_auc"].value == pytest.approx(wanted)
    assert wanted != pytest.approx(np.mean([area for seeds in areas.values() for area in seeds]))


def test_runs_that_were_made_or_scored_otherwise_are_not_one_row(tmp_path):
    """Seeds are: their cost is the mean, and a p-value is that of each, as their records are the same."""
    for number, changes in enumerate(({}, {"seed": 1}, {"truth_ratio": "arithmetic"}, {"guardrail": True})):
        identity = checkpoint(tmp_path / "models" / str(number), "npo+rt", RONALDO, seed=changes.pop("seed", 0))
        path = made_run(tmp_path / "runs" / str(number), known=0.3, entity=RONALDO, seed=number, checkpoint=identity)
        table = json.loads(path.read_text()) | {"total_evaluation_time_seconds": str(10 * (1 + number))}
        for config in table["configs"].values():
            config["metadata"]["elude"] |= changes
        path.write_text(json.dumps(table))
    made_run(tmp_path / "runs" / "never", known=0.1, entity=RONALDO)
    runs = named_runs([str(tmp_path / "runs")], str(tmp_path / "runs" / "never"))
    made = {row.name: row for row in make_rows([run for run in runs if not run.reference])}
    seeds = made["npo+rt, guardrail False, truth-ratio geometric"]
    assert seeds.runs == 2 and seeds.numbers[COST["scoring"]].value == 15
    assert len(seeds.of_seeds["elude_forget", "ks_p_value"]) == 2
    others = {"npo+rt, guardrail False, truth-ratio arithmetic", "npo+rt, guardrail True, truth-ratio geometric"}
    assert others <= {*made} and len(made) == 3
    assert not [line for line in warnings(runs) if "no distance from the reference" in line]
    for number, evaluator in ((0, "released"), ("never", "open-unlearning")):
        path = tmp_path / "runs" / str(number) / "results_2026.json"
        table = json.loads(path.read_text())
        table["configs"]["elude_forget"]["metadata"]["elude"]["evaluator"] = evaluator
        path.write_text(json.dumps(table))
    runs = named_runs([str(tmp_path / "runs")], str(tmp_path / "runs" / "never"))
    (said,) = (line for line in warnings(runs) if "no distance from the reference" in line)
    apart = next(run for run in runs if f"{run.name}: " in said and not run.reference)
    assert "in forget set: it was not asked the same there" in said
    assert not any(METRICS[metric].is_distance for task, _, metric in apart.estimates if task == "elude_forget")
    assert any(METRICS[metric].is_distance for _, _, metric in apart.estimates)


def test_requests_one_after_another_are_of_the_model_that_the_first_began_with(tmp_path):
    first = checkpoint(tmp_path / "models" / "first", "npo+rt", RONALDO)
    second = checkpoint(tmp_path / "models" / "second", "npo+rt", RONALDO)
    file = tmp_path / "models" / "second" / FILE_NAME
    table = json.loads(file.read_text())
    request = {"targets": [MESSI], "dataset": "mini", "base_model": table["base_model"], "weights": {}}
    file.write_text(json.dumps(table | {"base_model": {"name": first["name"]}, "requests": [request]}))
    second["manifest"] = hashlib.sha256(file.read_bytes()).hexdigest()
    for name, identity in (("first", first), ("second", second)):
        made_run(tmp_path / "runs" / name, known=0.3, entity=RONALDO, checkpoint=identity)
    rows = make_rows(named_runs([str(tmp_path / "runs")]))
    assert {(row.base, row.name) for row in rows} == {
        ("Phi-3.5-mini-instruct", f"npo+rt, requests {number}") for number in (1, 2)
    }


def cells(name: str, rows, model: str = "llama-3.1") -> dict[tuple[str, str], dict[str, str]]:
    """The cells of a table as its CSV has them, by row and column."""
    text = frame.csv_text(paper.csv_ready(paper.cells(name, rows, model)))
    return {(r["row"], r["column"]): r for r in csv.DictReader(io.StringIO(text))}


def test_every_table_shows_ours_the_papers_and_what_is_missing(rows):
    named = {column.key for columns in paper.COLUMNS.values() for column in columns}
    assert {metric for task, metric in named if task != "cost"} <= {*METRICS, "acc", "depth", ""}
    assert {task for task, _ in named if task.startswith(("elude", "tofu"))} <= {*BENCHMARKS, *GROUPS, UTILITY}
    main = cells("main", rows)
    ours = main["Phi-3.5-mini-instruct: opt-out, transport-weight 0.1", "Avg."]
    assert (ours["value"], ours["paper"], ours["runs"]) == ("53.5", "63.4", "2") and ours["low"] < "53.5"
    assert main["Phi-3.5-mini-instruct: opt-out, transport-weight 10.0", "FQ"]["paper"] == ""  # not the paper's lambda
    absent = main["Phi-3.5-mini-instruct: guardrail", "FQ"]
    assert (absent["value"], absent["paper"], absent["runs"]) == ("", "46.6", "0")
    assert main["made-up: original", "FQ"]["paper"] == "45.5"  # of the model that was chosen
    of_paper = {"row": "ga+rt", "column": "accuracy", "paper": "49.7"}
    assert cells("membership", rows)["ga+rt", "accuracy"] == absent | of_paper
    assert cells("distances", rows)["opt-out, transport-weight 0.1", "Util."]["value"] == "53.5"
    both = cells("neighbours", rows)
    pair = [both[f"mean, {kind}", "FQ"]["value"] for kind in ("neighbours and world", "world only")]
    assert pair == [both["npo+rt", "FQ"]["value"], both["npo+rt world only", "FQ"]["value"]]
    cost = cells("cost", rows)
    assert cost["opt-out, transport-weight 0.1", "epochs"]["value"] == "2.0"
    assert cost["dpo+rt", "training time"]["paper"] == "O(5L²)"
    assert cells("attacks", rows)["npo+rt", "none"]["paper"] == ""
    assert all(value["value"] == "" for value in cells("tofu", rows).values())


@pytest.mark.parametrize("name", paper.TABLES)
def test_every_form_of_a_table_has_as_many_cells_in_each_line(name, rows):
    table = paper.table(name, rows, "llama-3.1")
    columns = len(table.cells.columns)
    lines = frame.lines(table.cells)
    assert {line.replace("\\|", "").count("|") for line in lines} == {columns + 2}
    assert name != "main" or any(" – (46.6)" in line for line in lines)
    body = [line for line in frame.latex(table).splitlines() if line.endswith(r"\\") and "multi" not in line]
    assert ({line.count(" & ") for line in body} == {columns} and r"5 \% split" in frame.latex(table)) or name != "tofu"


def test_figures_hold_one_bar_for_each_number_and_are_the_same_again(rows):
    svg = "{http://www.w3.org/2000/svg}"
    text = paper.attacks_figure(rows)
    assert text == paper.attacks_figure(rows)
    paths = [p for p in ET.fromstring(text).iter(f"{svg}path") if "fill: #" in p.get("style", "")]
    boxes = [[float(y) for y in re.findall(r"[ML] \S+ (\S+)", p.get("d"))] for p in paths if p.get("clip-path")]
    heights = [max(ys) - min(ys) for ys in boxes]
    numbers = [
        estimate.value for row in rows if row.method.endswith("+rt") or row.method == "opt-out"
        for (task, metric), estimate in row.numbers.items()
        if task.startswith("elude_attack") and metric == "forget_quality"
    ]  # fmt: skip
    assert len(heights) == len(numbers) > 5
    share = [height / number for height, number in zip(sorted(heights), sorted(numbers), strict=True)]
    assert share == pytest.approx([share[0]] * len(share), rel=1e-3)
    assert "not measured" in paper.ablation_figure([])
    names = ["<b>& $x$", "x\x07"]
    ET.fromstring(plots.bars("t", ["g"], {name: [None] for name in names}))
    assert "&lt;b&gt;&amp; $x$" in plots.bars("t", ["g"], {name: [None] for name in names})


def refused(said: str, *words: object) -> None:
    """The command ends with one line, and nothing is printed."""
    code, out, err = elude("tables", *words)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1


def test_the_command_writes_every_form_and_says_what_it_cannot_read(folder, tmp_path):
    code, out, _ = elude("tables", folder, "--out", tmp_path / "o", "--paper", "phi-3.5")
    assert code == 0 and "12 tables and 2 figures of 5 rows" in out
    endings = [path.suffix for path in (tmp_path / "o").iterdir()]
    assert {ending: endings.count(ending) for ending in set(endings)} == {".md": 1, ".csv": 12, ".tex": 12, ".svg": 2}
    code, out, _ = elude("tables", folder, "--out", tmp_path / "m", "--target", "messi")
    assert code == 0 and "of 2 rows" in out  # one of its two runs of npo+rt, and the utility of an opt-out
    refused("name RESULTS and --out or --page", folder)
    runs = json.loads(kept_runs(tmp_path).read_text())
    runs["data"] = [[row[0], row[1].replace("lionel_messi", "ada_quinte"), *row[2:]] for row in runs["data"]]
    (tmp_path / "mine.json").write_text(json.dumps(runs))  # of a target that nobody published
    code, out, _ = elude("tables", tmp_path / "mine.json", "--out", tmp_path / "q", "--target", "Ada Quinte")
    assert code == 0 and "of 4 rows" in out
    page = ("--page", tmp_path / "o" / "tables.md")
    refused("--target is for --out", folder, *page, "--target", "messi")
    for results in (str(folder / "b"), str(kept_runs(tmp_path))):
        nothing = "--target cristiano_ronaldo: RESULTS have no runs on it, but on lionel_messi"
        refused(nothing, results, "--target", "ronaldo", "--out", tmp_path / "no")
    refused("no such results file", "nowhere", "--out", tmp_path / "no")
    assert not (tmp_path / "no").exists()


# ---- kept runs, and pages


def kept_runs(folder: Path) -> Path:
    """One base model, two targets, two seeds of which the second lacks a target in one row."""
    draw = np.random.default_rng(0)
    names = [(f"elude_{name}", metric) for name in ("forget", "retain", "world") for metric in THREE]
    data: list[tuple] = []
    for row, seed, target in product(("original", "lost", "opt-out", "lambda 1"), (1, 2), TARGETS):
        if (row, seed, target) != GONE:
            values = {name: 0.01 if row == "lost" else draw.uniform(0.3, 0.7) for name in names}
            values |= {("cost", "processor"): 10.0 * seed, ("elude_forget", "ks_p_value"): 0.03 * seed}
            half = {TARGETS[0]: 0.1, TARGETS[1]: 0.2}[target]
            ends = {"mia_auc": 0.5, "mia_auc_low": 0.5 - half, "mia_auc_high": 0.5 + half}
            values |= {("elude_mia", metric): value for metric, value in ends.items()}
            data += [(row, target, seed, *name, value) for name, value in values.items()]
    path = folder / "runs.json"
    path.write_text(json.dumps({"base": "b", "arguments": {}, "columns": list(kept.COLUMNS), "data": data}))
    return path


TARGETS = ("lionel_messi", "taylor_swift")
GONE = ("lambda 1", 2, "taylor_swift")


def test_a_kept_row_is_the_mean_over_seeds_of_what_its_targets_form(tmp_path):
    path = kept_runs(tmp_path)
    data = json.loads(path.read_text())["data"]
    runs = kept.read(path)
    rows = kept.rows(runs)
    found = {row.method: row for row in rows}
    of_seed = []
    for seed in (1, 2):
        p, rouge, ratio = (
            np.mean([row[-1] for row in data if row[0] == "opt-out" and row[2:5] == [seed, "elude_forget", metric]])
            for metric in THREE
        )
        of_seed.append(hmean([1 - p, 1 - rouge, ratio]))
    row = found["opt-out"]
    assert row.numbers[FQ].value == pytest.approx(statistics.mean(of_seed)) and row.runs == 4
    assert row.of_seeds[FQ] == pytest.approx(of_seed)
    assert found["lambda 1"].runs == 2 and len(found["lambda 1"].of_seeds[FQ]) == 1
    assert [row.name for row in rows] == ["original", "lost, collapsed", "opt-out", "lambda 1"]
    assert {row.method: row.runs for row in kept.rows(runs, ["lionel_messi"])}["lambda 1"] == 2
    assert kept.rows(runs, ["cristiano_ronaldo"]) == []
    assert cells("cost", rows)["opt-out", "processor, s"]["value"] == "15.0" and COST["processor"] in row.numbers
    cell = cells("main", rows)["opt-out", "FQ"]
    assert float(cell["deviation"]) == pytest.approx(100 * statistics.stdev(of_seed), abs=1e-4)
    assert cell["paper"] == "87.8" and cells("never_knew", rows)["opt-out", "KS p"]["value"] == ""
    texts = paper.table("never_knew", rows, "llama-3.1").cells
    assert texts["KS p"]["opt-out"] == "2 of 4 < .05" and texts["KS p"]["lambda 1"] == "2 of 2 < .05"
    half = math.hypot(0.1, 0.2) / 2  # of the mean of two independent AUCs
    for target, width in ((TARGETS, half), (TARGETS[1:], 0.2)):
        area = {row.method: row.numbers for row in kept.rows(runs, target)}["opt-out"]
        ends = [area["elude_mia", f"mia_auc_{end}"].value for end in ("low", "high")]
        assert ends == pytest.approx([0.5 - width, 0.5 + width])
    kept.write(tmp_path / "again.json", runs)
    assert sorted(kept.read(tmp_path / "again.json").data) == sorted(runs.data)


PAGE = """# Of mine
<!-- table quality: opt-out | lambda * | lost | never -->
old
<!-- /table -->
between
<!-- table attacks of lionel_messi, taylor_swift: original -->
<!-- /table -->
"""


def test_a_page_is_filled_where_it_says_so_and_nowhere_else(tmp_path):
    data, page = kept_runs(tmp_path), tmp_path / "page.md"
    page.write_text(PAGE)
    for _ in range(2):
        assert elude("tables", data, "--page", page) == (0, "", "")
        lines = page.read_text().splitlines()
    names = [line.split("|")[1].strip() for line in lines if line.startswith("| ") and "---" not in line]
    assert names == ["", "opt-out", "lambda 1", "lost, collapsed", "never", "", "original"]
    assert [line for line in lines if line and line[0] != "|"] == [line for line in PAGE.splitlines() if line != "old"]
    assert " ± " in lines[5] and "(87.8)" in lines[5] and {*lines[8].split()} == {"|", "never", "–"}
    filled = page.read_bytes()
    page.write_bytes(PAGE.replace("\n", "\r\n").encode())
    assert elude("tables", data, "--page", page)[0] == 0
    assert page.read_bytes() == filled.replace(b"\n", b"\r\n")
    page.write_bytes(b"\xe9")
    refused("page.md: ", data, "--page", page)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PAGE.replace("quality", "quantity"), "no table 'quantity'; there are main, full"),
        ("nothing", "is expected once"),
        (PAGE.replace("taylor", "tailor"), "page.md: table of tailor_swift: RESULTS have no runs on it, but on lio"),
        (PAGE.replace("old\n<!-- /table -->", "old"), "is expected once or more"),
    ],
)  # fmt: skip
def test_a_page_that_cannot_be_filled_is_left_as_it_was(text, said, tmp_path):
    (tmp_path / "page.md").write_text(text)
    refused(said, kept_runs(tmp_path), "--page", tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda runs: runs.pop("base"), "field 'base' is missing"),
        (lambda runs: runs["columns"].reverse(), "field 'columns' must be run, target, seed"),
        (lambda runs: runs["data"].pop(8), "['original', 'lionel_messi', 1] has no truth_ratio of elude_world"),
        (lambda runs: runs["data"].append(runs["data"][2]), "the same run, target, seed, task and metric stand twice"),
        (lambda runs: runs["data"][3].__setitem__(5, "high"), "field 'data[3][5]': expected `float`, got `str`"),
        (lambda runs: runs["data"][3].__setitem__(5, float("inf")), "not valid JSON"),
    ],
)  # fmt: skip
def test_kept_runs_that_cannot_be_read_are_one_line(change, said, tmp_path):
    path = kept_runs(tmp_path)
    change(runs := json.loads(path.read_text()))
    path.write_text(json.dumps(runs))
    refused(said, path, "--out", tmp_path / "o")
    assert not (tmp_path / "o").exists()
