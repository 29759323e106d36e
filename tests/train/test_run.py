"""What users of transformers expect of a trainer: resume, accumulation, processes, early stopping, callbacks."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from lm_eval_elude.data import bundled
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.sets import SETS
from lm_eval_elude.model.scorer import load_model
from lm_eval_elude.text.chat import load_tokenizer
from optout_train.data import DataArguments, Sets, load_sets
from optout_train.trainer import Between, UnlearnConfig, UnlearnTrainer

ALONE = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
RUN = ["--target", "ronaldo", "--no_score", "--use_cpu", "true", "--early_stopping", "false", "--learning_rate", "1e-4"]


def command(folder: Path, *flags: str) -> list[str]:
    return ["-m", "optout_train.cli", *RUN, "--output_dir", str(folder), *flags]


def run(arguments: list[str], *launcher: str) -> None:
    done = subprocess.run([sys.executable, *launcher, *arguments], capture_output=True, text=True, env=ALONE)
    assert done.returncode == 0, done.stderr[-3000:]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_close(one: Path, other: Path, difference: float) -> None:
    """The largest difference of a weight, beside how far training moved any."""
    base, a, b = weights(bundled.MODEL), weights(one), weights(other)
    moved = max(float((a[name] - base[name]).abs().max()) for name in a)
    assert max(float((a[name] - b[name]).abs().max()) for name in a) <= difference * moved


@pytest.mark.slow
@pytest.mark.parametrize("method", ["opt-out", "name-swap-robust"])
def test_killed_and_resumed_a_run_ends_with_the_weights_of_one_that_was_not(method, tmp_path):
    flags = ["--num_train_epochs", "3", "--method", method, "--per_device_train_batch_size", "24"]
    run(command(tmp_path / "whole", *flags))
    process = subprocess.Popen(
        [sys.executable, *command(tmp_path / "killed", *flags)], env=ALONE, stderr=subprocess.DEVNULL
    )
    while not list((tmp_path / "killed").glob("checkpoint-*/extra.pt")) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    lessons = (tmp_path / "killed" / "lessons.pt").stat().st_mtime_ns
    run(command(tmp_path / "killed", *flags, "--resume_from_checkpoint"))
    assert (tmp_path / "killed" / "lessons.pt").stat().st_mtime_ns == lessons  # what was elicited is kept
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_accumulation_and_two_processes_take_the_step_of_the_joint_batch(tmp_path):
    flags = [
        "--num_train_epochs",
        "1",
        "--save_strategy",
        "no",
        "--max_grad_norm",
        "0",
        "--optim",
        "sgd",
        "--eta",
        "0.1",
        "--learning_rate",
        "3e-3",
    ]
    run(command(tmp_path / "joint", *flags, "--per_device_train_batch_size", "16"))
    run(command(tmp_path / "parts", *flags, "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "4"))
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29537")
    run(command(tmp_path / "two", *flags, "--per_device_train_batch_size", "8"), *torchrun)
    state = json.loads((tmp_path / "two" / "trainer_state.json").read_text())
    assert state["global_step"] == 3 and json.loads((tmp_path / "two" / "optout.json").read_text())["targets"]
    for other in ("parts", "two"):
        assert_close(tmp_path / "joint", tmp_path / other, 1e-3)  # a rounding of a float32 weight is 6e-4 of the move


@pytest.mark.parametrize(
    ("scores", "stops"),
    [([0.1], False), ([0.1, 0.05], False), ([0.1, 0.3, 0.4], False), ([0.1, 0.3, 0.2], True), ([0.1, 0.0], True),
     ([0.1, 0.3, 0.2, 0.25], False)],
)  # fmt: skip
def test_training_stops_where_the_score_falls_below_the_epoch_before(scores, stops):
    """The first score is the original model's; 0 is a collapsed model's."""
    from types import SimpleNamespace

    state, control = (
        SimpleNamespace(log_history=[{"eval_score": s} for s in scores]),
        SimpleNamespace(should_training_stop=False),
    )
    Between(None).on_evaluate(SimpleNamespace(early_stopping=True), state, control)
    assert control.should_training_stop == stops


def test_a_python_call_with_a_model_in_memory_early_stopping_and_a_callback(tmp_path):
    """The best epoch's weights are loaded at the end; the rate is so high that the second one is worse."""
    steps = []

    class Mine(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            steps.append(state.global_step)

    sets = load_sets(DataArguments(target=["ronaldo"], dataset="mini"), dict.fromkeys(SETS, 1.0), None, str)
    few = replace(sets, forget=sets.forget[:6], validation={name: rows[:4] for name, rows in sets.validation.items()})
    model, tokenizer = load_model(str(bundled.MODEL)), load_tokenizer(str(bundled.MODEL))
    args = UnlearnConfig(output_dir=str(tmp_path), per_device_train_batch_size=3, learning_rate=3e-2, use_cpu=True,
                         num_train_epochs=9, disable_tqdm=True)  # fmt: skip
    trainer = UnlearnTrainer(model, args, few, processing_class=tokenizer, callbacks=[Mine()])
    trainer.train()
    assert steps == [*range(1, len(steps) + 1)] and len(steps) < 18
    scores = [entry["eval_score"] for entry in trainer.state.log_history if "eval_score" in entry]
    assert trainer.evaluate()["eval_score"] == pytest.approx(max(scores[1:]), abs=1e-5)


def test_without_a_validation_set_nothing_is_measured(tmp_path):
    records = [QARecord("Ada", f"Who is {i}?", f"Number {i}.") for i in range(4)]
    tokenizer = load_tokenizer(str(bundled.MODEL))
    args = UnlearnConfig(output_dir=str(tmp_path), world_weight=0, num_train_epochs=1, use_cpu=True, save_strategy="no")
    trainer = UnlearnTrainer(load_model(str(bundled.MODEL)), args, Sets(records, records), processing_class=tokenizer)
    trainer.train()
    assert not args.early_stopping and not [entry for entry in trainer.state.log_history if "eval_score" in entry]
