"""The paper's tables on the bundled model: ``python benchmarks/results.py``.

Trains every method on every target of ELUDe-mini with several seeds through ``optout-train`` and scores each checkpoint
with lm-eval's ``elude_quality``. A finished run is kept, so a stopped command goes on where it was. ``--part`` chooses
the main table or one of the ablations; the tables are printed from whatever is finished. ``--table released`` runs the
sweep of lambda under ``--recipe released`` and writes it into ``docs/results.md``; ``--table gradients`` measures what
lambda weighs there and by default.

``--part stranger`` compares the methods that forget like a model that never knew, and what each piece of them buys, by
all measures: attacks, membership and the distance to the model trained without the target. Its table is written into
``docs/results.md``. References of other targets than Ronaldo are trained by ``lm_eval_elude.mini.train_tiny --without``
into ``FOLDER/SLUG`` of ``--references FOLDER``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tables import DOCS, markdown, put

from lm_eval_elude.core.manifest import file_hashes
from lm_eval_elude.metrics.estimates import exact
from lm_eval_elude.metrics.quality import forget_quality, retain_quality
from optout_train.config import BUNDLED_MODEL
from optout_train.validation import COLLAPSE

TARGETS = ("cristiano_ronaldo", "lionel_messi", "taylor_swift", "stephen_hawking", "michael_jordan")
MAIN = ("ga", "dpo", "npo", "idk", "ga+rt", "dpo+rt", "npo+rt", "idk+rt", "opt-out")
DISTANCES = ("opt-out", "opt-out-manhattan", "opt-out-euclidean", "opt-out-chebyshev", "opt-out-cosine")
ABLATED = ("ga+rt", "dpo+rt", "npo+rt", "idk+rt", "opt-out")
LAMBDAS = (0.0, 0.1, 10.0, 100.0, 1e3, 1e4, 1e5)
RELEASED_LAMBDAS = (0.0, 0.1, 1.0, 10.0, 100.0, 1e3)
# Where the released recipe forgets the bundled model's target without destroying all else: it forgets faster.
RELEASED = ("--recipe", "released", "--epochs", "10", "--learning-rate", "3e-4")
COLUMNS = (
    ("FQ", "elude_quality", "forget_quality"), ("P", "elude_forget", "probability"),
    ("ROUGE", "elude_forget", "rougeL_recall"), ("TR", "elude_forget", "truth_ratio"),
    ("degen.", "elude_forget", "degenerate"), ("RQ", "elude_quality", "retain_quality"),
    ("degen. retain", "elude_retain", "degenerate"), ("degen. world", "elude_world", "degenerate"),
)  # fmt: skip
# Every measure that a model which never knew is compared in.
DISTANCE_COLUMNS = (
    ("AUC", "elude_mia", "mia_auc"), ("reverse FQ", "elude_attack_reverse_query", "forget_quality"),
    ("nine FQ", "elude_attacks", "forget_quality"), ("KS p", "elude_forget", "ks_p_value"),
)  # fmt: skip
STRANGER: dict[str, tuple[str, ...]] = {
    "npo+rt": ("--method", "npo+rt"),
    "opt-out": ("--method", "opt-out"),
    "opt-out-stranger": ("--method", "opt-out-stranger"),
    "without transport": ("--method", "stranger+rt"),
    "without the teachers' distributions": ("--method", "opt-out-stranger", "--teachers", "0"),
    "without a bound": ("--method", "opt-out-stranger", "--bound", "100"),
    "without elicitation": ("--method", "opt-out-stranger", "--elicit", "0"),
    "without reverse": ("--method", "opt-out-stranger", "--no-reverse"),
    "lambda 10": ("--method", "opt-out-stranger", "--lambda", "10"),
    "lambda 100": ("--method", "opt-out-stranger", "--lambda", "100"),
    "answers refuse": ("--method", "opt-out-stranger", "--answers", "refuse"),
}
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
        elif part == "released":
            yield from (
                Run(f"released lambda {v:g}", TARGETS[0], seed, (*RELEASED, "--lambda", f"{v:g}"))
                for v in RELEASED_LAMBDAS
            )
        elif part == "neighbours":
            for method in ABLATED:
                yield Run(method, TARGETS[0], seed, ("--method", method))
                yield Run(f"{method} world only", TARGETS[0], seed, ("--method", method, "--world-only"))
        elif part == "stranger":
            yield from (Run(row, TARGETS[0], seed, arguments) for row, arguments in STRANGER.items())
        elif part == "stranger-targets":
            rows = ("opt-out", "opt-out-stranger")
            yield from (Run(row, target, seed, STRANGER[row]) for target in TARGETS[1:] for row in rows)


def score(folder: str, metadata: dict[str, Any], task: str = "elude_quality") -> dict[str, float]:
    """The columns of the tables for one checkpoint, from lm-eval; those of ``task`` that it reports."""
    import lm_eval

    results = lm_eval.simple_evaluate(
        model="elude", model_args={"pretrained": folder, "dtype": "float32"}, tasks=[task], batch_size=32,
        metadata={"dataset": "mini", **metadata}, log_samples=False, bootstrap_iters=1,
    )["results"]  # fmt: skip
    wanted = {(task, metric) for _, task, metric in (*COLUMNS, *DISTANCE_COLUMNS)}
    wanted |= {(task, metric) for task in ("elude_retain", "elude_world") for metric in TRIPLE}
    found = {f"{task}/{metric}": results.get(task, {}).get(f"{metric},none") for task, metric in sorted(wanted)}
    return {key: value for key, value in found.items() if isinstance(value, float)}


def over_targets(runs_of_seed: list[dict[str, float]]) -> dict[str, float]:
    """Each value averaged over targets, then FQ and RQ formed from the averages, as the paper's tables are."""
    shared = set[str].intersection(*({*run} for run in runs_of_seed))
    values = {key: statistics.mean(run[key] for run in runs_of_seed) for key in shared}
    forget, retain, world = ([values[f"elude_{s}/{m}"] for m in TRIPLE] for s in ("forget", "retain", "world"))
    values["elude_quality/forget_quality"] = forget_quality(*map(exact, forget)).value
    values["elude_quality/retain_quality"] = retain_quality([*map(exact, retain)], [*map(exact, world)]).value
    return values


def measure(run: Run, work: Path, task: str, references: Path | None) -> None:
    """Train and score one run, unless its result is there."""
    result = work / f"{run.name}.json"
    if result.exists():
        return
    folder = work / f"checkpoint-{os.getpid()}"
    command = [sys.executable, "-m", "optout_train.cli", "--target", run.target, "--seed", str(run.seed)]
    command += ["--output-dir", str(folder), "--overwrite", "--no-score", "--no-validate", *run.arguments]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.monotonic() - started
    if done.returncode:
        print(f"{run.name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return
    given = {"reference": str(references / run.target)} if references and (references / run.target).is_dir() else {}
    values = score(str(folder), {"target": run.target, **given}, task)
    result.write_text(json.dumps({"run": run._asdict(), "values": values, "seconds": seconds}))
    print(run.name, {k.split("/")[1]: round(100 * v, 1) for k, v in values.items()}, flush=True)


def baselines(work: Path, task: str, references: Path | None) -> None:
    """The original, the guardrail prompt, and the models retrained without a target."""
    from optout_train.config import BUNDLED_MODEL, BUNDLED_REFERENCE

    jobs: list[tuple[str, str, str, dict[str, Any]]] = [("original", str(BUNDLED_MODEL), t, {}) for t in TARGETS]
    jobs += [("guardrail", str(BUNDLED_MODEL), t, {"guardrail": True}) for t in TARGETS]
    jobs += [("retrained without", str(BUNDLED_REFERENCE), TARGETS[0], {})]
    jobs += [("retrained without", str(references / t), t, {}) for t in TARGETS[1:] if references]
    for row, folder, target, extra in jobs:
        result = work / f"{Run(row, target, 0, ()).name}.json"
        if not result.exists() and Path(folder).is_dir():
            values = score(folder, {"target": target, **extra}, task)
            result.write_text(json.dumps({"run": Run(row, target, 0, ())._asdict(), "values": values}))


def table(
    rows: list[str],
    work: Path,
    seeds: int,
    targets: tuple[str, ...],
    columns: tuple[tuple[str, str, str], ...] = COLUMNS,
) -> list[str]:
    """A Markdown table in per cent: mean and standard deviation over seeds of the mean over targets."""
    found = [json.loads(path.read_text()) for path in sorted(work.glob("*.json"))]
    keys = [f"{task}/{metric}" for _, task, metric in columns]
    original = [f["values"]["elude_quality/retain_quality"] for f in found if f["run"]["row"] == "original"]
    lines = [
        "| | n | " + " | ".join(name for name, _, _ in columns) + " | |",
        "|---|---|" + "---|" * (len(columns) + 1),
    ]
    for row in rows:
        of_row = [f for f in found if f["run"]["row"] == row and f["run"]["target"] in targets]
        seeded = [[f["values"] for f in of_row if f["run"]["seed"] == seed] for seed in range(seeds)]
        by_seed = [over_targets(values) for values in seeded if values]
        if not by_seed:
            continue
        cells = []
        for key in keys:
            values = [100 * s[key] for s in by_seed if key in s]
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.1f}{spread}" if values else "-")
        kept = statistics.mean(s["elude_quality/retain_quality"] for s in by_seed)
        mark = "collapsed" if original and kept < COLLAPSE * statistics.mean(original) else ""
        lines.append(f"| {row} | {len(of_row)} | " + " | ".join(cells) + f" | {mark} |")
    return lines


def gradients_table() -> None:
    """What lambda weighs: norms of the gradients of Eq. 8's terms after one epoch of each recipe; written into docs."""
    import torch
    from accelerate import Accelerator

    from optout_train import setup, step
    from optout_train.config import build_config
    from optout_train.sources import source_of

    setup.quiet()
    rows = []
    for recipe in ("paper", "released"):
        config = build_config({"target": TARGETS[:1], "recipe": recipe, "validate": False})
        run = setup.prepare(config, source_of(config), Accelerator(cpu=True), lambda line: None)
        for number, indices in enumerate(run.plan[0], 1):
            step.take_step(run, number, sum(map(len, run.plan)), indices)

        def norm(run: setup.Setup = run) -> float:
            grads = [p.grad.norm() for p in run.model.parameters() if p.grad is not None]
            run.optimizer.zero_grad(set_to_none=True)
            return float(torch.stack(grads).norm())

        norms = []
        for side in step.passes(run, run.plan[1][0]):
            step.backward(run, side)
            norms.append(norm())
        distance = float(run.transport.add_gradient(config.transport_weight, len(run.plan[0]) + 1))
        norms.append(norm())
        cells = [f"{value:.3g}" for value in (*norms, distance)]
        rows.append([f"`--recipe {recipe}`", *cells])
    head = ["after one epoch", "forget term", "retain terms", f"λ term at λ = {config.transport_weight:g}", "distance"]
    put(DOCS / "results.md", "gradients", ["", *markdown(head, rows), ""])


def released_table(work: Path, seeds: int, *, train: bool) -> None:
    """Run the sweep of lambda under the released recipe, as far as it is not finished, and write its table."""
    for run in runs("released", seeds) if train else ():
        measure(run, work, "elude_quality", None)
    base = file_hashes(BUNDLED_MODEL)["model.safetensors"][:12]
    rows = [f"released lambda {v:g}" for v in RELEASED_LAMBDAS]
    note = f"`optout-train --target ronaldo {' '.join(RELEASED)} --lambda λ`, base weights {base}; n: seeds."
    put(DOCS / "results.md", "released", ["", note, "", *table(rows, work, seeds, TARGETS[:1]), ""])


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/results"))
    parser.add_argument("--part", nargs="*", default=["main", "distance", "lambda", "neighbours"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--table", choices=["released", "gradients"], help="run what one table needs and write it into docs/"
    )
    parser.add_argument("--references", type=Path, help="folder of models trained without a target, named by its slug")
    parser.add_argument("--tables", action="store_true", help="only print the tables of what is finished")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if arguments.table == "gradients":
        gradients_table()
        return
    if arguments.table:
        arguments.work.mkdir(parents=True, exist_ok=True)
        released_table(arguments.work, arguments.seeds, train=not arguments.tables)
        return
    by_all = any(part.startswith("stranger") for part in arguments.part)
    work = arguments.work / "stranger" if by_all else arguments.work
    work.mkdir(parents=True, exist_ok=True)
    if not arguments.tables:
        task = "elude" if by_all else "elude_quality"
        baselines(work, task, arguments.references)
        for part in arguments.part:
            for run in runs(part, arguments.seeds):
                measure(run, work, task, arguments.references)
    if by_all:
        columns = (*COLUMNS, *DISTANCE_COLUMNS)
        rows = ["original", "retrained without", *STRANGER]
        lines = table(rows, work, arguments.seeds, TARGETS[:1], columns)
        for target in TARGETS[1:]:
            some = ["original", "retrained without", "opt-out", "opt-out-stranger"]
            if len(found := table(some, work, arguments.seeds, (target,), columns)) > 2:
                lines += ["", f"{target}:", "", *found]
        print(*lines, sep="\n")
        put(DOCS / "results.md", "stranger", lines)
        return
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
