"""Three small runs, from their logs to the page: the numbers that it shows are those of the samples."""

import csv
import json
import re
import shutil

import pytest

from lm_eval_elude.data import bundled
from lm_eval_elude.report.frame import read_models
from lm_eval_elude.report.verdicts import judge_models
from lm_eval_elude.stress.table import FILE, Row, append
from lm_eval_elude.tasks.runs import Run
from tests.browser import BROWSER, Browser
from tests.support import elude, run, small_data, taught_to_refuse, write_run

RONALDO, RECORDS = "Cristiano Ronaldo", 24


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Results files of the original model, of one that was taught to refuse, and of the retrained model."""
    folder = tmp_path_factory.mktemp("runs")
    data = small_data(folder / "data", {RONALDO: RECORDS}, retain=4, world=4)
    refusing = taught_to_refuse(folder / "refusing", RONALDO, RECORDS)
    models = {"original": bundled.MODEL, "refusing": refusing, "retrained": bundled.REFERENCE}
    tasks = ("elude_forget", "elude_retain", "elude_world", "elude_cloze")
    written = {}
    for name, place in models.items():
        about = {"pretrained": str(place), "target": RONALDO, "dataset": str(data)}
        found = run(tasks, "elude", metadata=about, log_samples=True)
        written[name] = write_run(found, folder / "out" / name)
    return written


def given(runs):
    return [*(f"{name}={path}" for name, path in runs.items()), "--original", "original", "--reference", "retrained"]


def attacks(runs, folder, share):
    """A table in which both attacked models keep their utility and the checkpoint knows a share of the facts."""
    records = [sample.record for sample in Run(runs["original"]).samples["elude_forget"]]
    rows = []
    for attack, step in (("none", 0.0), ("relearn_half", 5.0)):
        for role in ("checkpoint", "retrained"):
            knows = share * (attack != "none" and role == "checkpoint")
            rows += [Row(attack, "", step, role, r, "mc_accuracy", float(i < knows * RECORDS))
                     for i, r in enumerate(records)]  # fmt: skip
            rows.append(Row(attack, "", step, role, "", "retain_quality", 0.7))
    append(folder / FILE, rows)
    return folder / FILE


def test_the_tables_have_the_numbers_of_the_samples_and_a_verdict(runs, tmp_path):
    files = {kind: tmp_path / f"table.{kind}" for kind in ("csv", "markdown", "latex")}
    flags = [part for kind, file in files.items() for part in (f"--{kind}", file)]
    done = elude("report", *given(runs), *flags, "--out", tmp_path / "page.html")
    assert done.code == 0, done.err
    assert max(map(len, done.out.splitlines())) <= 100
    with files["csv"].open(encoding="utf-8") as file:
        rows = {(row["model"], row["task"], row["metric"]): row for row in csv.DictReader(file) if not row["target"]}
    for name, path in runs.items():
        assert not Run(path).mismatches()
        for task, numbers in Run(path).numbers.items():
            for metric, number in numbers.items():
                assert float(rows[name, task, metric]["value"]) == pytest.approx(number.value, nan_ok=True)
    ours, theirs = (float(rows[n, "elude_forget", "mc_accuracy"]["value"]) for n in ("refusing", "retrained"))
    assert float(rows["refusing", "elude_forget", "mc_accuracy_gap"]["value"]) == pytest.approx(ours - theirs)
    assert files["markdown"].read_text().count("\n") == 2 + len(runs)
    assert r"\toprule" in files["latex"].read_text() and "not forgotten" in files["latex"].read_text()
    assert re.search(r"refusing +NOT FORGOTTEN: choice \d+ %, retrained \d+ %", done.out)


@pytest.mark.parametrize(("share", "verdict"), [(0.0, "forgotten"), (0.9, "suppressed")])
def test_recovery_is_judged_beside_the_retrained_model(share, verdict, runs, tmp_path):
    """The retrained model in the place of a checkpoint, and attacks that bring back nothing, or nearly all."""
    places = [f"original={runs['original']}", f"mine={runs['retrained']}", f"retrained={runs['retrained']}"]
    models = read_models(places, "retrained", "original")
    rows = judge_models(models, [str(attacks(runs, tmp_path, share))])
    assert models[1].verdict == verdict and "recovery after attacks" in models[1].reason
    assert [row["attack"] for row in rows] == ["relearn_half"]


def test_a_run_with_numbers_that_are_not_finite_is_broken_and_the_page_stays_whole(runs, tmp_path):
    folder = shutil.copytree(runs["refusing"].parent, tmp_path / "broken")
    for file in folder.glob("samples_*.jsonl"):
        text = re.sub(r'("answer_scores": \[\[)-?[\d.e-]+', r"\1NaN", file.read_text(encoding="utf-8"))
        file.write_text(text, encoding="utf-8")
    done = elude("report", *given(runs | {"refusing": folder}), "--out", tmp_path / "page.html")
    assert done.code == 0 and "BROKEN: its log-probabilities are not finite" in done.out
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    data = re.search(r'<script type="text/plain" id="data">(.*?)</script>', page, re.DOTALL)
    json.loads(data[1], parse_constant=lambda name: pytest.fail(name))


def test_names_that_are_not_there_are_one_line(runs, tmp_path):
    for flags, line in (
        (["--original", "x"], "--original x is none of original, refusing, retrained"),
        (["--stress", "x=y"], "--stress x=y: name an unlearned model"),
        (["--stress", "y"], "--stress y: no such file"),
    ):
        done = elude("report", *given(runs), *flags, "--out", tmp_path / "page.html")
        assert done.code == 2 and line in done.err


@pytest.mark.skipif(not BROWSER, reason="no Chromium")
def test_the_page_in_a_browser(runs, tmp_path):
    page = tmp_path / "page.html"
    assert elude("report", *given(runs), "--out", page).code == 0
    browser = Browser(tmp_path / "profile")
    try:
        for width, dark in ((1280, False), (390, True)):
            browser.open(page, width=width, dark=dark)
            assert browser.ask("document.documentElement.scrollWidth") <= width  # nothing is cut
            assert browser.ask("document.querySelectorAll('article').length") >= 1
            browser.ask("document.querySelector('#list + button, #answers button').click()")
            assert browser.ask("document.querySelectorAll('article').length") > 1
            assert not browser.errors and all(address.startswith("file:") for address in browser.requests)
    finally:
        browser.close()
