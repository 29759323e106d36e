"""The finished checkpoint: weights as the base model's library reads them, tokenizer, log, and the manifest last."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from lm_eval_elude.core.manifest import Manifest, file_hashes, write_manifest
from optout_train.checkpoint import LOG, RunFolder, trained_weights, whole_tensors
from optout_train.setup import Setup

PACKAGES = ("torch", "transformers", "accelerate", "peft", "safetensors", "lm-eval-elude")


def export(run: Setup, folder: RunFolder, state: Mapping[str, Any]) -> None:
    """Write the finished folder; every process must call it.

    Args:
        run: the run, with its final weights in the model.
        folder: where.
        state: of the run; its ``epochs`` go into the manifest.
    """
    if run.config.lora:
        state_dict = trained_weights(run.model)
    else:  # a tied weight is named once: the second name would be saved as a second copy
        names = dict(run.model.named_parameters())
        twice = dict(run.model.named_parameters(remove_duplicate=False)).keys() - names
        state_dict = {name: tensor for name, tensor in run.model.state_dict().items() if name not in twice}
    weights = whole_tensors(state_dict, run.main)
    if run.main:
        folder.finish(lambda final: _write(run, final, weights, (folder.partial / LOG).read_bytes(), state["epochs"]))


def versions() -> dict[str, str]:
    """Versions of what the weights depend on."""
    return {"python": ".".join(map(str, sys.version_info[:3]))} | {name: _version(name) for name in PACKAGES}


def _write(run: Setup, folder: Path, weights: dict[str, Tensor], log: bytes, epochs: list[dict[str, Any]]) -> None:
    config, model = run.config, run.model
    if config.merge:
        model = model.merge_and_unload()
        weights = model.state_dict()
    model.save_pretrained(folder, state_dict=weights)
    run.tokenizer.save_pretrained(folder)
    (folder / LOG).write_bytes(log)
    manifest = Manifest(
        targets=run.source.targets,
        dataset=config.dataset,
        method=config.method,
        data=run.source.describe(),
        data_fingerprints=run.data.fingerprints,
        settings=config.to_json(),
        base_model={"name": config.model, "weights": file_hashes(run.base)},
        weights=file_hashes(folder),
        seed=config.seed,
        versions=versions(),
        epochs=epochs,
        drift=drift(run.base, folder),
    )
    write_manifest(folder, manifest)


def drift(base: Path, final: Path) -> dict[str, float]:
    """How far each layer's weights moved: norm of the difference over the norm before, by the layer's number.

    What lies outside the layers is ``other``. Weights that only one of the two has (an adapter's) are left out; one
    tensor at a time is in memory.
    """
    squares: dict[str, list[float]] = {}
    before, after = _tensors(base), _tensors(final)
    for name in sorted(before.keys() & after.keys()):
        old, new = (file.get_tensor(name).float() for file in (before[name], after[name]))
        if old.shape == new.shape:
            layer = re.search(r"\.(\d+)\.", name)
            part = squares.setdefault(layer[1] if layer else "other", [0.0, 0.0])
            part[0] += float((new - old).square().sum())
            part[1] += float(old.square().sum())
    return {part: math.sqrt(moved / whole) for part, (moved, whole) in squares.items() if whole}


def _tensors(folder: Path) -> dict[str, Any]:
    """The open file of each tensor that lies in a folder as safetensors."""
    files = [safe_open(file, "pt") for file in sorted(folder.glob("*.safetensors"))]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a dict


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
