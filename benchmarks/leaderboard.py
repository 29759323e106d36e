"""A leaderboard of six bundled-model checkpoints of different methods, the original and the retrained model.

The keeper's file is written, each submission is scored again, and one is withdrawn: a verdict on it by another model.

Run with ``make leaderboard``; a checkpoint, run or submission that is there already is not made again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from commands import call, score

MINI = Path(__file__).resolve().parents[1] / "lm_eval_elude" / "mini"
# The bundled model's recipe but for what is named: short runs, so that some forget too little and some too much.
METHODS = {
    "name-swap": (), "opt-out": (), "npo+rt": ("--num_train_epochs", "10"), "ga": ("--num_train_epochs", "3"),
    "dpo+rt": ("--num_train_epochs", "10"), "idk+rt": ("--num_train_epochs", "10"),
}  # fmt: skip


def output(*arguments: str | Path) -> bytes:
    """What `elude` prints, whether it finds something wrong or not."""
    return subprocess.run([Path(sys.executable).with_name("elude"), *arguments], stdout=subprocess.PIPE).stdout


def forge(folder: Path, original: Path) -> None:
    """The original's submission as one that forgot, which no model is behind."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder)
    file = folder / "submission.json"
    table = json.loads(file.read_text(encoding="utf-8")) | {"role": "submission", "model": "forged"}
    table["files"].pop("optout.json")
    (folder / "optout.json").unlink()
    file.write_text(json.dumps(table), encoding="utf-8")


def main() -> None:
    """Train, score, submit, build."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/board", type=Path)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--stress", action="store_true", help="attack the weights of each, five minutes of two cores")
    asked = parser.parse_args()
    out: Path = asked.out
    models = {"original": MINI / "tiny", "retrained": MINI / "tiny-without-ronaldo"}
    for method in asked.methods:
        models[method] = out / "checkpoints" / method
        if not (models[method] / "optout.json").exists():
            options = ("--target", "ronaldo", "--method", method, "--no_score", *METHODS[method])
            call("optout-train", *options, "--output_dir", models[method], "--overwrite")
    for name, folder in models.items():
        if (submission := out / "submissions" / name).exists():
            continue
        score(folder, out / "runs" / name, "elude", {"target": "ronaldo", "dataset": "mini"})
        role = name if name in ("original", "retrained") else "submission"
        attacks: tuple[str | Path, ...] = ()
        if asked.stress and role == "submission":  # what is finished there is not done again
            attacks = ("--stress", out / "stress" / name)
            call("elude", "stress", folder, "--out", out / "stress" / name)
        about = ("--submitter", "make leaderboard", "--model", name, "--base-model", "tiny", "--role", role)
        call("elude", "submit", out / "runs" / name, "--out", submission, *about, "--method", name, *attacks)
    (out / "board.toml").unlink(missing_ok=True)
    references = [part for role in ("retrained", "original") for part in (f"--{role}", out / "submissions" / role)]
    call("elude", "leaderboard", "table", out, "--name", "ELUDe-mini", "--tokenizer", MINI / "tiny", *references)
    forge(out / "submissions" / "forged", out / "submissions" / "original")
    (out / "verdicts").mkdir(exist_ok=True)
    for name, folder in {**models, "forged": models["retrained"]}.items():
        if name not in ("original", "retrained") and not (verdict := out / "verdicts" / f"{name}.json").exists():
            how: list[str | Path] = ["--tokenizer", MINI / "tiny", "--original", MINI / "tiny", "--seed", "0", "--json"]
            if (again := out / "stress" / name).exists():  # on this machine the keeper's run would have the same bytes
                how += ["--stress", again]
            verdict.write_bytes(output("verify", out / "submissions" / name, "--rescore", folder, *how))
    call("elude", "leaderboard", out, "--out", out / "site")


if __name__ == "__main__":
    main()
