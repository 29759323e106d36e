"""docs/extending.md is true: its diffs apply to a copy of this repository, and what they add is seen from outside."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.support import ROOT

DIFFS = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "docs" / "extending.md").read_text(encoding="utf-8"), re.M | re.S)


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A copy of the packages with every diff applied, in which commands can be run."""
    folder = tmp_path_factory.mktemp("extended")
    for name in ("lm_eval_elude", "optout_train", "task_configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for diff in DIFFS:
        done = subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=folder, capture_output=True)
        assert done.returncode == 0, done.stderr

    def command(*arguments: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=folder, env=environment, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return folder, command


def test_there_is_a_diff_for_each_kind_of_thing():
    assert len(DIFFS) == 4


def test_a_new_loss_is_offered_with_its_variants(extended):
    shown = extended[1]("optout_train.cli", "--help")
    assert "simnpo" in shown and "simnpo+rt" in shown


def test_a_new_attack_benchmark_and_metric_run_in_the_harness(extended):
    folder, command = extended
    model = f"pretrained={folder}/lm_eval_elude/mini/tiny,dtype=float32"
    metadata = json.dumps({"target": "ronaldo", "dataset": "mini"})
    command(
        "lm_eval", "run", "--model", "elude", "--model_args", model, "--tasks", "elude_attack_rhyme,reworded_forget",
        "--limit", "2", "--output_path", "out", "--log_samples", "--metadata", metadata,
        "--include_path", str(folder / "task_configs"),
    )  # fmt: skip
    (file,) = (folder / "out").rglob("results_*.json")
    found = json.loads(file.read_text())["results"]
    assert found["elude_attack_rhyme"]["words,none"] > 0 and found["reworded_forget"]["words,none"] > 0
    (log,) = (folder / "out").rglob("samples_elude_attack_rhyme_*")
    first = json.loads(log.read_text().splitlines()[0])["doc"]["question"]
    assert "couplet" in first or "verse" in first
