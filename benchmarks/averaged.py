"""Weights averaged over seeds: ``python benchmarks/averaged.py [--docs] [flags of optout-train]``.

Trains the bundled model once for each of ``--seeds``, by ``stranger-muon`` unless the flags name another method. A
model of the table is the initial one plus ``--scales`` times the mean change of the first ``--counts`` runs. Each is
scored and attacked as the runs of ``results.py`` are. What lies in ``--work`` is not made again. A quarter of an hour
of a core for each seed, and three minutes for each model.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from itertools import combinations, product
from pathlib import Path
from statistics import mean

import results
import torch
from commands import OFFLINE
from results import COMPARED, RONALDO, Run, reference
from safetensors.torch import load_file, save_file
from tables import DOCS, markdown, put

from lm_eval_elude.report.rows import Key
from lm_eval_elude.scoring.units import number, unit
from optout_train.config import BUNDLED_MODEL

FILE = "model.safetensors"
SHOWN: dict[str, Key] = {
    "first": COMPARED["truth first"], "gaps": COMPARED["truth first, gaps"], "FQ": COMPARED["FQ"],
    "P": ("elude_forget", "probability"), "degen.": COMPARED["degenerate"], "RQ": COMPARED["RQ"],
    "retain P": COMPARED["retain P"], "mention": COMPARED["mention"],
    "back: first": COMPARED["relearning, truth first"], "back: P": COMPARED["relearning, P"],
}  # fmt: skip


Weights = dict[str, torch.Tensor]


def average(initial: Weights, after: list[Weights], scale: float, like: Path, out: Path) -> Path:
    """A checkpoint, unless it is there: initial weights plus ``scale`` times the mean change, all else of ``like``."""
    if not out.is_dir():
        weights = {
            name: was + scale * (torch.stack([each[name] for each in after]).mean(0) - was)
            for name, was in initial.items()
        }
        half = out.with_name(f"{out.name}.half")
        shutil.copytree(like, half, dirs_exist_ok=True)
        save_file(weights, half / FILE, metadata={"format": "pt"})
        half.rename(out)
    return out


def likeness(initial: Weights, after: list[Weights]) -> float:
    """The mean cosine between the changes of two runs."""
    changes = [torch.cat([(each[name] - was).flatten() for name, was in initial.items()]) for each in after]
    return mean(float(torch.cosine_similarity(a, b, dim=0)) for a, b in combinations(changes, 2))


def numbers(model: Path, target: str, work: Path) -> list[str]:
    """What the table shows of a model."""
    met = {"target": target, "original": str(BUNDLED_MODEL), "reference": str(reference(target, work))}
    values = results.score(model, "elude_quality", met, work / "answers" / model.name)
    values |= results.stress(model, Run(model.name, target, 0, ()), work)
    return [number(values[key], unit(key[1])) for key in SHOWN.values()]


def main() -> None:
    """Print the table, and put it into the docs if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=RONALDO, choices=results.TARGETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 3, 5], help="of runs that are averaged")
    parser.add_argument("--scales", nargs="+", type=float, default=[1.0, 1.2])
    parser.add_argument("--work", type=Path, default=Path("runs/averaged"))
    parser.add_argument("--docs", action="store_true", help="also write the table into docs/research-log.md")
    given, flags = parser.parse_known_args()
    if not 0 < min(given.counts) <= max(given.counts) <= len(given.seeds):
        parser.error(f"--counts: from 1 to the number of --seeds, which is {len(given.seeds)}")
    os.environ |= OFFLINE
    arguments, row = ("--method", "stranger-muon", *flags), "_".join(["run", *flags])  # other flags, other folders
    runs = [results.checkpoint(Run(row, given.target, seed, arguments), given.work) for seed in given.seeds]
    folders = [run for run in runs if run]
    if len(folders) < len(runs):
        sys.exit(1)
    initial, after = load_file(BUNDLED_MODEL / FILE), [load_file(folder / FILE) for folder in folders]
    rows = []
    for count, scale in product(given.counts, given.scales):
        seeds = "_".join(map(str, given.seeds[:count]))
        out = given.work / f"{row}-{given.target}-{seeds}-times-{scale:g}"
        model = average(initial, after[:count], scale, folders[0], out)
        rows.append([str(count), f"{scale:g}", *numbers(model, given.target, given.work)])
        print(rows[-1], file=sys.stderr, flush=True)
    lines = ["", *markdown(["seeds", "times", *SHOWN], rows), ""]
    if len(after) > 1:
        lines += [f"The changes of two runs have a cosine of {likeness(initial, after):.2f}.", ""]
    print("\n".join(lines))
    if given.docs:
        put(DOCS / "research-log.md", "averaged weights", lines)


if __name__ == "__main__":
    main()
