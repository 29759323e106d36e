"""RWKU and MUSE end to end, off-line: scored, trained on, attacked, and computed again from what is logged."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from lm_eval_elude.data import bundled
from lm_eval_elude.tasks.runs import Run
from tests.support import elude, optout, write_rwku_muse

KING = "Stephen King"


def lm_eval(tasks: str, metadata: dict, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lm_eval", "--tasks", tasks, "--metadata", json.dumps(metadata), *more]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_the_command_scores_folders_and_verify_finds_the_same(tmp_path: Path) -> None:
    """``lm_eval --tasks ...`` as typed, on the bundled model, for two people and both corpora."""
    about = {"target": ["stephen king", "Neil Armstrong"], **write_rwku_muse(tmp_path)}
    out = ("--output_path", str(tmp_path / "out"), "--log_samples")
    done = lm_eval("rwku_forget,rwku_neighbor,muse_news,muse_books", about, *out)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(f"rwku_{name}" in done.stdout for name in ("forget_level3", "attack_cross_lingual", "neighbor_level2"))
    run = Run(tmp_path / "out")
    assert not run.mismatches()
    assert run.numbers["rwku_forget"].keys() == {"rwku_recall", "repetition"}
    assert set(run.settings("rwku_forget_level1")["per_target"]) == {KING, "Neil Armstrong"}
    file = run.sample_file("muse_news_verbmem")
    file.write_text(file.read_text().replace('"generated": "', '"generated": "over the river and the mayor said '))
    assert any("muse_news_verbmem, muse_rouge" in line for line in Run(tmp_path / "out").mismatches())
    alone = lm_eval(
        "rwku_mia", about | {"target": KING}, "--model", "hf", "--model_args", f"pretrained={bundled.MODEL}"
    )
    assert "no log-probabilities of single tokens" in alone.stderr and "log_likelihood" in alone.stdout


def test_without_folder_and_network_there_is_one_line() -> None:
    done = lm_eval("rwku", {"target": KING})
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("Error: jinzhuoran/RWKU:test cannot be loaded by datasets: ")
    assert done.stderr.endswith("; a folder of its files can be given instead\n")


@pytest.mark.slow
def test_passages_are_unlearnt_and_learnt_again(tmp_path: Path) -> None:
    data = write_rwku_muse(tmp_path)["rwku_data"]
    rows = [{"text": f"Stephen King was born in Portland, and book {i} is his.", "subject": KING} for i in range(6)]
    (tmp_path / "rwku" / "passage.json").write_text(json.dumps(rows))
    run, flags = tmp_path / "run", ["--dataset", data, "--target", "stephen king", "--num_train_epochs", "1"]
    refused = optout(*flags, "--method", "idk", "--output_dir", run)
    assert refused.code == 2 and "--method idk needs questions, and RWKU's passages have none" in refused.err
    done = optout(*flags, "--method", "npo+rt", "--output_dir", run)
    assert done.code == 0 and f"--model_args pretrained={run} --tasks rwku" in done.err
    given = ["stress", run, "--original", "tiny", "--suite", "standard", "--out"]  # target and data as the manifest has
    done = elude(*given, tmp_path / "stress")
    assert done.code == 0, done.err
    assert [line.split(":")[0] for line in done.out.splitlines()] == ["checkpoint", "original"]
    table = list(csv.DictReader((tmp_path / "stress" / "attacks.csv").open(encoding="utf-8")))
    assert {(row["attack"], row["metric"]) for row in table} == {("relearn_passages", "probability")}
    assert len(table) == 2 * 3 * 4 * 4  # models, rates, points with the start, blanks
    means = [
        sum(float(row["value"]) for row in table if place(row) == at) / 4
        for at in {place(row) for row in table if row["role"] == "original"}
    ]
    assert f"{max(means):.3f} at most" in done.out.splitlines()[1]
    assert "exists already" in elude(*given, tmp_path / "stress").err


def place(row: dict[str, str]) -> tuple[str, ...]:
    return row["role"], row["setting"], row["step"]
