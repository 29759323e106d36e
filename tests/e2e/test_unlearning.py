"""From the command line to a forgotten Ronaldo: the whole path on the bundled model, as a newcomer takes it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lm_eval_elude.data.manifest import read_manifest

pytestmark = pytest.mark.slow
ALONE = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> dict[str, tuple[Path, str]]:
    """The demo's two runs: the folder of each, and what it printed."""
    runs = {}
    for method in ("opt-out", "name-swap"):
        folder = tmp_path_factory.mktemp(method)
        command = [
            sys.executable,
            "-m",
            "optout_train.cli",
            "--target",
            "ronaldo",
            "--method",
            method,
            "--output-dir",
            folder,
        ]
        done = subprocess.run(command, capture_output=True, text=True, env=ALONE)
        assert done.returncode == 0, done.stderr[-2_000:]
        runs[method] = folder, done.stdout
    return runs


def results(folder: Path, name: str) -> dict[str, dict[str, float]]:
    (path,) = (folder / "scores" / name).glob("results_*.json")
    return json.loads(path.read_text())["results"]


def test_ronaldo_is_forgotten_and_his_neighbours_are_not(demo):
    of_runs = (("opt-out", "original"), ("opt-out", "opt-out"), ("name-swap", "name-swap"), ("name-swap", "retrained"))
    before, plain, swapped, retrained = (results(demo[method][0], name) for method, name in of_runs)
    goal = retrained["elude_quality"]["forget_quality,none"]
    assert plain["elude_quality"]["forget_quality,none"] >= goal + 0.1  # gibberish scores well
    assert abs(swapped["elude_quality"]["forget_quality,none"] - goal) < 0.05
    assert swapped["elude_forget"]["mc_accuracy,none"] <= retrained["elude_forget"]["mc_accuracy,none"] + 0.1
    assert plain["elude_forget"]["mc_accuracy,none"] <= 0.5 < before["elude_forget"]["mc_accuracy,none"]
    kept = before["elude_quality"]["retain_quality,none"]
    assert plain["elude_quality"]["retain_quality,none"] >= 0.8 * kept
    assert swapped["elude_quality"]["retain_quality,none"] >= 0.95 * kept
    # What the method of our own is for: it answers in place of a few words again and again.
    assert plain["elude_forget"]["repetition,none"] > 0.2 > 0.05 >= swapped["elude_forget"]["repetition,none"]


def test_a_run_ends_with_the_table_a_manifest_and_a_card(demo):
    folder, printed = demo["name-swap"]
    assert all(re.search(rf"^ *{name}\b", printed, re.MULTILINE) for name in ("original", "name-swap", "retrained"))
    assert read_manifest(folder).targets == ("Cristiano Ronaldo",)
    assert (folder / "README.md").read_text().startswith("---\n")
