"""The paper's tables on the bundled model: ``python benchmarks/results.py``.

Trains every method on every target of ELUDe-mini with several seeds through ``optout-train`` and scores each checkpoint
with lm-eval's ``elude_quality``. A finished run is kept, so a stopped command goes on where it was. ``--part`` chooses
the main table or one of the ablations; the tables are printed from whatever is finished.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_elude.metrics.estimates import exact
from lm_eval_elude.metrics.quality import forget_quality, retain_quality
from optout_train.validation import COLLAPSE

TARGETS = ("cristiano_ronaldo", "lionel_messi", "taylor_swift", "stephen_hawking", "michael_jordan")
MAIN = ("ga", "dpo", "npo", "idk", "ga+rt", "dpo+rt", "npo+rt", "idk+rt", "opt-out")
DISTANCES = ("opt-out", "opt-out-manhattan", "opt-out-euclidean", "opt-out-chebyshev", "opt-out-cosine")
ABLATED = ("ga+rt", "dpo+rt", "npo+rt", "idk+rt", "opt-out")
LAMBDAS = (0.0, 0.1, 10.0, 100.0, 1e3, 1e4, 1e5)
COLUMNS = (
    ("FQ", "elude_quality", "forget_quality"), ("P", "elude_forget", "probability"),
    ("ROUGE", "elude_forget", "rougeL_recall"), ("TR", "elude_forget", "truth_ratio"),
    ("degen.", "elude_forget", "degenerate"), ("RQ", "elude_quality", "retain_quality"),
    ("degen. retain", "elude_retain", "degenerate"), ("degen. world", "elude_world", "degenerate"),
)  # fmt: skip
TRIPLE = ("probability", "rougeL_recall", "truth_ratio")


class Run(NamedTuple):
    """One checkpoint to train and score: the table row it belongs to and the arguments of ``optout-train``."""

    row: str
    target: str
    seed: int
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.row}-{self.target}-{self.seed}".replace(" ", "_")


def runs(part: str, seeds: int) -> Iterator[Run]:
    """The runs of one part, seed by seed, so that an early stop leaves whole tables with fewer seeds."""
    for seed in range(seeds):
        if part == "main":
            yield from (Run(m, t, seed, ("--method", m)) for t in TARGETS for m in MAIN)
        elif part == "distance":
            yield from (Run(m, TARGETS[0], seed, ("--method", m)) for m in DISTANCES)
        elif part == "lambda":
            yield from (Run(f"lambda {v:g}", TARGETS[0], seed, ("--lambda", f"{v:g}")) for v in LAMBDAS)
        elif part == "neighbours":
            for method in ABLATED:
                yield Run(method, TARGETS[0], seed, ("--method", method))
                yield Run(f"{method} world only", TARGETS[0], seed, ("--method", method, "--world-only"))


def score(folder: str, metadata: dict[str, Any]) -> dict[str, float]:
    """The columns of the tables for one checkpoint, from lm-eval."""
    import lm_eval

    results = lm_eval.simple_evaluate(
        model="elude", model_args={"pretrained": folder, "dtype": "float32"}, tasks=["elude_quality"], batch_size=32,
        metadata={"dataset": "mini", **metadata}, log_samples=False, bootstrap_iters=1,
    )  # fmt: skip
    wanted = {(task, metric) for _, task, metric in COLUMNS}
    wanted |= {(task, metric) for task in ("elude_retain", "elude_world") for metric in TRIPLE}
    return {f"{task}/{metric}": results["results"][task][f"{metric},none"] for task, metric in sorted(wanted)}


def over_targets(runs_of_seed: list[dict[str, float]]) -> dict[str, float]:
    """Each value averaged over targets, then FQ and RQ formed from the averages, as the paper's tables are."""
    values = {key: statistics.mean(run[key] for run in runs_of_seed) for key in runs_of_seed[0]}
    forget, retain, world = ([values[f"elude_{s}/{m}"] for m in TRIPLE] for s in ("forget", "retain", "world"))
    values["elude_quality/forget_quality"] = forget_quality(*map(exact, forget)).value
    values["elude_quality/retain_quality"] = retain_quality([*map(exact, retain)], [*map(exact, world)]).value
    return values


def measure(run: Run, work: Path) -> None:
    """Train and score one run, unless its result is there."""
    result = work / f"{run.name}.json"
    if result.exists():
        return
    folder = work / f"checkpoint-{os.getpid()}"
    command = [sys.executable, "-m", "optout_train.cli", "--target", run.target, "--seed", str(run.seed)]
    command += ["--output-dir", str(folder), "--overwrite", "--no-score", "--no-validate", *run.arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{run.name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return
    values = score(str(folder), {"target": run.target})
    result.write_text(json.dumps({"run": run._asdict(), "values": values}))
    print(run.name, {k.split("/")[1]: round(100 * v, 1) for k, v in values.items()}, flush=True)


def baselines(work: Path) -> None:
    """The original, the guardrail prompt, and the model retrained without Ronaldo."""
    from optout_train.config import BUNDLED_MODEL, BUNDLED_REFERENCE

    jobs: list[tuple[str, str, str, dict[str, Any]]] = [("original", str(BUNDLED_MODEL), t, {}) for t in TARGETS]
    jobs += [("guardrail", str(BUNDLED_MODEL), t, {"guardrail": True}) for t in TARGETS]
    jobs += [("retrained without", str(BUNDLED_REFERENCE), TARGETS[0], {})]
    for row, folder, target, extra in jobs:
        result = work / f"{Run(row, target, 0, ()).name}.json"
        if not result.exists():
            values = score(folder, {"target": target, **extra})
            result.write_text(json.dumps({"run": Run(row, target, 0, ())._asdict(), "values": values}))


def table(rows: list[str], work: Path, seeds: int, targets: tuple[str, ...]) -> list[str]:
    """A Markdown table in per cent: mean and standard deviation over seeds of the mean over targets."""
    found = [json.loads(path.read_text()) for path in sorted(work.glob("*.json"))]
    keys = [f"{task}/{metric}" for _, task, metric in COLUMNS]
    original = [f["values"]["elude_quality/retain_quality"] for f in found if f["run"]["row"] == "original"]
    lines = [
        "| | n | " + " | ".join(name for name, _, _ in COLUMNS) + " | |",
        "|---|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    for row in rows:
        of_row = [f for f in found if f["run"]["row"] == row and f["run"]["target"] in targets]
        seeded = [[f["values"] for f in of_row if f["run"]["seed"] == seed] for seed in range(seeds)]
        by_seed = [over_targets(values) for values in seeded if values]
        if not by_seed:
            continue
        cells = []
        for key in keys:
            values = [100 * s[key] for s in by_seed]
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.1f}{spread}")
        kept = statistics.mean(s["elude_quality/retain_quality"] for s in by_seed)
        mark = "collapsed" if original and kept < COLLAPSE * statistics.mean(original) else ""
        lines.append(f"| {row} | {len(of_row)} | " + " | ".join(cells) + f" | {mark} |")
    return lines


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/results"))
    parser.add_argument("--part", nargs="*", default=["main", "distance", "lambda", "neighbours"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tables", action="store_true", help="only print the tables of what is finished")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    arguments.work.mkdir(parents=True, exist_ok=True)
    if not arguments.tables:
        baselines(arguments.work)
        for part in arguments.part:
            for run in runs(part, arguments.seeds):
                measure(run, arguments.work)
    one = TARGETS[:1]
    for title, rows, targets in (
        ("main", ["original", "guardrail", *MAIN], TARGETS),
        ("cristiano_ronaldo", ["original", "retrained without", *MAIN], one),
        ("distance", list(DISTANCES), one),
        ("lambda", [f"lambda {v:g}" for v in LAMBDAS], one),
        ("neighbours", [m + s for m in ABLATED for s in ("", " world only")], one),
    ):
        print(f"\n### {title}\n", *table(rows, arguments.work, arguments.seeds, targets), sep="\n")


if __name__ == "__main__":
    main()
