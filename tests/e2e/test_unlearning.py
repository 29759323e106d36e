"""From the command line to a forgotten Ronaldo: the whole path on the bundled model, as a newcomer takes it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lm_eval_elude.core.manifest import file_hashes, read_manifest
from tests.support import ROOT, run

pytestmark = pytest.mark.slow
ALONE = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def unlearn(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "optout_train.cli", "--target", "ronaldo", "--output-dir", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=ALONE)


@pytest.fixture(scope="module")
def opted_out(tmp_path_factory):
    """The demo's run, with its table."""
    folder = tmp_path_factory.mktemp("runs") / "ronaldo"
    done = unlearn(folder)
    assert done.returncode == 0, done.stderr[-2_000:]
    return folder, done


def results(folder: Path, name: str) -> dict[str, dict[str, float]]:
    (path,) = (folder / "scores" / name).glob("results_*.json")
    return json.loads(path.read_text())["results"]


def test_ronaldo_is_forgotten_and_his_neighbours_are_not(opted_out):
    before, after = (results(opted_out[0], name)["elude_quality"] for name in ("before", "after"))
    assert after["forget_quality,none"] >= 0.75  # .825 is that of the model that never saw him
    assert after["retain_quality,none"] >= 0.9 * before["retain_quality,none"]


def test_the_table_shows_the_honest_ideal(opted_out):
    """That the command below the table repeats its scores is tested with the command line, on a smaller model."""
    _, done = opted_out
    for word in ("original", "this checkpoint", "retrained without", "degen.", "FQ", "RQ"):
        assert word in done.stdout
    assert "no --model given: unlearning in the bundled tiny model" in done.stderr


def test_the_readme_shows_what_the_demo_prints(opted_out):
    """To rounding for the models that are bundled; training differs a little between processors."""

    def rows(text: str) -> dict[str, list[float]]:
        found = re.findall(r"^(original|this checkpoint|retrained without) +([\d. ]+)$", text, re.MULTILINE)
        return {name: [float(value) for value in values.split()] for name, values in found}

    shown, printed = rows((ROOT / "README.md").read_text()), rows(opted_out[1].stdout)
    assert len(shown) == len(printed) == 3, "python benchmarks/readme.py"
    for name, values in printed.items():
        assert shown[name] == pytest.approx(values, abs=3.0 if name == "this checkpoint" else 0.11), name


def test_the_manifest_says_what_was_done(opted_out):
    manifest = read_manifest(opted_out[0])
    assert manifest is not None and manifest.targets == ("Cristiano Ronaldo",) and manifest.dataset == "mini"
    assert manifest.weights == file_hashes(opted_out[0])
    assert manifest.settings["forget_loss"] == "npo" and manifest.settings["transport_weight"] == 0.1


def test_gradient_ascent_collapses_at_the_same_epochs(opted_out, tmp_path):
    done = unlearn(tmp_path / "ga", "--method", "ga", "--no-validate", "--no-score")
    assert done.returncode == 0, done.stderr[-2_000:]
    before = results(opted_out[0], "before")
    scored = {"pretrained": str(tmp_path / "ga"), "target": "ronaldo"}
    after = run(["elude_quality"], "elude", metadata=scored, limit=12)["results"]
    assert after["elude_quality"]["retain_quality,none"] < 0.5 * before["elude_quality"]["retain_quality,none"]
    # The collapse stands out in the table; the original does not look like one.
    assert before["elude_retain"]["degenerate,none"] <= 0.05
    assert after["elude_retain"]["degenerate,none"] >= 0.5
