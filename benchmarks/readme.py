"""Run ``make demo`` and put its tables and verdicts into README.md: ``python benchmarks/readme.py``."""

from __future__ import annotations

import argparse
import subprocess
from itertools import groupby

from tables import DOCS, put

# Lines about progress, how to score again, where the report is, and the text over the table of attacks on the weights.
LEFT_OUT = (
    "opt-out and name-swap forget", "no --model", "checkpoint:", "Checkpoint:", "Cristiano Ronaldo: ", "Again:", "### ",
    "Per cent,", "report: ",
)  # fmt: skip


def main() -> None:
    """Standard error and output as they come, without a terminal and without what an installation says."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    subprocess.run(["make", "--silent", "install"], cwd=DOCS.parent, check=True)
    done = subprocess.run(
        ["make", "--silent", "demo"], cwd=DOCS.parent, text=True, check=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    lines = (line for line in done.stdout.splitlines() if not line.endswith("without installation"))
    shown = [line for line in lines if not line.startswith(LEFT_OUT)]
    blocks = ["\n".join(lines) for filled, lines in groupby(shown, key=bool) if filled]
    put(DOCS.parent / "README.md", "demo", ["```", "\n\n".join(blocks), "```"])


if __name__ == "__main__":
    main()
