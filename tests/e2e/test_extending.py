"""docs/extending.md is true: its diffs apply to a copy of this repository, and what they add is seen from outside."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIFFS = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "docs" / "extending.md").read_text(encoding="utf-8"), re.M | re.S)


RUN = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
model = sys.argv[1] + "/lm_eval_elude/mini/tiny"
manager = TaskManager(  # without the harness's own tasks, which take seconds to index
    include_path=sys.argv[1] + "/task_configs", include_defaults=False,
    metadata={"pretrained": model, "target": "ronaldo", "dataset": "mini"},
)
found = simple_evaluate(
    "elude", model_args={"pretrained": model}, tasks=["elude_attack_rhyme", "reworded_forget"], limit=1, device="cpu",
    task_manager=manager, gen_kwargs="max_gen_toks=8",
)
question = found["samples"]["elude_attack_rhyme"][0]["doc"]["question"]
json.dump(found["results"] | {"question": question}, open("found.json", "w"))
"""


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A copy of the packages with every diff applied, in which commands can be run."""
    folder = tmp_path_factory.mktemp("extended")
    for name in ("lm_eval_elude", "optout_train", "task_configs"):
        shutil.copytree(ROOT / name, folder / name)
    for diff in DIFFS:
        done = subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=folder, capture_output=True)
        assert done.returncode == 0, done.stderr

    def command(*arguments: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=folder, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return folder, command


def test_there_is_a_diff_for_each_kind_of_thing():
    assert len(DIFFS) == 5


@pytest.mark.slow
def test_a_new_loss_and_a_new_method_with_a_hook_of_its_own_train(extended):
    folder, command = extended
    shown = command("-m", "optout_train.cli", "--list_methods")
    assert "ipo+rt" in shown and "fading+world" in shown
    for method in ("ipo+rt", "fading"):
        flags = ("--target", "ronaldo", "--num_train_epochs", "1", "--no_score", "--save_strategy", "no")
        command("-m", "optout_train.cli", "--method", method, *flags, "--output_dir", method)
        log = json.loads((folder / method / "trainer_state.json").read_text())["log_history"]
        assert [entry["forget"] for entry in log if "forget" in entry]


@pytest.mark.slow
def test_a_new_attack_benchmark_and_metric_run_in_the_harness(extended):
    folder, command = extended
    command("-c", RUN, str(folder))
    found = json.loads((folder / "found.json").read_text())
    assert found["elude_attack_rhyme"].keys() & found["reworded_forget"].keys() >= {"exact_match,none"}
    assert "couplet" in found["question"]
