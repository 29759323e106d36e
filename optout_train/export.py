"""The finished checkpoint: weights as the base model's library reads them, tokenizer, log, and the manifest last."""

from __future__ import annotations

import math
import platform
import re
import shutil
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lm_eval_elude import __version__
from lm_eval_elude.data.files import file_hashes
from lm_eval_elude.data.manifest import FILE_NAME, Manifest, full_path, write_manifest
from optout_train.config import TrainConfig, earlier_request, has_learnt
from optout_train.data import TrainingData
from optout_train.run_folder import LOG, RunFolder
from optout_train.sources import Source, base_folder
from optout_train.weights import tensor_files, trained_weights, whole_tensors

LIBRARIES = ("torch", "transformers", "accelerate", "peft", "safetensors")  # what the weights depend on


def export(
    config: TrainConfig,
    source: Source,
    data: TrainingData,
    model: Any,
    folder: RunFolder,
    epochs: list[dict[str, Any]],
    base_weights: dict[str, str],
    processor_seconds: float,
) -> None:
    """Write the finished folder; every process must call it.

    ``epochs`` is what the manifest says of each epoch, ``base_weights`` the SHA-256 of the base model's files.
    """
    if config.lora:
        state_dict = trained_weights(model)
    else:  # a tied weight is named once: the second name would be saved as a second copy
        names = dict(model.named_parameters())
        twice = dict(model.named_parameters(remove_duplicate=False)).keys() - names
        state_dict = {name: tensor for name, tensor in model.state_dict().items() if name not in twice}
    weights = whole_tensors(state_dict, keep=folder.is_ours)
    if not folder.is_ours:
        return
    base = base_folder(config)
    versions = {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}

    def write(place: Path) -> None:
        whole, tensors = model, weights
        for adapter in model.peft_config.values() if config.lora else ():  # for who loads it from another folder
            adapter.base_model_name_or_path = full_path(config.model_path)
        if config.merge:
            whole = model.merge_and_unload()
            tensors = whole.state_dict()
        whole.save_pretrained(place, state_dict=tensors)
        data.forget.renderer.tokenizer.save_pretrained(place)
        shutil.copyfile(folder.partial / LOG, place / LOG)
        manifest = Manifest(
            targets=source.targets,
            dataset=config.dataset,
            method=config.method,
            data=source.describe(),
            data_fingerprints=data.fingerprints,
            settings=config.to_json(),
            base_model={"name": config.model, "weights": base_weights},
            weights=file_hashes(place),
            seed=config.seed,
            versions=versions | {"lm-eval-elude": __version__},
            epochs=epochs,
            drift=drift(base, place),
            processor_seconds=processor_seconds,
            requests=earlier_requests(config.model),
        )
        write_manifest(place, manifest)

    folder.finish(write)


def earlier_requests(model: str) -> list[dict[str, Any]]:
    """The requests that a model has fulfilled already, oldest first; each names the weights that it started from."""
    if (earlier := earlier_request(model)) is None:
        return []
    if has_learnt(earlier):  # no request of its own
        return earlier.requests
    written = datetime.fromtimestamp((Path(model) / FILE_NAME).stat().st_mtime, UTC)
    return [*earlier.requests, earlier.request(written.isoformat(timespec="seconds"))]


def drift(base: Path, final: Path) -> dict[str, float]:
    """How far each layer's weights moved: norm of the difference over the norm before, by the layer's number.

    What lies outside the layers is ``other``. Weights that only one of the two has (an adapter's) are left out; one
    tensor at a time is in memory.
    """
    squares: dict[str, list[float]] = {}
    before, after = tensor_files(base), tensor_files(final)
    for name in sorted(before.keys() & after.keys()):
        old, new = (file.get_tensor(name).float() for file in (before[name], after[name]))
        if old.shape == new.shape:
            layer = re.search(r"\.(\d+)\.", name)
            part = squares.setdefault(layer[1] if layer else "other", [0.0, 0.0])
            part[0] += float((new - old).square().sum())
            part[1] += float(old.square().sum())
    return {part: math.sqrt(moved / whole) for part, (moved, whole) in squares.items() if whole}
