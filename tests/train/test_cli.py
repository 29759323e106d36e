"""The command line: its flags, its errors to the letter, and a run from end to end in processes of its own."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest

from lm_eval_elude.data.bundled import MODEL
from lm_eval_elude.data.manifest import Manifest, read_manifest, write_manifest
from lm_eval_elude.errors import UserError
from lm_eval_elude.report.comparison import named_runs
from lm_eval_elude.scoring.runs import Run
from optout_train import cli
from optout_train.config import METHODS, TrainConfig, build_config, flag
from optout_train.run_folder import RunFolder
from optout_train.score import command as command_of
from optout_train.score import is_scored, jobs, take_over
from tests.support import optout, read_jsonl, write_jsonl
from tests.support import run as evaluate


def fails(*arguments: str) -> str:
    """Run in this process and return the one line of the error."""
    code, out, err = optout(*arguments)
    *before, line = err.splitlines()
    assert (code, out) == (2, "") and line.startswith("Error: ") and not any("Traceback" in one for one in before)
    return line


def test_help_names_every_field_and_method():
    _, shown, _ = optout("--help")
    flags = set(re.findall(r"--[a-z-]+", shown))
    assert {flag(spec.name) for spec in fields(TrainConfig)} <= flags
    sections = re.findall(r"^(\w.*):$", shown, re.MULTILINE)
    assert ", ".join(sections) == (
        "Start here, Model, Data, Objective, Stranger loss, Schedule, Output, Distributed, Other"
    )
    assert shown.split("Other:")[1].split()[:1] == ["--help"]  # every flag of ours has its section
    assert {"--output-dir", "--overwrite", "--resume", "--no-score", "--world-only", "--lambda"} <= flags
    assert all(re.search(rf"[ ,]{re.escape(name)}[,.\n]", shown) for name in METHODS)


def test_a_name_in_another_alphabet_has_an_output_folder_of_its_own(tmp_path):
    data = tmp_path / "mine.jsonl"
    data.write_text('{"entity": "李小龙"}\n{"entity": "Александр Пушкин"}\n', encoding="utf-8")
    config = TrainConfig(target=("пушкин", "李小龙"), dataset=str(data))
    assert cli._default_output(config) == Path("runs/александр_пушкин+李小龙-opt-out")


def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise():
    """Set before torch is there, as its OpenMP library reads it once."""
    code = (
        "import os, sys, optout_train.cli as cli; sys.argv[1:] = ['--help']; cli.command.main = lambda **_: print("
        "os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules); cli.main()"
    )
    for given in ({}, {"OMP_WAIT_POLICY": "ACTIVE"}):
        env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        assert done.stdout.split() == [given.get("OMP_WAIT_POLICY", "PASSIVE"), "False"]


BAD_WORDS = [
    (["--target", "ronald"], "unknown target 'ronald': known targets: Ada Example"),
    (["--dataset", "nowhere"], "Error: data set 'nowhere' is neither"),
    (["--learning-rate", "-1"], "Error: --learning-rate must be a finite number and not negative, got -1"),
    (["--eta", "nan"], "Error: --eta must be a finite number and not negative, got nan"),
    (["--epochs", "x"], "Error: Invalid value for '--epochs'"),
    (["--method", "sft"], "Error: --method 'sft' is not known"),
    (["--epoch-count", "3"], "No such option"),
    (["--seed", str(2**63)], f"Error: --seed must be below 2**63, got {2**63}"),
    (["--model", "\udcff"], "Error: --model must be text in UTF-8 without NUL"),
    (["--model", "m" * 5000], "Error: "),
    (["--model", "no/such/model"], "does not exist"),
    (["--tracker", "wandb"], "--tracker wandb is not installed"),
    (["--overwrite", "--resume"], "--overwrite and --resume contradict"),
    (["--beside", "nowhere"], "--beside nowhere is no checkpoint of optout-train"),
]


@pytest.mark.parametrize(("words", "message"), BAD_WORDS)
def test_bad_input_is_one_line_that_names_flag_or_file(words, message, arguments, tmp_path):
    before = arguments(tmp_path / "runs" / "out")
    line = fails(*(before[2:] if words[0] == "--target" else before), *words)
    assert message in line and not list(tmp_path.iterdir())


def test_a_target_must_be_named():
    assert fails("--no-score") == "Error: --target is missing: name the entity to forget"


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"question": "Q?"}, "answer"),
        ({"question": "Q?", "answer": " "}, "answer"),
        ({"question": "Q?", "answer": "A.", "perturbed_answer": ["x"]}, "perturbed_answer"),
    ],
)
def test_a_bad_row_is_named_by_file_row_and_field(arguments, tmp_path, row, field):
    (tmp_path / "forget_qa-train.jsonl").write_text(json.dumps({"entity": "Ada Example", **row}) + "\n")
    output = tmp_path.with_name(f"{tmp_path.name}-out")
    line = fails(*arguments(output, "--dataset", str(tmp_path), "--method", "npo", "--strict"))
    assert line.startswith(f"Error: forget_qa-train.jsonl, row 1: field '{field}'")


def test_a_missing_column_of_the_world_set_names_the_way_out(arguments, tmp_path, data_folder):
    for name in ("forget_qa-train.jsonl", "retain_qa-train.jsonl", "retain_qa-validation.jsonl"):
        (tmp_path / name).write_text((data_folder / name).read_text())
    output = tmp_path.with_name(f"{tmp_path.name}-out")
    assert "no world-train" in (line := fails(*arguments(output, "--dataset", str(tmp_path))))
    assert line.endswith("--world-weight 0 trains without it")


def test_a_model_that_cannot_be_loaded(arguments, tmp_path, model_folder):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (bare / name).write_bytes((model_folder / name).read_bytes())
    assert fails(*arguments(tmp_path / "o", "--model", str(bare))).startswith(f"Error: --model '{bare}' cannot be")
    (bare / "model.safetensors").write_bytes(b"not tensors")
    assert fails(*arguments(tmp_path / "o", "--model", str(bare))).startswith(f"Error: --model '{bare}' cannot be")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "true", "is configured for DEEPSPEED; take FSDP"),
        ("ACCELERATE_MIXED_PRECISION", "fp16", "is configured for mixed precision fp16; take bf16 or no"),
    ],
)
def test_what_accelerate_launch_cannot_have(arguments, tmp_path, monkeypatch, variable, value, message):
    monkeypatch.setenv(variable, value)
    assert message in fails(*arguments(tmp_path / "out"))


def test_what_accelerate_launch_says_becomes_flags(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert cli._launched() == {"shard": True, "autocast": True} and cli._launched() == {}


def test_a_name_reaches_the_terminal_escaped(arguments, tmp_path):
    name = "\x1b]0;mine\x07\u202e"
    for words in (["--target", name], ["--model", str(tmp_path / name)], ["--output-dir", f"/dev/null/{name}"]):
        line = fails(*arguments(tmp_path / "o", *words))
        assert "\\x1b]0;mine\\x07" in line and line.isprintable()


def test_overwrite_takes_nothing_but_a_run_and_nothing_that_the_run_reads(
    arguments, tmp_path, model_folder, data_folder, monkeypatch
):
    top = tmp_path / "top"
    (top / "files").mkdir(parents=True)
    (top / "files" / "thesis.txt").write_text("years of work")
    (top / "link").symlink_to(top / "files")
    (top / "dangling").symlink_to(top / "nowhere")
    shutil.copytree(model_folder, top / "m" / "model")
    shutil.copytree(data_folder, top / "data")
    (top / ".odd.partial").mkdir()
    (top / ".odd.partial" / "mine.txt").write_text("")
    (top / "here").mkdir()
    monkeypatch.chdir(top / "here")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    own = ["--model", str(top / "m" / "model"), "--dataset", str(top / "data"), "--overwrite"]
    model = top / "m" / "model"
    for output, reason in {
        top / "files": "exists and is no run of optout-train",
        top / "files" / "thesis.txt": "exists and is no run of optout-train",
        top / "files" / "thesis.txt" / "run": "Not a directory",
        top / "link": "is a symbolic link",
        top / "dangling": "is a symbolic link",
        model: "is or lies in the folder that --model names",
        model / "out": "is or lies in the folder that --model names",
        top / "m": "is or contains the folder that --model names",
        top / "data": "is or lies in the folder that --dataset names",
        top: "is or contains the folder that",
        Path("."): "is or contains the folder that you are in",
        Path("/"): "is no place for a run",
        top / "odd": "is where a run is kept, but holds 'mine.txt'",
        Path("x" * 5000): "File name too long",
    }.items():
        assert reason in fails(*arguments(output, *own)), output
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before
    with pytest.raises(UserError, match="cannot be a folder"):
        RunFolder(Path("a\0b"))


def test_data_that_cannot_be_scored_are_named_before_training(arguments, data_folder, tmp_path):
    data, output = tmp_path / "data", tmp_path / "out"
    shutil.copytree(data_folder, data)
    rows = read_jsonl(data / "forget_qa-train.jsonl")
    write_jsonl(data / "forget_qa-train.jsonl", [{k: row[k] for k in ("entity", "question", "answer")} for row in rows])
    words = arguments(output, "--dataset", str(data), "--epochs", "1")
    line = fails(*(word for word in words if word != "--no-score"))
    assert "row 1: field 'paraphrased_answer' is missing" in line and line.endswith("--no-score trains without scoring")
    assert not output.exists()
    code, _, err = optout(*words)
    assert code == 0 and output.is_dir(), err


@pytest.mark.slow
def test_end_to_end_with_scores_and_the_command_that_repeats_them(run, arguments, tmp_path):
    output = tmp_path / "out"
    words = [word for word in arguments(output, "--epochs", "1", "--micro-batch-size", "8") if word != "--no-score"]
    code, out, err = run(*words)
    assert code == 0, err
    warning, line = err.splitlines()  # a random model knows nothing
    assert warning.startswith("warning: the model knows") and line == f"checkpoint: {output}"
    table, lies, again = out.split("\n\n")
    assert str(output) in lies and str(output / "scores") in lies
    assert [line.split()[0] for line in table.splitlines()[2:]] == ["original", "this"]
    before, after = (Run(output / "scores" / name).results for name in ("before", "after"))
    value = 100 * after["results"]["elude_quality"]["forget_quality,none"]
    assert f"{value:.1f}" == table.splitlines()[-1].split()[3]
    assert before["results"] != after["results"]
    assert (
        len(Run(output / "scores" / "after").samples("elude_forget")) == after["n-samples"]["elude_forget"]["effective"]
    )
    both = named_runs([str(output / "scores")])
    assert [named.name for named in both] == ["before", "opt-out"] and both[1].run.checkpoint == output
    assert f"| this checkpoint | {value:.1f} % |" in (output / "README.md").read_text()
    assert read_manifest(output).targets == ("Ada Example",)
    command = again.removeprefix("Again:").split()
    assert command[:3] == ["lm_eval", "--model", "elude"] and f"pretrained={output},dtype=float32" in command

    # The harness's own backend gives the same numbers.
    results = evaluate(["elude_forget", "elude_retain"], metadata={"pretrained": str(output)}, limit=2)["results"]
    ours = Run(output / "scores" / "after")
    for task, row in results.items():
        first = [sample.values["probability"] for sample in ours.samples(task)[:2]]
        assert row["probability,none"] == pytest.approx(sum(first) / 2, abs=1e-5)

    assert optout(*words, "--resume") == (0, "", f"{output} is finished: nothing to do\n")
    config, (results,) = TrainConfig.from_json(read_manifest(output).settings), (output / "scores/before").glob("res*")
    kept, manifest = results.read_text(), read_manifest(output)
    assert is_scored(config, output, None)
    results.write_text(kept.replace(manifest.base_model["weights"]["model.safetensors"], "0" * 64))
    assert not is_scored(config, output, None)  # the model before it has other weights now
    results.write_text(json.dumps(json.loads(kept) | {"versions": {"elude_forget": 1.0}}))
    assert not is_scored(config, output, None)  # other prompts or numbers
    asked = json.loads(kept)["configs"]["elude_retain"]["metadata"]["elude"]["fingerprint"]
    results.write_text(kept.replace(asked, "0" * len(asked)))
    assert not is_scored(config, output, None)  # the test split is of other records now
    results.write_text(kept)
    (output / "README.md").unlink()  # killed while scoring: what is there is not scored again
    (output / "scores" / "after").rename(tmp_path / "after")
    _, out, err = optout(*words, "--resume")
    assert out.split("\n\n")[0] == table and err == f"{output} is finished: nothing to train\n"
    assert (output / "README.md").is_file() and read_manifest(output).targets == ("Ada Example",)
    assert optout(*words, "--resume") == (0, "", f"{output} is finished: nothing to do\n")
    assert optout(*words, "--overwrite", "--no-score").code == 0  # all of it is ours
    assert "is a finished run; give --overwrite to replace it" in fails(*words)
    assert f"--beside {output} is the --output-dir itself" in fails(*words, "--overwrite", "--beside", str(output))
    assert " --batch_size 2 " in command_of(replace(config, micro_batch_size=2), output, manifest) + " "


def test_an_adapter_beside_a_run_is_found_from_another_folder_than_it_was_trained_in(tmp_path, monkeypatch):
    base = Path(shutil.copytree(MODEL, tmp_path / "there" / "base"))
    (other := tmp_path / "there" / "adapter").mkdir()
    monkeypatch.chdir(base.parent)
    config = build_config({"target": ("ronaldo",), "model": "./base", "lora": True})
    write_manifest(other, Manifest((), "mini", settings=config.to_json(), base_model={"name": "./base"}))
    monkeypatch.chdir(tmp_path)
    assert jobs(config, tmp_path, other)[1].arguments["pretrained"] == str(base)


@pytest.mark.slow
def test_what_the_run_beside_has_scored_is_taken_over_where_it_would_come_out_the_same(run, arguments, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    own = ("--epochs", "1", "--micro-batch-size", "8")
    words = [[w for w in arguments(folder, *own) if w != "--no-score"] for folder in (first, second)]
    for row, more in zip(words, ((), ("--seed", "1", "--beside", str(first))), strict=True):
        code, out, err = run(*row, *more)
        assert code == 0, err
    assert [line.split()[0] for line in out.split("\n\n")[0].splitlines()[2:]] == ["original", "opt-out", "this"]

    def files(folder):
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    assert files(second / "scores" / "before") == files(first / "scores" / "before")
    assert files(second / "scores" / "opt-out") == files(first / "scores" / "after")
    assert not files(second / "scores" / "after").keys() & files(first / "scores" / "after").keys()

    manifest, place = read_manifest(second), RunFolder(second)
    config = TrainConfig.from_json(manifest.settings)
    before = jobs(config, second, first)[0]
    (results,) = (first / "scores" / "before").glob("results_*.json")
    place.lock()
    try:
        assert take_over(before, config, manifest, 8, place, first)
        assert take_over(before, config, manifest, 4, place, first) is None  # sums come out otherwise
        of_others = replace(manifest, targets=("Bo Example",))
        assert take_over(before, config, of_others, 8, place, first) is None
        results.write_text(results.read_text().replace(manifest.base_model["weights"]["model.safetensors"], "0" * 64))
        assert take_over(before, config, manifest, 8, place, first) is None  # of other weights
    finally:
        place.discard()


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (OSError(28, "No space left on device"), 2, "Error: [Errno 28] No space left on device; a checkpoint that was"),
        (type("SafetensorError", (Exception,), {})("cut"), 2, "Error: cut; a checkpoint that was written is whole"),
        (type("OutOfMemoryError", (RuntimeError,), {})("full"), 1, "Error: full; give a smaller --micro-batch-size"),
        (ValueError("a fault of ours"), None, ""),
    ],
)
def test_what_ends_a_run_is_a_line_that_says_the_way_on(error, code, line, monkeypatch):
    def fail(**options):
        raise error

    monkeypatch.setattr(cli.command, "main", fail)
    if code is None:
        with pytest.raises(ValueError, match="a fault of ours"):
            optout()
        return
    ended = optout()
    assert (ended.code, ended.out) == (code, "") and ended.err.startswith(line) and ended.err.count("\n") == 1


def test_ctrl_c_exits_130_and_leaves_no_half_written_checkpoint(start, run, arguments, tmp_path):
    output = tmp_path / "out"
    words = arguments(output, "--epochs", "100")
    process = start(*words)
    partial = tmp_path / ".out.partial"
    while not list(partial.glob("step-*[0-9]")):
        time.sleep(0.02)
        assert process.poll() is None, process.stderr.read()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.splitlines()[-1].startswith("interrupted; --resume goes on")
    assert not output.exists() and not list(partial.glob("*.tmp"))
    (checkpoint,) = partial.glob("step-*")
    assert {p.name for p in checkpoint.iterdir()} == {"model.safetensors", "optimizer.safetensors", "state.json"}


def launcher(kind: str, folder: Path) -> list[str]:
    """The words after ``python -m`` that start two processes."""
    if kind == "torchrun":
        ends = ["--nproc_per_node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        return ["torch.distributed.run", *ends, "-m", "optout_train.cli"]
    file = folder / "accelerate.yaml"
    lines = [f"distributed_type: {kind}", "num_machines: 1", "num_processes: 2", "machine_rank: 0", "use_cpu: false"]
    lines += ["compute_environment: LOCAL_MACHINE", "main_process_port: 0", "mixed_precision: 'no'"]
    file.write_text("\n".join(lines + ["fsdp_config:", "  fsdp_version: 2"] * (kind == "FSDP")))
    return ["accelerate.commands.launch", "--config_file", str(file), "-m", "optout_train.cli"]


# What torchrun and full shards change, the next test sees.
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "extra"), [("MULTI_GPU", []), ("FSDP", ["--lora"])])
def test_two_processes_give_the_losses_of_one(run, arguments, tmp_path, kind, extra):
    one, two = tmp_path / "one", tmp_path / "two"
    assert optout(*arguments(one, *extra)).code == 0
    module, *words = launcher(kind, tmp_path)
    code, _, err = run(*words, *arguments(two, "--micro-batch-size", "1", *extra), module=module)
    assert code == 0, err
    assert read_manifest(two).settings["shard"] == (kind == "FSDP")
    same_run(one, two)


@pytest.mark.slow
def test_a_run_cut_off_in_one_process_is_resumed_by_two_sharded_ones(run, arguments, tmp_path, monkeypatch):
    one, two = tmp_path / "one", tmp_path / "two"
    assert optout(*arguments(one)).code == 0
    words = arguments(two, "--micro-batch-size", "1", "--shard")
    save = RunFolder.save

    def save_and_stop(*given):
        save(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", save_and_stop)
        assert optout(*words).code == 130
    module, *launch = launcher("torchrun", tmp_path)
    code, _, err = run(*launch, *words, "--resume", module=module)
    assert code == 0 and "resuming after step 3 of 6" in err.splitlines(), err
    same_run(one, two)


def same_run(one: Path, two: Path) -> None:
    """Both folders have the same losses, measures and weights, as far as another order of sums lets them."""
    logs = [read_jsonl(p / "train_log.jsonl") for p in (one, two)]
    assert len(logs[0]) == len(logs[1])
    for ours, theirs in zip(*logs, strict=True):
        for part in ("validation", "losses"):
            assert ours.get(part, {}) == pytest.approx(theirs.get(part, {}), abs=1e-5)
        if "step" in ours:
            assert ours == pytest.approx(theirs, abs=1e-5)
    from safetensors.torch import load_file

    weights = [load_file(*folder.glob("*.safetensors")) for folder in (one, two)]
    assert weights[0].keys() == weights[1].keys()
    for name in weights[0]:
        assert (weights[0][name] - weights[1][name]).abs().max() < 1e-4
