"""Numbers recomputed from documents that version 0.1 logged: bundled original and retrained model, and an NPO+RT run.

``tests/golden/logs/*.json.gz`` hold the documents of a run with ``--limit 8`` (``elude_leak`` 2, TOFU 10) in today's
columns, and the values and standard errors that 0.1 reported for them, by its own names.
"""

import gzip
import json
from pathlib import Path

import pytest

from lm_eval_elude.metrics.compare import distances
from lm_eval_elude.tasks import GROUPS, TASKS, group_numbers, leaves

LOGS = Path(__file__).parents[1] / "golden" / "logs"
RUNS = ("original", "retrained", "ckpt")
NAMES = {  # of 0.1 -> of today; None for what went
    "truth_first": "mc_accuracy", "truth_first_gap": "mc_accuracy_gap", "truth_first_p": "mcnemar_p",
    "attacked_truth_first": "attacked_mc_accuracy", "chosen": "option_accuracy", "named": "name_rate",
    "named_first": "name_mc_accuracy", "degenerate": "repetition", "mention_quality": "named_retain_quality",
    "ngram_entropy": None, "oddness": None, "reference_divergence": None, "mia_accuracy_std": None, "mia_auc_low": None,
    "mia_auc_high": None, "known": None, "known_gap": None, "attacked_forget_quality_gap": None,
}  # fmt: skip
TASK_NAMES = {"elude_retain_mention": "elude_retain_named"}
PAIRED = ("forget_quality_gap", "probability_gap", "rougeL_recall_gap", "mc_accuracy_gap", "mia_auc_gap", "ks_p_value",
          "mcnemar_p", "privleak")  # fmt: skip


def load(run):
    with gzip.open(LOGS / f"{run}.json.gz", "rt", encoding="utf-8") as file:
        log = json.load(file)
    samples = {}
    for task, docs in log["docs"].items():
        name = TASK_NAMES.get(task, task)
        samples[name] = [TASKS[name].sample(doc, {"truth_ratio": "geometric"}) for doc in docs]
    return log["values"], samples


@pytest.fixture(scope="module")
def logs():
    return {run: load(run) for run in RUNS}


def computed(run, name, logs):
    """Today's numbers of a task or group, with those beside the retrained model for the unlearned one."""
    samples = logs[run][1]
    if name in GROUPS:
        found = group_numbers(name, {task: samples[task] for task in leaves(name)})
        # A group of 0.1 had these two under the forget set's names where it had nothing else.
        return found | {k.removeprefix("attacked_"): v for k, v in found.items() if name == "elude_attacks"}
    found = TASKS[name].numbers(samples[name], {"seed": 0})
    return found | (distances(samples[name], logs["retrained"][1][name]) if run == "ckpt" else {})


@pytest.mark.parametrize("run", RUNS)
def test_every_value_and_error_is_that_of_version_0_1(run, logs):
    compared = 0
    for task, row in logs[run][0].items():
        ours = computed(run, TASK_NAMES.get(task, task), logs)
        for old, (value, error) in row.items():
            name = NAMES.get(old, old)
            if name is None or (old.endswith("_gap") and (task in GROUPS or "leak" in task)):  # went
                continue
            if task == "tofu" and old == "forget_quality":  # 0.1 reported the KS test there
                ours[old] = computed(run, "tofu_forget", logs)["ks_p_value"]
            estimate = ours[name]
            if name == "repetition" and run == "ckpt":  # few words over and over are 1.0's
                assert value <= estimate.value <= value + 0.15
                continue
            assert estimate.value == pytest.approx(value, abs=1e-6), (task, old)
            certain_auc = "auc" in name and value in (0, 1)  # DeLong's error is 0 there
            if error != "N/A" and not certain_auc and not (name == "mia_auc_distance" and value == 0.5):
                assert estimate.stderr == pytest.approx(error, abs=1e-4), (task, old)
            compared += 1
    assert compared > 150


def test_every_metric_of_samples_and_of_two_runs_is_compared(logs):
    names = {NAMES.get(old, old) for run in RUNS for row in logs[run][0].values() for old in row}
    older = (task for name, task in TASKS.items() if not name.startswith(("rwku", "muse")))
    reported = {name for task in older for name in task.metrics} | {*PAIRED}
    assert reported <= names
