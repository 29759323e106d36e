"""Run what ``make demo`` runs and put what it prints into README.md: ``python benchmarks/readme.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tables import DOCS, put

README = DOCS.parent / "README.md"
COMMANDS = (
    "optout-train --target ronaldo --output-dir runs/demo --overwrite",
    "elude report runs/demo/scores --reference retrained --out runs/demo/report.html",
)


def main() -> None:
    """Both commands, without a terminal: standard error and output as they come."""
    lines = []
    for command in COMMANDS:
        tool, *arguments = command.split()
        done = subprocess.run(
            [Path(sys.executable).with_name(tool), *arguments], text=True, check=True, env=os.environ,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        lines += done.stdout.rstrip().splitlines()
    put(README, "demo", ["```", *lines, "```"])


if __name__ == "__main__":
    main()
