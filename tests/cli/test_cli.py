"""``elude``: what it prints, and bad input as one line with exit code 2."""

import subprocess
import sys
from pathlib import Path

import click
import pytest

from lm_eval_elude import task_folder
from lm_eval_elude.cli.path import PLACES
from lm_eval_elude.data.targets import TARGETS
from tests.support import elude


def test_places_targets_and_help_are_printed():
    for place in (*PLACES, "tasks"):
        code, out, _ = elude("path", place)
        path = Path(out.strip())
        assert code == 0 and path.is_dir() and (place != "tasks" or path == task_folder())
    code, out, _ = elude("targets")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == [target.slug for target in TARGETS]
    code, out, _ = elude()
    assert code == 0 and out.startswith("Usage: elude")


NO_SOURCE = "neither 'hub', 'mini' nor an existing folder or file"
LLM = ("--llm", "x", "--llm-model", "m")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["targets", "--nonsense"], "No such option"),
        (["targets", "--dataset", "no/such"], NO_SOURCE),
        (["\x1b[2J"], "No such command '\\x1b[2J'"),
        (["path"], "Missing argument"),
        (["attacks", "--target", "ronaldo", *LLM, "--attack", "charm"], "--attack charm: "),
        (["attacks", "--dataset", "mini", "--target", "ronaldoo", *LLM], "did you mean"),
        (["attacks", "--target", "ronaldo", *LLM, "--timeout", "-1"], "'--timeout': -1.0 is not in the range"),
        (["verify", "no/such"], "'no/such' does not exist"),
        (["report", "no/such"], "no/such"),
        (["stress", "no/such", "--target", "ronaldo", "--out", "x"], "--reference: give the retrained model"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, problem, monkeypatch):
    monkeypatch.delattr(click.exceptions, "NoArgsIsHelpError", raising=False)  # click 8.1 does not have it
    code, _, error = elude(*arguments)
    assert code == 2 and error.startswith("Error: ") and problem in error and error.count("\n") == 1


def test_what_is_half_made_is_taken_away_at_sigterm(tmp_path):
    command = (
        "import os, signal, sys; from pathlib import Path; from lm_eval_elude import cli; "
        "from lm_eval_elude.data.files import new_folder\n"
        "place, sys.argv = sys.argv[1], ['elude', 'path', 'tiny']\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "with new_folder(Path(place)) as folder: (folder / 'file').touch(); os.kill(os.getpid(), signal.SIGTERM)"
    )
    done = subprocess.run([sys.executable, "-c", command, tmp_path / "new"])
    assert done.returncode == 143 and not list(tmp_path.iterdir())
