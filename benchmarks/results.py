"""The paper's tables on the bundled model: ``python benchmarks/results.py``.

Trains what the tables of ``docs/results.md`` show (``--part``; all of them by default) through ``optout-train``, scores
each checkpoint with lm-eval (:data:`WHOLE` with all of ``elude``, the others with ``elude_quality``), and keeps each
finished run in ``--work``: a stopped command goes on where it was. What ``docs/results.json`` has of today's bundled
weights is not made again, so take out a method's runs there when its preset changes. ``--write`` only puts what is
finished there and fills ``docs/results.md`` with ``elude tables``; a test holds that its tables are those of the runs.

References of other targets than Ronaldo are trained first, ten minutes of a core each, into ``WORK/references/BASE``.
What is kept was run with version 0.1, whose names of methods the plan has.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import pandas as pd
from tables import DOCS, markdown, put, student

from lm_eval_elude import task_folder
from lm_eval_elude.attacks.builders import ATTACKS
from lm_eval_elude.cli.tables import tables
from lm_eval_elude.data import bundled
from lm_eval_elude.data.dataset import resolve_targets
from lm_eval_elude.data.files import file_hashes
from lm_eval_elude.data.manifest import FILE_NAME, read_manifest
from lm_eval_elude.report import kept, paper
from lm_eval_elude.report.rows import COST, FQ, RQ, Key
from lm_eval_elude.scoring.likelihood import harmonic_mean
from lm_eval_elude.scoring.metrics import METRICS
from lm_eval_elude.scoring.units import number, scale, unit

PAGE, DATA, NORMS = DOCS / "results.md", DOCS / "results.json", DOCS / "gradients.json"
GRADIENTS = ("forget term", "retain terms", "λ term", "distance")
BASELINES = ("original", "guardrail", "retrained without")
AFTER = "made by "  # in an argument: the checkpoint of another row with the same target and seed
Rows = dict[str, tuple[str, ...]]  # the arguments of ``optout-train`` by row
PLAN: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TARGETS = tuple(PLAN["targets"])
RONALDO = TARGETS[0]
COMPARED: dict[str, Key] = {label: (task, metric) for label, (task, metric) in PLAN["compared"].items()}
GRIDS: dict[str, Rows] = {
    method: {
        f"{method} at {rate}": ("--method", method, "--learning-rate", rate)
        + (("--model", f"{AFTER}npo+rt") if method == "undo+rt" else ())  # UNDO distils what NPO+RT has made
        for rate in rates
    }
    for method, rates in PLAN["rates"].items()
}
for sam_method, radii in PLAN["sam"].items():
    GRIDS[f"{sam_method} with sam"] = {
        f"{sam_method} with sam {rho}": ("--method", sam_method, "--sam", rho) for rho in radii
    }
# What can be run: on which targets, which rows. One part has its weights attacked; one chooses rates, with one seed.
RELEARNING, TRIED = "relearning", "others"
PARTS: dict[str, tuple[tuple[str, ...], Rows]] = {
    name: (
        {"first": TARGETS[:1], "others": TARGETS[1:], "all": TARGETS}[part["targets"]],
        {method: ("--method", method) for method in part.get("methods", ())}
        | {row: tuple(shlex.split(flags)) for row, flags in part.get("rows", {}).items()},
    )
    for name, part in PLAN["parts"].items()
}
PARTS[TRIED] = TARGETS[:1], {row: arguments for grid in GRIDS.values() for row, arguments in grid.items()}
# Rows that are also attacked by prompts.
WHOLE = (*BASELINES, *PLAN["attacked"], *PARTS["stranger"][1])
# What is kept of a run: every column of its tables.
KEPT_TABLES = ("quality", "never_knew", "adversary", "membership", "full")
NUMBERS = {column.key for name in KEPT_TABLES for column in paper.COLUMNS[name]} | {*COMPARED.values()}
NUMBERS |= {(f"elude_attack_{name}", metric) for name in (*ATTACKS, "none") for metric in (FQ[1], "truth_first")}


class Run(NamedTuple):
    """One checkpoint to train and score: the table row it belongs to and the arguments of ``optout-train``."""

    row: str
    target: str
    seed: int
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.row}-{self.target}-{self.seed}".replace(" ", "_")


def base() -> str:
    """What tells the bundled weights of today from others."""
    return file_hashes(bundled.MODEL)["model.safetensors"][:12]


def score(folder: Path, task: str, metadata: dict[str, Any], answers: Path) -> dict[Key, float]:
    """The columns of the tables for one checkpoint, from lm-eval; ``answers`` keeps what it and others answer."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    arguments = {"pretrained": str(folder), "dtype": "float32"}
    # Without the harness's own tasks, which take 20 seconds to index; the manager wants the model's arguments, too.
    tasks = TaskManager(
        include_path=task_folder(), include_defaults=False, metadata={**arguments, "dataset": "mini", **metadata}
    )
    results = lm_eval.simple_evaluate(
        model="elude", model_args=arguments, tasks=[task], task_manager=tasks, batch_size=32, log_samples=False,
        bootstrap_iters=1, use_cache=str(answers),
    )["results"]  # fmt: skip
    values = {(task, metric): results.get(task, {}).get(f"{metric},none") for task, metric in sorted(NUMBERS)}
    return {key: round(value, 6) for key, value in values.items() if isinstance(value, float) and math.isfinite(value)}


def reference(target: str, work: Path) -> Path:
    """The model that never knew a target; it is trained where it is not there yet."""
    if target == RONALDO:
        return bundled.REFERENCE
    folder = work / "references" / base() / target
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.with_name(f".{target}.lock")):  # a second process waits for the first one's
        if (folder / FILE_NAME).is_file():  # written last
            return folder
        (named,) = resolve_targets("mini", [target])
        trainer = [sys.executable, "-m", "tools.mini.train_tiny"]
        command = [*trainer, "--without", named.name, "--out", str(folder.resolve())]
        subprocess.run(command, cwd=DOCS.parent, check=True)
        return folder


def checkpoint(run: Run, work: Path) -> Path | None:
    """The model of a run, None where it failed. What is trained is kept, so that it can be scored anew."""
    if run.row == "retrained without":
        return reference(run.target, work)
    if run.row in BASELINES:
        return bundled.MODEL
    folder = work / "checkpoints" / base() / run.name
    if not (folder / FILE_NAME).is_file():
        command = [sys.executable, "-m", "optout_train.cli", "--target", run.target, "--seed", str(run.seed)]
        command += ["--output_dir", str(folder), "--overwrite", "--no_score", "--save_strategy", "no"]
        for argument in run.arguments:
            if argument.startswith(AFTER):
                other = argument.removeprefix(AFTER)
                argument = str(checkpoint(run._replace(row=other, arguments=("--method", other)), work))
            command.append(argument)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{run.name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            return None
    return folder


def stress(model: Path, run: Run, work: Path) -> dict[Key, float]:
    """What is known of one half of the facts before and after relearning the other, after rounding, and the depth."""
    from lm_eval_elude.scoring.runs import SUMMARY
    from lm_eval_elude.scoring.settings import Settings
    from lm_eval_elude.stress.outcome import CHECKPOINT, ORIGINAL, REFERENCE, Outcome, recoveries
    from lm_eval_elude.stress.suite import Stress
    from lm_eval_elude.stress.weights import WEIGHT_ATTACKS

    models = {CHECKPOINT: str(model), REFERENCE: str(reference(run.target, work)), ORIGINAL: str(bundled.MODEL)}
    (named,) = resolve_targets("mini", [run.target])
    attacks = [WEIGHT_ATTACKS[name] for name in ("relearn_half", "quantise")]
    out = work / "stress" / base() / run.name
    suite = Stress(models, Settings(dataset="mini", targets=(named.name,)), attacks=attacks)
    others = out.parent.glob(f"*-{run.target}-*/{SUMMARY}")  # finished ones, whose reference is the same
    suite.run(out, print, next((other.parent for other in others if other.parent != out), None))
    outcome = Outcome(out)
    found = {attack: worst.recovery for attack, worst in outcome.worst.items()}
    found["before"] = recoveries(outcome.known, outcome.known)
    values = {
        (f"{paper.STRESS} {attack}", metric): estimate.value
        for attack, recovery in found.items()
        for metric, estimate in recovery.items()
    }
    return values | ({(paper.STRESS, "depth"): outcome.depth.value} if outcome.depth else {})


def finished(run: Run, work: Path) -> kept.Kept | None:
    """What is kept of a run: in ``work``, else in :data:`DATA`, where the weights and arguments are the same."""
    if here := kept.read(work / f"{run.name}.json"):
        return here
    before = kept.read(DATA)
    if not before or before.base != base() or before.arguments.get(run.row) != [*run.arguments]:
        return None
    data = [row for row in before.data if row[:3] == (run.row, run.target, run.seed)]
    return kept.Kept(before.base, {run.row: [*run.arguments]}, before.columns, data) if data else None


def best(method: str, work: Path) -> Run | None:
    """The run of a method's grid with the highest harmonic mean of FQ and RQ, if all of them are finished."""
    found = []
    for row, arguments in GRIDS[method].items():
        run = Run(row, RONALDO, 0, arguments)
        if not (runs := finished(run, work)):
            return None
        (numbers,) = kept.rows(runs)
        found.append((harmonic_mean([numbers.numbers[key].value for key in (FQ, RQ)]), run))
    return max(found)[1]


def measure(run: Run, work: Path, attacked: bool = False) -> None:
    """Train and score one run, unless its result is there; ``attacked`` by prompts and in its weights, too."""
    before = finished(run, work)
    done = {(task, metric) for *_, task, metric, _ in before.data} if before else set()
    if before and (not attacked or (paper.STRESS, "depth") in done):
        return
    if (model := checkpoint(run, work)) is None:
        return
    guardrail = run.row == "guardrail"
    metadata: dict[str, Any] = {"target": run.target, "guardrail": guardrail, "original": str(bundled.MODEL)}
    if run.row != "retrained without":
        metadata["reference"] = str(reference(run.target, work))
    if before and ("elude_attacks", "truth_first") in done:
        values = {(task, metric): value for *_, task, metric, value in before.data}
    else:
        task = "elude" if attacked or run.row in WHOLE else "elude_quality"
        values = score(model, task, metadata, work / "answers" / base() / run.name)
    if run.row == "retrained without":  # how far the reference is from itself says nothing
        values = {key: value for key, value in values.items() if not METRICS[key[1]].is_distance}
    if attacked:
        values |= stress(model, run, work)
    manifest = read_manifest(model)
    if run.row not in BASELINES and manifest and manifest.processor_seconds is not None:
        values.setdefault(COST["processor"], manifest.processor_seconds)  # where it is only attacked now, it stays
    data = [(run.row, run.target, run.seed, *key, value) for key, value in values.items()]
    kept.write(work / f"{run.name}.json", kept.Kept(base(), {run.row: [*run.arguments]}, list(kept.COLUMNS), data))
    shown = {name: number(values[key], unit(key[1])) for name, key, _ in paper.COLUMNS["never_knew"] if key in values}
    print(run.name, shown, flush=True)


def write(work: Path) -> None:
    """Put the finished runs of ``work`` into ``docs/results.json``, in place of its own, and make the tables of it."""
    files = [kept.read(path) for path in (DATA, *sorted(work.glob("*.json")))]
    of_today = [runs for runs in files if runs and runs.base == base()]
    numbers = {row[:-1]: row for runs in of_today for row in runs.data}
    arguments = {run: given for runs in of_today for run, given in runs.arguments.items()}
    kept.write(DATA, kept.Kept(base(), dict(sorted(arguments.items())), list(kept.COLUMNS), [*numbers.values()]))
    put(PAGE, "differences", difference_table())
    put(PAGE, "differences of other authors' methods", others_table())
    tables.main([str(DATA), "--page", str(PAGE)], standalone_mode=False)


def difference_table() -> list[str]:
    """The lines of the table of differences between our rows: paired differences over the five targets."""
    numbers = kept_numbers()
    rows = [[label, *(difference(numbers, key, *pair) for pair in PLAN["pairs"])] for label, key in COMPARED.items()]
    return ["", *markdown(["", *(f"{more} less {less}" for more, less in PLAN["pairs"])], rows), ""]


def others_table() -> list[str]:
    """The lines of the table of what each method of other authors has less ours, paired over the targets.

    Its row is the one of its grid that was run on all of them.
    """
    numbers = kept_numbers()
    tried = [row for grid in GRIDS.values() for row in grid if row in numbers.index.unique("run")]
    methods = [row for row in tried if {*TARGETS} <= {*numbers.loc[row].index.unique("target")}]
    rows = [
        [method, *(difference(numbers, COMPARED[label], method, PLAN["ours"]) for label in PLAN["better"])]
        for method in methods
    ]
    return ["", *markdown([f"less {PLAN['ours']}", *PLAN["better"]], rows), ""]


def kept_numbers() -> pd.DataFrame:
    """What :data:`DATA` holds: a row for each run, target and seed, a column for each task and metric."""
    runs = kept.read(DATA)
    assert runs
    return runs.frame.pivot_table(index=["run", "target", "seed"], columns=["task", "metric"], values="value")


def difference(numbers: pd.DataFrame, key: Key, more: str, less: str) -> str:
    """A paired difference with its 95 % interval, from each target's mean over the seeds that both rows have.

    A row without training has seed 0 alone, which then stands beside all seeds of the other.
    """
    sides = [numbers.loc[row][key].dropna().unstack("seed") for row in (more, less)]
    if {more, less} & {*BASELINES}:
        sides = [side.mean(axis=1) for side in sides]
        by_target = sides[0] - sides[1]
    else:  # a seed that one of them lacks is left out
        by_target = (sides[0] - sides[1]).mean(axis=1)
    gaps = by_target.reindex(TARGETS).to_numpy() * scale(unit(key[1]))
    middle, half = student(gaps)
    interval = f"{middle:+.1f} [{middle - half:+.1f}, {middle + half:+.1f}]"
    return "–" if math.isnan(half) else f"**{interval}**" if abs(middle) > half else interval


def gradient_table() -> list[str]:
    """The lines of the table of the kept gradients."""
    kept_norms = json.loads(NORMS.read_text(encoding="utf-8"))
    head = [f"{name} at λ = {kept_norms['lambda']:g}" if "λ" in name else name for name in kept_norms["columns"]]
    norms = kept_norms["recipes"].items()
    rows = [[f"`--recipe {recipe}`", *(f"{value:.3g}" for value in values)] for recipe, values in norms]
    return ["", *markdown(["after one epoch", *head], rows), ""]


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/results"))
    parser.add_argument("--part", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2], help="seed by seed: an early stop has fewer")
    parser.add_argument("--write", action="store_true", help="run nothing: write the tables of what is finished")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    arguments.work.mkdir(parents=True, exist_ok=True)
    if not arguments.write:
        for row, target in product(BASELINES, TARGETS):
            measure(Run(row, target, 0, ()), arguments.work)
        for seed, part in product(arguments.seeds, arguments.part):
            targets, rows = PARTS[part] if part != TRIED or not seed else ((), {})
            for target, (row, flags) in product(targets, rows.items()):
                measure(Run(row, target, seed, flags), arguments.work, attacked=part == RELEARNING)
        if TRIED in arguments.part:
            chosen = filter(None, [best(method, arguments.work) for method in GRIDS])
            for seed, target, run in product(arguments.seeds, TARGETS, chosen):
                measure(run._replace(target=target, seed=seed), arguments.work, attacked=True)
    write(arguments.work)


if __name__ == "__main__":
    main()
