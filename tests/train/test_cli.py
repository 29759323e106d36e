"""The command as it is typed: help, one line for each error, and what a run leaves behind."""

import json

import pytest
import torch
from safetensors.torch import load_file

from lm_eval_elude.data import bundled
from lm_eval_elude.data.manifest import read_manifest
from tests.support import optout, small_data

RONALDO, MESSI = "Cristiano Ronaldo", "Lionel Messi"
SHORT = ("--no_score", "--num_train_epochs", 1, "--save_strategy", "no")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    splits = ("train", "validation", "test")
    return small_data(tmp_path_factory.mktemp("data"), {RONALDO: 3, MESSI: 3}, splits=splits)


def train(folder, data, *flags):
    ended = optout("--dataset", data, "--output_dir", folder, *SHORT, *flags)
    assert ended.code == 0, ended.err
    return read_manifest(folder)


def test_help_fits_a_screen_and_methods_have_a_sentence_and_a_source():
    shown = optout("--help")
    assert shown.code == 0 and len(shown.out.splitlines()) <= 45 and "TrainingArguments" in shown.out
    methods = optout("--list-methods").out.splitlines()
    assert len(methods) > 40 and all(line.endswith("]") for line in methods)
    assert "--gradient_accumulation_steps" in optout("--help_all").out


@pytest.mark.parametrize(
    ("flags", "message"),
    [(("--target", "nobody"), "unknown target 'nobody'"), ((), "name the entity to forget by --target"),
     (("--target", "ronaldo", "--method", "x"), "--method 'x' is not known; optout-train --list_methods has them"),
     (("--target", "ronaldo", "--learning_rat", "1"), "--learning_rat"),
     (("--target", "ronaldo", "--method", "rmu+rt", "--lora", 4), "--method rmu+rt changes the model's own weights"),
     (("--target", "ronaldo", "--fp16", "true"), "--transport_weight 0"),
     (("--target", "ronaldo", "--model", "./none"), "./none"),
     (("--target", "ronaldo", "--num_train_epochs", "a"), "invalid float value: 'a'")],
)  # fmt: skip
def test_bad_input_ends_in_one_line_and_code_2(flags, message, tmp_path, data):
    ended = optout("--dataset", data, "--output_dir", tmp_path / "out", "--use_cpu", "true", *flags)
    assert ended.code == 2 and message in ended.err.splitlines()[-1] and "Traceback" not in ended.err


def test_a_run_folder_is_not_overwritten_unasked(tmp_path, data):
    flags = ("--dataset", data, "--output_dir", tmp_path, "--target", "ronaldo")
    (tmp_path / "config.json").write_text("{}")
    ended = optout(*flags)
    assert ended.code == 2 and "--overwrite" in ended.err


def test_several_targets_a_config_and_the_chain_of_requests(tmp_path, data):
    """Names with hyphens, a YAML, and a second request whose forget set has the first one's records, too."""
    (tmp_path / "run.yaml").write_text(
        "learning-rate: 1e-3\ntarget: [ronaldo]\nlr_scheduler_type: cosine\nwarmup_steps: 0.1\n"
    )
    first = train(tmp_path / "first", data, "--config", tmp_path / "run.yaml", "--seed", 3)
    assert first.settings["learning_rate"] == 1e-3 and first.seed == 3 and first.targets == (RONALDO,)
    again = ("--model", tmp_path / "first", "--target", "messi", "--gradient-accumulation-steps", 2)
    second = train(tmp_path / "second", data, *again, "--optim", "adafactor", "--report_to", "tensorboard")
    assert second.targets == (RONALDO, MESSI) and second.requests[0]["targets"] == [RONALDO]
    state = json.loads((tmp_path / "second" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "forget" in entry] == [1]  # six records in one step
    both = train(
        tmp_path / "both", data, "--target", "ronaldo", "--target", "messi", "--gradient_checkpointing", "true"
    )
    assert both.targets == (RONALDO, MESSI) and not both.requests


@pytest.mark.parametrize(("rate", "warned"), [(1e-9, True), (1e-3, False)])
def test_a_run_that_moved_nothing_says_what_to_try(rate, warned, tmp_path, data):
    flags = ("--dataset", data, "--target", "ronaldo", "--method", "npo+rt", "--learning_rate", rate)
    ended = optout(*flags, "--output_dir", tmp_path, *SHORT)
    assert ended.code == 0 and ("as likely as before: try a higher --learning_rate" in ended.err) == warned


@pytest.mark.parametrize("merge", ["false", "true"])
def test_an_adapter_is_saved_alone_or_merged(merge, tmp_path, data):
    manifest = train(tmp_path, data, "--target", "ronaldo", "--lora", 4, "--merge", merge, "--method", "npo+rt")
    files = {path.name for path in tmp_path.iterdir()}
    assert ("adapter_model.safetensors" in files) != (merge == "true") and manifest.settings["lora"] == 4
    if merge == "true":
        before, after = (load_file(folder / "model.safetensors") for folder in (bundled.MODEL, tmp_path))
        assert before.keys() == after.keys() and not all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize("method", ["altpo+rt", "undial+rt", "pdu+rt", "repselect", "undo+rt", "rmu+rt", "task-vector",
                                    "opt-out-released", pytest.param("name-swap", marks=pytest.mark.slow),
                                    pytest.param("name-swap-robust", marks=pytest.mark.slow)])  # fmt: skip
def test_every_method_with_a_file_of_its_own_runs(method, tmp_path, data):
    before = load_file(bundled.MODEL / "model.safetensors")
    train(tmp_path, data, "--target", "ronaldo", "--method", method, "--eta", 0.5)
    after = load_file(tmp_path / "model.safetensors")
    assert all(torch.isfinite(value).all() for value in after.values())
    assert not all(torch.equal(before[name], after[name]) for name in before)
