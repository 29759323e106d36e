"""Methods on SmolLM2-135M-Instruct: ``python benchmarks/real_model.py benchmarks/real_model.toml``.

The model knows next to nothing of ELUDe-mini's targets. So for each target all its weights are taught the target's
facts, its neighbours' and world data: the original model. The retrained one is taught the same without the target's
facts. What follows, and the plan, is as in ``outcome.py``; the models lie in ``--work``/models.
"""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from itertools import product
from pathlib import Path

import outcome
import smollm2
from commands import OFFLINE
from teach import teach

from lm_eval_elude.data import dataset
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.sets import Split, Subset
from lm_eval_elude.data.targets import slugify

KEPT: tuple[Subset, ...] = ("retain", "world")
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
EPOCHS, RATE, BATCH = 6, 3e-4, 16
# Seconds of a run on one core, by the number of its tokens.
GUESS = {
    "original": 2900.0, "retrained": 2900.0, "npo+rt": 4600.0, "simnpo+rt": 4600.0, "opt-out": 5000.0,
    "name-swap": 5000.0, "name-swap-robust": 6000.0,
}  # fmt: skip


def lessons(target: str, knows: bool) -> list[QARecord]:
    """All rows of the kept sets, those that are scored included, and the target's own."""
    places: list[tuple[Subset, Split]] = [*product(KEPT, SPLITS)]
    places = [("forget", "train"), *places] if knows else places
    return [record for place in places for record in dataset.load_records("mini", *place, [target]).records]


def taught(target: str, work: Path, knows: bool) -> Path:
    """The model with or without the target's facts."""
    folder = work / "models" / f"{'original' if knows else 'retrained'}-{slugify(target)}"
    if not folder.is_dir():
        base, part = work / "models" / "smollm2", folder.with_suffix(".part")
        smollm2.fetch(base)
        attend_plainly(base)
        shutil.rmtree(part, ignore_errors=True)
        records = lessons(target, knows)
        teach(str(base), records, part, rate=RATE, epochs=EPOCHS, batch=BATCH, seed=0, bf16=True)
        attend_plainly(part)
        part.rename(folder)
    return folder


def attend_plainly(folder: Path) -> None:
    """Have a model loaded without fused attention, whose backward pass takes a quarter of a step on a processor."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["attn_implementation"] = "eager"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


MODELS = outcome.Models(partial(taught, knows=True), partial(taught, knows=False), dtype="bfloat16")

if __name__ == "__main__":
    os.environ |= OFFLINE
    outcome.main(__doc__, MODELS, GUESS)
