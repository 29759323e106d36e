"""From the command line to a forgotten Ronaldo: the whole path on the bundled model, as a newcomer takes it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lm_eval_elude.data.files import file_hashes
from lm_eval_elude.data.manifest import read_manifest
from tests.support import ROOT, run

pytestmark = pytest.mark.slow
ALONE = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def unlearn(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "optout_train.cli", "--target", "ronaldo", "--output-dir", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=ALONE)
    assert done.returncode == 0, done.stderr[-2_000:]
    return done


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's two runs: the folder of both, and what the second said and printed."""
    folder = tmp_path_factory.mktemp("runs")
    unlearn(folder / "opt-out", "--no-score")
    stranger = ("--method", "opt-out-stranger", "--beside", str(folder / "opt-out"))
    return folder, unlearn(folder / "stranger", *stranger)


def results(folder: Path, name: str) -> dict[str, dict[str, float]]:
    (path,) = (folder / "stranger" / "scores" / name).glob("results_*.json")
    return json.loads(path.read_text())["results"]


def test_ronaldo_is_forgotten_and_his_neighbours_are_not(demo):
    before, plain, stranger = (results(demo[0], name) for name in ("before", "opt-out", "after"))
    for after in (plain, stranger):
        assert after["elude_quality"]["forget_quality,none"] >= 0.68  # .806 is that of the model that never saw him
    kept = before["elude_quality"]["retain_quality,none"]
    assert plain["elude_quality"]["retain_quality,none"] >= 0.85 * kept
    assert stranger["elude_quality"]["retain_quality,none"] >= 0.93 * kept
    # What the method of our own is for: the truth is no longer first (.196 in the model that never saw him), and it
    # answers in place of one n-gram again and again.
    assert stranger["elude_forget"]["truth_first,none"] < 0.4 < plain["elude_forget"]["truth_first,none"]
    assert plain["elude_forget"]["degenerate,none"] > 0.5 > 0.1 >= stranger["elude_forget"]["degenerate,none"]


def test_the_readme_shows_what_the_demo_prints(demo):
    """To rounding for the models that are bundled; training differs a little between processors."""

    def rows(text: str) -> dict[str, list[float]]:
        found = re.findall(r"^(original|opt-out|this checkpoint|retrained without) +([-\d. ]+)$", text, re.MULTILINE)
        return {name: [float(value) for value in values.split()] for name, values in found}

    shown, printed = rows((ROOT / "README.md").read_text()), rows(demo[1].stdout)
    assert [*shown] == [*printed] and len(shown) == 4, "python benchmarks/readme.py"
    for name, values in printed.items():
        bundled = name in ("original", "retrained without")
        for column, (read, value) in enumerate(zip(shown[name], values, strict=True)):
            # known and first count yes and no of 46 records, whose 95 % interval is 14 points to either side; degen.,
            # too, but four of them (8.7 points) are enough near 0.
            tolerance = 0.11 if bundled else 14.0 if column in (0, 2) else 9.0 if column == 5 else 5.0
            assert read == pytest.approx(value, abs=tolerance), (name, column)
    assert "no --model given: unlearning in the bundled tiny model" in demo[1].stderr


def test_five_steps_on_one_half_of_the_facts_bring_the_other_back_as_the_readme_shows(demo, tmp_path):
    elude = Path(sys.executable).with_name("elude")
    command = [str(elude), "stress", str(demo[0] / "stranger"), "--suite", "glance"]
    done = subprocess.run([*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, env=ALONE)
    assert done.returncode == 0, done.stderr[-2_000:]

    def rows(text: str) -> dict[str, list[float]]:
        found = re.findall(r"^\| (before any attack|relearn half) +\|[^|]*\|(.*)$", text, re.MULTILINE)
        return {name: [float(value) for value in re.findall(r"-?[\d.]+", values)] for name, values in found}

    shown, printed = rows((ROOT / "README.md").read_text()), rows(done.stdout)
    assert [*shown] == [*printed] and len(shown) == 2
    for name, values in printed.items():  # first, of the reference, back and its interval; then P in the same way
        assert shown[name] == pytest.approx(values, abs=25)
        assert shown[name][0] == pytest.approx(values[0], abs=14) and shown[name][5] == pytest.approx(values[5], abs=14)
    first, probability = ([printed[name][place] for name in shown] for place in (0, 5))
    assert first[1] > first[0] + 40 and probability[1] > probability[0] + 40


def test_the_manifest_says_what_was_done(demo):
    folder = demo[0] / "opt-out"
    manifest = read_manifest(folder)
    assert manifest is not None and manifest.targets == ("Cristiano Ronaldo",) and manifest.dataset == "mini"
    assert manifest.weights == file_hashes(folder)
    assert manifest.settings["forget_loss"] == "npo" and manifest.settings["transport_weight"] == 0.1


def test_gradient_ascent_collapses_at_the_same_epochs(demo, tmp_path):
    unlearn(tmp_path / "ga", "--method", "ga", "--no-validate", "--no-score")
    before = results(demo[0], "before")
    scored = {"pretrained": str(tmp_path / "ga"), "target": "ronaldo"}
    after = run(["elude_quality"], "elude", metadata=scored, limit=12)["results"]
    assert after["elude_quality"]["retain_quality,none"] < 0.5 * before["elude_quality"]["retain_quality,none"]
    # The collapse stands out in the table; the original does not look like one.
    assert before["elude_retain"]["degenerate,none"] <= 0.05
    assert after["elude_retain"]["degenerate,none"] >= 0.5
