"""``elude``: what it prints, and bad input as one line with exit code 2."""

import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from lm_eval_elude import task_folder
from lm_eval_elude.cli.path import PLACES
from lm_eval_elude.data.targets import TARGETS
from lm_eval_elude.errors import end_in_one_line
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
        (["targets", "--dataset", "\udcff/\udcfe"], NO_SOURCE),
        (["targets", "--dataset", "no\x1b[2J\nsuch"], NO_SOURCE),
        (["\x1b[2J"], "No such command '\\x1b[2J'"),
        (["path"], "Missing argument"),
        (["attacks", "--target", "ronaldo", *LLM, "--attack", "charm"], "--attack charm: "),
        (["attacks", "--dataset", "mini", "--target", "ronaldoo", *LLM], "did you mean"),
        (["attacks", "--target", "ronaldo", *LLM, "--timeout", "nan"], "'--timeout': nan is no finite number"),
        (["attacks", "--target", "ronaldo", *LLM, "--timeout", "-1"], "'--timeout': -1.0 is not in the range"),
        (["submit", ".", "--out", "a", "--submitter", "b", "--cost", "nan"], "'--cost': nan is no finite number"),
        (["verify", ".", "--tolerance", "nan"], "'--tolerance': nan is no finite number"),
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


def test_help_of_all_commands_loads_no_torch():
    code = "import sys; from lm_eval_elude.cli import cli; cli.main(['--help'], 'elude', standalone_mode=False); "
    done = subprocess.run(
        [sys.executable, "-c", f"{code}print('torch' in sys.modules)"], capture_output=True, text=True
    )
    assert "leaderboard" in done.stdout and done.stdout.splitlines()[-1] == "False", done.stderr[-500:]


def test_an_interrupt_that_a_library_makes_another_error_of_is_one_all_the_same(capsys):
    """Torch does so with one that comes while it reads a file; the same error without an interrupt is not hidden."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)

    def reads(interrupted: bool) -> None:
        try:
            if interrupted:
                signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            pass
        raise ValueError("could not determine the shape")

    try:
        with pytest.raises(SystemExit, match="130"):
            end_in_one_line(lambda: reads(True), {}, "interrupted")
        assert capsys.readouterr().err == "interrupted\n"
        with pytest.raises(ValueError, match="the shape"):
            end_in_one_line(lambda: reads(False), {}, "interrupted")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
