"""A leaderboard of six bundled-model checkpoints of different methods, the original and the retrained model.

Run with ``make leaderboard``; a checkpoint, run or submission that is there already is not made again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

MINI = Path(__file__).resolve().parents[1] / "lm_eval_elude" / "mini"
# The bundled model's recipe but for what is named: short runs, so that some forget too little and some too much.
METHODS = {
    "opt-out-stranger": (), "opt-out": (), "npo+rt": ("--epochs", "10"), "ga": ("--epochs", "3"),
    "dpo+rt": ("--epochs", "10"), "idk+rt": ("--epochs", "10"),
}  # fmt: skip


def call(*command: str | Path) -> None:
    """Run one of our commands; its failure is ours."""
    tool, *arguments = map(str, command)
    done = subprocess.run([Path(sys.executable).with_name(tool), *arguments], env=os.environ)
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    """Train, score, submit, build."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/board", type=Path)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    asked = parser.parse_args()
    out: Path = asked.out
    models = {"original": MINI / "tiny", "retrained": MINI / "tiny-without-ronaldo"}
    for method in asked.methods:
        models[method] = out / "checkpoints" / method
        if not (models[method] / "optout.json").exists():
            options = ("--target", "ronaldo", "--method", method, "--no-score", *METHODS[method])
            call("optout-train", *options, "--output-dir", models[method], "--overwrite")
    for name, folder in models.items():
        if (submission := out / "submissions" / name).exists():
            continue
        if not list((out / "runs" / name).rglob("results_*.json")):
            arguments = (
                "--model_args",
                f"pretrained={folder}",
                "--metadata",
                '{"target": "ronaldo", "dataset": "mini"}',
            )
            call("lm_eval", "run", "--model", "elude", *arguments, "--tasks", "elude", "--log_samples",
                 "--output_path", out / "runs" / name)  # fmt: skip
        role = name if name in ("original", "retrained") else "submission"
        about = ("--submitter", "make leaderboard", "--model", name, "--base-model", "tiny", "--role", role)
        call("elude", "submit", out / "runs" / name, "--out", submission, *about, "--method", name)
    call("elude", "leaderboard", out, "--out", out / "site")


if __name__ == "__main__":
    main()
