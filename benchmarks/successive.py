"""Five requests one after another, and the same five at once: ``python benchmarks/successive.py [--docs]``.

Every checkpoint is scored on all five targets, so the table shows what an earlier request lost again and what a later
one has not touched yet. *drift* is how far the weights are from the original's, by norm. What lies in ``--work`` is not
made again. An hour of two cores.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from commands import OFFLINE, call, score
from results import TARGETS
from tables import DOCS, markdown, put

from lm_eval_elude.data import bundled
from lm_eval_elude.data.dataset import resolve_targets
from lm_eval_elude.model.scorer import load_model
from lm_eval_elude.scoring.metrics import forget_quality
from lm_eval_elude.scoring.runs import Run
from lm_eval_elude.scoring.samples import by_target, mean
from lm_eval_elude.scoring.units import number, unit


def forget(folder: Path, model: str | Path, targets: tuple[str, ...]) -> Path:
    """A checkpoint of ``model`` that forgot the targets, unless it is there."""
    if not (folder / "optout.json").is_file():
        named = [part for target in targets for part in ("--target", target)]
        command = ["--model", model, *named, "--output_dir", folder, "--no_score", "--overwrite"]
        call("optout-train", *command, "--method", "name-swap")
    return folder


def requests(work: Path) -> Iterator[tuple[str, str | Path, int]]:
    """What is compared, each made when it is reached: its name, its model, and how many targets it forgot."""
    yield "original", bundled.MODEL, 0
    model: str | Path = bundled.MODEL_NAME
    for place, target in enumerate(TARGETS, 1):
        model = forget(work / f"request-{place}", model, (target,))
        yield f"{place} in a row", model, place
    yield "5 at once", forget(work / "at-once", bundled.MODEL_NAME, TARGETS), len(TARGETS)


def distance(model: str | Path) -> float:
    """How far the weights are from the original's: norm of the difference over the norm before."""
    before, after = (dict(load_model(str(m), None).named_parameters()) for m in (bundled.MODEL, model))
    moved, whole = (
        torch.stack([t.norm() for t in side]).norm()
        for side in ([after[name] - before[name] for name in before], before.values())
    )
    return float(moved / whole)


def line(name: str, model: str | Path, forgotten: int, run: Run) -> list[str]:
    """A row of the table, in per cent."""
    of = by_target(run.samples("elude_forget"))
    groups = [of[target.name] for target in resolve_targets("mini", TARGETS)]
    asked = [sample for group in groups[:forgotten] for sample in group]
    cells = [number(forget_quality(asked).value, unit("forget_quality")) if asked else "–"]
    for place, group in enumerate(groups):
        first = number(mean(group, "truth_first").value, unit("truth_first"))
        cells.append(f"**{first}**" if place < forgotten else first)
    values = run.reported("elude_quality")
    cells += [number(values[metric], unit(metric)) for metric in ("retain_quality", "mention_quality")]
    return [name, *cells, number(distance(model), "share")]


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/requests"))
    parser.add_argument("--docs", action="store_true", help="also write the table into docs/results.md")
    arguments = parser.parse_args()
    os.environ |= OFFLINE
    rows = []
    for name, model, forgotten in requests(arguments.work):
        folder = arguments.work / f"scores-{name.replace(' ', '-')}"
        run = score(model, folder, "elude_quality", {"target": TARGETS, "dataset": "mini"}, "--batch_size", "32")
        rows.append(line(name, model, forgotten, run))
        print(*rows[-1], sep="  ", flush=True)
    names = [target.name.split()[-1] for target in resolve_targets("mini", TARGETS)]
    head = ["after", "FQ", *(f"first, {name}" for name in names), "RQ", "mention", "drift"]
    lines = ["", *markdown(head, rows), ""]
    print("\n".join(lines))
    if arguments.docs:
        put(DOCS / "results.md", "successive requests", lines)


if __name__ == "__main__":
    main()
