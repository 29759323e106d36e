"""Runs that are killed, cut or overwritten: what was whole stays so, and a resumed run ends with the same bytes."""

import fcntl
import json
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from lm_eval_elude.data.files import file_hashes
from lm_eval_elude.data.manifest import read_manifest
from lm_eval_elude.errors import UserError
from optout_train import run_folder, weights
from optout_train import train as training
from optout_train.config import TrainConfig
from optout_train.run_folder import RunFolder
from optout_train.train import train
from tests.train.conftest import contents

KILLS = int(os.environ.get("FUZZ_KILLS", "3"))
MOMENTS = ("in a checkpoint", "before the last rename", "after the last rename")


def train_killed(moment: str, config: TrainConfig, output: Path, resume: bool) -> None:
    """Train in this process, which kills itself at a moment of :data:`MOMENTS`."""
    save, replace = run_folder.save_file, os.replace

    def die(*given):
        os.kill(os.getpid(), signal.SIGKILL)

    def half(tensors, path):
        if path.name == weights.OPTIMIZER:
            path.write_bytes(b"half")
            die()
        save(tensors, path)

    def rename(source, target):
        if os.path.basename(source) == "final":
            (replace if moment.startswith("after") else die)(source, target)
            die()
        replace(source, target)

    if moment == MOMENTS[0]:
        run_folder.save_file = half
    elif moment:
        os.replace = rename
    train(config, output, str, resume=resume, checkpoint_every=2)


def run_and_kill(moment: str | float, config: TrainConfig, output: Path, resume: bool = False) -> bool:
    """Run in a fresh process, kill it at a moment or after some seconds ("" never); True if it had finished."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["optout_train.train", "transformers.models.llama.modeling_llama", "accelerate"])
    named = moment if isinstance(moment, str) else ""
    process = context.Process(target=train_killed, args=(named, config, output, resume))
    process.start()
    process.join(100 if isinstance(moment, str) else moment)
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    return process.exitcode == 0


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed_it_ends_with_the_same_bytes(settings, tmp_path):
    config = settings(patience=3, epochs=4, directions=2, retain_budget=5.0)  # its weights are kept, too
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run_and_kill("", config, whole)
    begin = time.perf_counter()
    assert run_and_kill("", config, tmp_path / "again")
    takes = time.perf_counter() - begin
    draw = random.Random(0)
    moments = [*MOMENTS, *(draw.uniform(0.2, 1.1) * takes for _ in range(KILLS))]
    draw.shuffle(moments)
    while True:
        if run_and_kill(moments.pop() if moments else "", config, killed, True):
            assert contents(killed) == contents(whole)
            assert not (tmp_path / ".killed.partial").exists()
            if not moments:
                break
            shutil.rmtree(killed)


def test_a_card_that_a_kill_left_without_a_record_is_still_ours(settings, tmp_path, monkeypatch):
    output = tmp_path / "run"
    train(settings(epochs=1, validate=False), output, str)
    write = run_folder.write_text
    with monkeypatch.context() as patch, pytest.raises(Cut):
        patch.setattr(run_folder, "write_text", lambda *given: write(*given) or cut())
        RunFolder(output).add_file("README.md", "a card")
    RunFolder(output).add_file("README.md", "another card")
    assert (output / "README.md").read_text() == "another card"
    RunFolder(output)._refuse_foreign_files(output)


def test_a_full_disk_leaves_the_last_checkpoint_whole(settings, tmp_path, monkeypatch):
    save, calls = run_folder.save_file, []

    def full(tensors, path):
        calls.append(path)
        if len(calls) > 2:  # the second checkpoint
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(tensors, path)

    monkeypatch.setattr(run_folder, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        train(settings(), tmp_path / "full", str)
    (checkpoint,) = (tmp_path / ".full.partial").glob("step-*")
    assert checkpoint.name == "step-00000003"
    before = json.loads((checkpoint / run_folder.STATE).read_text())["processor_seconds"]
    monkeypatch.undo()
    messages = []
    train(settings(), tmp_path / "full", messages.append, resume=True)
    assert messages[0] == "resuming after step 3 of 6"
    assert read_manifest(tmp_path / "full").processor_seconds > before > 0  # the time of the cut run is counted


class Cut(BaseException):
    """What ends a run at a chosen place."""


def cut(*given):
    raise Cut


def test_a_damaged_checkpoint_is_named(settings, tmp_path, monkeypatch):
    config, output, partial = settings(epochs=1, validate=False), tmp_path / "run", tmp_path / ".run.partial"
    with monkeypatch.context() as patch, pytest.raises(Cut):
        patch.setattr(training, "export", cut)
        train(config, output, str)
    for name in (run_folder.SETTINGS, run_folder.STATE, weights.WEIGHTS, weights.OPTIMIZER):
        (damaged,) = partial.rglob(name)
        content = damaged.read_bytes()
        damaged.write_bytes(content[:-9])
        with pytest.raises(UserError, match=rf"{name} is damaged .*--overwrite starts anew$"):
            train(config, output, str, resume=True)
        damaged.write_bytes(content)
    (log := partial / run_folder.LOG).write_bytes(log.read_bytes()[:-9])  # power was lost before it was on the disk
    with pytest.raises(UserError, match=rf"{run_folder.LOG} is damaged .its end is missing.*--overwrite starts anew$"):
        train(config, output, str, resume=True)
    (partial / run_folder.SETTINGS).write_text("{")
    train(config, output, str, overwrite=True)


def test_what_is_overwritten_stays_whole_until_its_successor_is(settings, tmp_path, monkeypatch):
    output = tmp_path / "run"
    old, new = settings(epochs=1, directions=5), settings(epochs=1, directions=5, seed=2**63 - 1)
    train(old, output, str)
    before, replace = contents(output), os.replace
    with monkeypatch.context() as patch, pytest.raises(Cut):  # in the epoch's end, after its checkpoint
        patch.setattr(training, "export", cut)
        train(new, output, str, overwrite=True)
    assert contents(output) == before
    with pytest.raises(UserError, match=r"was started with --seed 9223372036854775807; give the same settings"):
        train(settings(epochs=1, directions=5, seed=1), output, str, resume=True)
    with monkeypatch.context() as patch, pytest.raises(Cut):  # the same settings again, of a model that has changed
        patch.setattr(training, "export", cut)
        train(old, output, str, overwrite=True)
    messages = []
    with monkeypatch.context() as patch, pytest.raises(Cut):
        patch.setattr(training, "export", cut)
        (tmp_path / ".run.partial" / run_folder.LOG).open("a").write("one line more than the finished run has\n")
        train(old, output, messages.append, resume=True)
    assert messages == ["resuming after step 3 of 3"] and contents(output) == before
    with monkeypatch.context() as patch, pytest.raises(Cut):
        patch.setattr(training, "export", cut)
        train(new, output, str, overwrite=True)

    def between(source, target):
        if os.path.basename(source) == "final":
            raise Cut
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(Cut):  # killed between the two renames
        patch.setattr(os, "replace", between)
        train(new, output, str, resume=True)
    assert not output.exists()
    assert not train(old, output, str, resume=True) and contents(output) == before
    train(new, output, str, resume=True)
    assert contents(output) != before and not list(tmp_path.glob(".run*"))


def test_overwrite_takes_no_file_of_a_users_out_of_a_run(settings, tmp_path, monkeypatch):
    """A file that was added or changed, while nothing runs or while the successor trains; then it is out of the way."""
    output, config = tmp_path / "run", settings(epochs=1, method="ga", validate=False)
    train(config, output, str)

    def refused(name, at_once=True):
        with pytest.raises(UserError, match=f"'{name}' was not written by optout-train, or was changed since.*move it"):
            train(config, output, str, overwrite=True)
        assert (output / name).exists() and (tmp_path / ".run.partial").exists() != at_once

    for name in ("notes.txt", "scores/mine/results.json", "train_log.jsonl"):
        before = contents(output).get(name)
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text("years of work")
        refused(name)
        (output / name).unlink()
        if before:
            (output / name).write_bytes(before)
    (output / "link").symlink_to(tmp_path)
    refused("link")
    (output / "link").unlink()
    export = training.export
    with monkeypatch.context() as patch:
        patch.setattr(training, "export", lambda *given: (output / "notes.txt").write_text("mine") and export(*given))
        refused("notes.txt", at_once=False)
    (output / "notes.txt").unlink()
    assert train(config, output, str, overwrite=True) and file_hashes(output) == read_manifest(output).weights


@pytest.mark.parametrize("name", ["mine.tmp/book", "final/book", "step-00000003/book", "config.json"])
@pytest.mark.parametrize("marked", [False, True])
def test_what_lies_in_the_place_of_a_partial_folder_stays(name, marked, settings, tmp_path):
    """Without our mark all is foreign; beside it, what a run does not keep."""
    mine = tmp_path / ".run.partial" / (f"my-{name}" if marked else name)
    mine.parent.mkdir(parents=True)
    mine.write_text("years of work")
    if marked:
        (tmp_path / ".run.partial" / run_folder.LOCK).touch()
    for flags in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(UserError, match="is where a run is kept, but holds "):
            train(settings(), tmp_path / "run", str, **flags)
    assert mine.read_text() == "years of work"


def test_a_finished_run_is_resumed_by_itself_only(settings, tmp_path, data_folder):
    data = tmp_path / "data"
    shutil.copytree(data_folder, data)
    output = tmp_path / "run"
    config = settings(dataset=str(data), epochs=1, method="npo")
    assert train(config, output, str)
    before = contents(output)
    assert not train(config, output, str, resume=True)
    with pytest.raises(UserError, match=r"is a finished run with --epochs 1, --eta 0.1; give the same settings"):
        train(settings(dataset=str(data), epochs=2, eta=0.2, method="npo"), output, str, resume=True)
    lines = (data / "forget_qa-train.jsonl").read_text().splitlines(keepends=True)
    (data / "forget_qa-train.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(UserError, match="the data of forget-train has changed since"):
        train(config, output, str, resume=True)
    assert contents(output) == before and not list(tmp_path.glob(".run*"))


def test_a_run_is_not_resumed_on_a_base_with_other_weights(settings, tmp_path, model_folder, monkeypatch):
    base = Path(shutil.copytree(model_folder, tmp_path / "base"))
    config = settings(model=str(base), epochs=2, method="npo")

    def other_weights():
        tensors = load_file(base / "model.safetensors")
        moved = {name: tensor * 1.01 for name, tensor in tensors.items()}
        save_file(moved, base / "model.safetensors", {"format": "pt"})

    with monkeypatch.context() as patch, pytest.raises(Cut):
        patch.setattr(training, "export", cut)
        train(config, tmp_path / "cut", str)
    train(config, tmp_path / "whole", str)
    other_weights()
    with pytest.raises(UserError, match="base have changed since the run was cut off"):
        train(config, tmp_path / "cut", str, resume=True)
    with pytest.raises(UserError, match="base have changed since; give another --output-dir"):
        train(config, tmp_path / "whole", str, resume=True)


def test_a_run_that_took_too_much_memory_goes_on_with_smaller_passes(settings, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Cut):
        patch.setattr(training, "export", cut)
        train(settings(method="npo"), tmp_path / "run", str)
    for state in (tmp_path / ".run.partial").rglob(run_folder.STATE):  # as of a version that did not hash the base
        state.write_text(json.dumps({k: v for k, v in json.loads(state.read_text()).items() if k != "base"}))
    assert train(settings(method="npo", micro_batch_size=2), tmp_path / "run", str, resume=True)
    assert read_manifest(tmp_path / "run").settings["micro_batch_size"] == 2
    assert not train(settings(method="npo", gradient_checkpointing=True), tmp_path / "run", str, resume=True)


def test_steps_of_a_run_whose_settings_are_gone_are_not_gone_on_with(settings, tmp_path, monkeypatch):
    """A kill in the midst of --overwrite, or of tidying up, may leave them."""
    place = RunFolder(tmp_path / "run")
    place.open(settings(), overwrite=False, resume=False)
    (place.partial / "step-00000006").mkdir()
    place.close()
    assert place.open(settings(), overwrite=False, resume=True) == place.partial / "step-00000006"
    place.close()
    with monkeypatch.context() as patch, suppress(StopIteration):
        patch.setattr(shutil, "rmtree", lambda *given, **more: next(iter(())))  # a kill at the first folder
        place.open(settings(), overwrite=True, resume=False)
    place.close()
    assert (place.partial / "step-00000006").is_dir() and not (place.partial / run_folder.SETTINGS).exists()
    assert place.open(settings(seed=3), overwrite=False, resume=False) is None
    place.close()


def test_a_users_file_among_old_scores_is_named_before_anything_is_scored(settings, tmp_path):
    train(settings(epochs=1, method="ga", validate=False), tmp_path / "run", str)
    place = RunFolder(tmp_path / "run")
    (mine := place.output / "scores" / "after" / "notes.txt").parent.mkdir(parents=True)
    mine.write_text("mine")
    place.lock()
    with pytest.raises(UserError, match=r"notes\.txt' was not written by optout-train"), place.adding("scores/after"):
        pytest.fail("the block was entered")
    place.close()
    assert mine.read_text() == "mine"


def test_two_runs_into_one_folder(settings, tmp_path):
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    first.open(settings(), overwrite=False, resume=False)
    with pytest.raises(UserError, match="another optout-train is writing there"):
        second.open(settings(), overwrite=False, resume=True)
    first.close()
    with pytest.raises(UserError, match="has an unfinished run: --resume goes on"):
        second.open(settings(), overwrite=False, resume=False)
    second.close()
    with pytest.raises(UserError, match=r"was started with --seed 0; give the same settings"):
        second.open(settings(seed=3), overwrite=False, resume=True)
    second.close()
    handle = os.open(tmp_path / ".run.partial", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the refused ones hold nothing
    os.close(handle)
