"""``elude``: what it prints, and bad input as one line with exit code 2."""

import sys
from pathlib import Path

import click
import pytest

from lm_eval_elude import cli, task_folder
from lm_eval_elude.cli.path import PLACES
from lm_eval_elude.data.targets import TARGETS


def elude(monkeypatch, *arguments: str) -> int:
    """Exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["elude", *arguments])
    try:
        cli.main()
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


@pytest.mark.parametrize("place", [*PLACES, "tasks"])
def test_places_exist(place, monkeypatch, capsys):
    assert elude(monkeypatch, "path", place) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.is_dir() and (place != "tasks" or path == task_folder())


def test_the_targets_of_a_data_set(monkeypatch, capsys):
    assert elude(monkeypatch, "targets") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [target.slug for target in TARGETS]


def test_without_arguments_the_help_is_shown(monkeypatch, capsys):
    assert elude(monkeypatch) == 0
    assert capsys.readouterr().out.startswith("Usage: elude")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["targets", "--nonsense"], "No such option"),
        (["targets", "--dataset", "no/such"], "neither 'hub', 'mini' nor an existing folder or file"),
        (["targets", "--dataset", "~nobody_here/x"], "neither 'hub', 'mini' nor an existing folder or file"),
        (["targets", "--dataset", "x" * 5_000], "neither 'hub', 'mini' nor an existing folder or file"),
        (["targets", "--dataset", "\udcff/\udcfe"], "neither 'hub', 'mini' nor an existing folder or file"),
        (["targets", "--dataset", "no\x1b[2J\nsuch"], "neither 'hub', 'mini' nor an existing folder or file"),
        (["\x1b[2J"], "No such command '\\x1b[2J'"),
        (["path"], "Missing argument"),
        (["attacks", "--target", "ronaldo", "--llm", "x", "--llm-model", "m", "--attack", "charm"], "--attack charm: "),
        (["attacks", "--dataset", "mini", "--target", "ronaldoo", "--llm", "x", "--llm-model", "m"], "did you mean"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, said, monkeypatch, capsys):
    monkeypatch.delattr(click.exceptions, "NoArgsIsHelpError", raising=False)  # click 8.1 does not have it
    assert elude(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: ") and said in error and error.count("\n") == 1
