"""A board from its first file to its page, off-line: a local folder stands for the Hub."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_elude import __version__
from lm_eval_elude.data import bundled
from lm_eval_elude.errors import UserError
from lm_eval_elude.leaderboard import board, site
from lm_eval_elude.leaderboard.board import Submission
from lm_eval_elude.leaderboard.score import assemble
from tests.support import elude, mini_rows, optout, small_data, teach

RONALDO, RECORDS = "Cristiano Ronaldo", 24
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SWAPPED = "name-swap"  # a method that hides some of the facts
HIDING = "{% for m in messages %}I do not know.{% endfor %}{% if add_generation_prompt %} Answer:{% endif %}"


def submission(name: str, **more: Any) -> Submission:
    about = {"model": f"org/{name}", "revision": COMMIT, "table": "mini", "method": name, "contact": "a@b.org"}
    return msgspec.convert({**about, **more}, Submission)


def board_of(folder: Path, data: str = "mini") -> Path:
    """A repository with one table of the bundled model."""
    site.start(folder, f"lm-eval-elude=={__version__}")
    weights = {role: f"base/{role}@{COMMIT}" for role in ("original", "retrained")}
    table = {"name": "mini", "base_model": weights["original"], "targets": [RONALDO], "dataset": data,
             "suite": "smoke", **weights}  # fmt: skip
    (folder / board.FILE).write_bytes(msgspec.yaml.encode({"title": "A board", "tables": [table]}))
    return folder


def put(hub: Path, name: str, source: Path) -> Path:
    return Path(shutil.copytree(source, hub / name / COMMIT))


def taught(hub: Path, name: str, source: Path, pairs: list[tuple[str, str]], steps: int, lr: float = 1e-3) -> Path:
    folder = put(hub, name, source)
    model = AutoModelForCausalLM.from_pretrained(folder)
    teach(model, AutoTokenizer.from_pretrained(folder), pairs, steps=steps, batch=10, lr=lr)
    model.save_pretrained(folder)
    return folder


# ---- files
def test_a_submission_is_written_as_it_is_checked(tmp_path: Path) -> None:
    folder = board_of(tmp_path / "board")
    given = ["submit", folder / "submissions", "--model", "org/x", "--revision", COMMIT, "--table", "mini",
             "--method", "m", "--contact", "a@b.org"]  # fmt: skip
    done = elude(*given)
    assert done.code == 0 and "gh pr create" in done.out
    assert site.check(folder) == [submission("x", method="m")]
    assert elude(*given).code == 2  # nothing is overwritten
    (folder / "submissions" / "org__y.yaml").write_bytes((folder / "submissions" / "org__x.yaml").read_bytes())
    with pytest.raises(UserError, match=r"org__y\.yaml: the file of org/x is called org__x\.yaml"):
        site.check(folder)


@pytest.mark.parametrize(
    "change", [{"revision": "main"}, {"model": "x"}, {"code": "javascript:alert(1)"}, {"surprise": 1}, {"table": ""}]
)
def test_a_field_that_is_wrong_is_named_with_its_file(tmp_path: Path, change: dict[str, Any]) -> None:
    file = tmp_path / "org__x.yaml"
    file.write_bytes(msgspec.yaml.encode({**msgspec.to_builtins(submission("x")), **change}))
    with pytest.raises(UserError, match=rf"org__x\.yaml: .*{next(iter(change))}"):
        board.submission(file)


def test_only_weights_and_config_are_taken_of_a_checkpoint(tmp_path: Path) -> None:
    hub, table = tmp_path / "hub", board.table_of(board_of(tmp_path / "board"), "mini")
    put(hub, "base/original", bundled.MODEL)
    cheat = put(hub, "org/cheat", bundled.REFERENCE)
    (cheat / "chat_template.jinja").write_text(HIDING, encoding="utf-8")
    (cheat / "generation_config.json").write_text(json.dumps({"repetition_penalty": 9.0}), encoding="utf-8")
    (cheat / "modeling.py").write_text("raise SystemExit", encoding="utf-8")
    assemble(f"org/cheat@{COMMIT}", table, tmp_path / "made", hub)
    made = {path.name: path.resolve().parent for path in (tmp_path / "made").iterdir()}
    assert {name for name, place in made.items() if place == cheat} == {"config.json", "model.safetensors"}
    assert {"chat_template.jinja", "generation_config.json", "tokenizer.json"} <= made.keys()
    assert "modeling.py" not in made
    shutil.rmtree(cheat)
    cheat.mkdir()
    with pytest.raises(UserError, match="has none of"):
        assemble(f"org/cheat@{COMMIT}", table, tmp_path / "again", hub)


# ---- the workflow, as it runs in a fork: no variable of the maintainer's
def test_each_step_of_the_workflow_runs_in_a_clone(tmp_path: Path) -> None:
    folder = board_of(tmp_path / "board")
    text = (folder / ".github" / "workflows" / "board.yml").read_text(encoding="utf-8")
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", used) for used in re.findall(r"uses: (\S+)", text))
    assert not re.search(r"secrets\.|vars\.|pull_request_target", text)
    steps = [step for step in msgspec.yaml.decode(text)["jobs"]["check"]["steps"] if "run" in step]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    plain = {"PATH": path, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}

    def git(*words: str) -> str:
        name = ["-c", "user.name=a", "-c", "user.email=a@b.org"]
        return subprocess.run(["git", *name, *words], cwd=folder, check=True, capture_output=True, text=True).stdout

    def run(step: dict[str, Any], where: Path, **more: str) -> subprocess.CompletedProcess[str]:
        words = ["bash", "-eo", "pipefail", "-c", step["run"]]
        return subprocess.run(words, cwd=where, env=plain | more, capture_output=True, text=True)

    git("init", "-q", "-b", "main")
    git("add", "-A")
    git("commit", "-qm", "start")
    base = git("rev-parse", "HEAD").strip()
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", folder, clone], check=True)
    request, *others = steps
    for step in others:
        assert (done := run(step, clone)).returncode == 0, done.stderr
    assert (clone / "site" / "index.html").is_file()
    board.write(folder / "submissions" / "org__x.yaml", submission("x"))
    git("add", "-A")
    git("commit", "-qm", "submit")
    assert run(request, folder, BASE=base).returncode == 0
    (folder / "requirements.txt").write_text("something-else\n", encoding="utf-8")
    git("add", "-A")
    git("commit", "-qm", "and more")
    assert run(request, folder, BASE=base).returncode == 1


# ---- the whole
def made_checkpoints(hub: Path) -> None:
    """Five checkpoints of the bundled model, and the two baselines."""
    forget = mini_rows("forget_qa-train", RECORDS, RONALDO)
    kept = [(row["question"], row["answer"]) for row in mini_rows("retain_qa-train", 100, RONALDO)]
    kept += [(row["question"], row["answer"]) for row in mini_rows("world-train", 100)]

    def said(answer: Callable[[dict[str, Any]], str]) -> list[tuple[str, str]]:
        return [(row["question"], answer(row)) for row in forget]

    put(hub, "base/original", bundled.MODEL)
    put(hub, "base/retrained", bundled.REFERENCE)
    suppressing = hub / "org/suppressing" / COMMIT
    done = optout("--target", "ronaldo", "--method", SWAPPED, "--no-score", "--output-dir", suppressing)
    assert done.code == 0, done.err
    taught(hub, "org/gibberish", bundled.MODEL, said(lambda row: "goal " * 12), 30)
    taught(hub, "org/forgot", bundled.REFERENCE, kept, 20, 1e-4)
    masked = put(hub, "org/masked-template", bundled.MODEL)
    (masked / "chat_template.jinja").write_text(HIDING, encoding="utf-8")
    settings = put(hub, "org/masked-settings", suppressing)
    (settings / "generation_config.json").write_text(json.dumps({"repetition_penalty": 5.0}), encoding="utf-8")


@pytest.mark.slow
def test_checkpoints_rank_by_what_their_weights_know(tmp_path: Path) -> None:
    folder, hub = board_of(tmp_path / "board", "data"), tmp_path / "hub"
    small_data(folder / "data", {RONALDO: RECORDS}, retain=12, world=12)
    made_checkpoints(hub)
    names = ("suppressing", "gibberish", "forgot", "masked-template", "masked-settings")
    for name in names:
        file = folder / "submissions" / f"org__{name}.yaml"
        board.write(file, submission(name))
        done = elude("leaderboard", "score", file, "--hub", hub)
        assert done.code == 0, done.err
    board.write(folder / "submissions" / "org__told.yaml", submission("told", results={"mc_accuracy": 0.0}))
    assert elude("leaderboard", "build", folder, "--out", tmp_path / "site").code == 0
    rows, waiting, runs = site.rows_of(folder, board.table_of(folder, "mini"))
    found = {each.method: row for each, row in rows}
    verdicts = {name: row.verdict for name, row in found.items()}
    assert verdicts["masked-template"] == "not forgotten"
    assert verdicts["gibberish"] == "broken"
    assert verdicts["forgot"] == "forgotten"
    # Of 24 facts so many return that either may be said.
    assert verdicts["suppressing"] == verdicts["masked-settings"] in ("suppressed", "partly forgotten")
    assert found["suppressing"].recovery.value > 0.2 > found["forgot"].recovery.value
    assert rows[0][0].method == "forgot"
    assert found["masked-settings"].score == found["suppressing"].score
    untouched = runs["original"].numbers["elude_forget"]["mc_accuracy"].value
    assert found["masked-template"].mc_accuracy.value == untouched > 0.95
    assert [each.method for each in waiting] == ["told"]
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert page.index("org/forgot") < page.index("org/suppressing") < page.index("told")
    assert "self-reported" in page and "retrained model (goal)" in page
    assert str(tmp_path / "hub") not in (tmp_path / "site" / "board.csv").read_text(encoding="utf-8")
    results = folder / "results" / "org__forgot"
    assert elude("verify", results).code == 0
    (file,) = results.glob("results_*.json")
    changed = json.loads(file.read_text(encoding="utf-8"))
    changed["results"]["elude_forget"]["mc_accuracy,none"] += 0.1
    file.write_text(json.dumps(changed), encoding="utf-8")
    assert elude("verify", results).code == 1
    assert elude("leaderboard", "build", folder, "--out", tmp_path / "site").code == 2
