"""``elude``: one file for each command; a command's file is imported when it is asked for (or listed by ``--help``)."""

from __future__ import annotations

import logging
import signal
import sys
from importlib import import_module

import click

from lm_eval_elude import __version__
from lm_eval_elude.errors import end_in_one_line

# Each command is the function of its name in the file of its name. Heavy imports stay inside the functions.
COMMANDS = (
    "path", "targets", "attacks", "build", "probe", "audit", "report", "submit", "verify", "leaderboard",
    "stress",
)  # fmt: skip


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"{__name__}.{cmd_name}"), cmd_name)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="elude")
def cli() -> None:
    """Tools around the ELUDe tasks of lm-evaluation-harness (score with `lm_eval --tasks elude`)."""


def main() -> None:
    """Run the command; bad input is one line and exit code 2, Ctrl-C is 130, SIGTERM 143."""
    for name in ("torchao", "torch.utils._pytree"):  # what they say about themselves on import
        logging.getLogger(name).setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is half made is taken away, as at Ctrl-C
    more_memory = "; what is finished is kept, and the same command goes on where there is more memory"
    advice = {"ValueError": "", "OSError": "", "OutOfMemoryError": more_memory}

    def run() -> None:
        status = cli.main(sys.argv[1:] or ["--help"], prog_name="elude", standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)

    end_in_one_line(run, advice, "interrupted")
