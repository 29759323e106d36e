"""Run ``make demo`` and put what it prints into README.md: ``python benchmarks/readme.py``."""

from __future__ import annotations

import subprocess

from tables import DOCS, put


def main() -> None:
    """Standard error and output as they come, without a terminal and without what an installation says."""
    subprocess.run(["make", "--silent", "install"], cwd=DOCS.parent, check=True)
    done = subprocess.run(
        ["make", "--silent", "demo"], cwd=DOCS.parent, text=True, check=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    put(DOCS.parent / "README.md", "demo", ["```", *done.stdout.rstrip().splitlines(), "```"])


if __name__ == "__main__":
    main()
