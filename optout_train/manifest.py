"""The finished folder's ``optout.json``, which the tasks read, and its model card."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lm_eval_elude.data import bundled
from lm_eval_elude.data.files import file_hashes
from lm_eval_elude.data.manifest import FILE_NAME, Manifest, full_path, read_manifest, write_manifest
from optout_train.data import Sets

LIBRARIES = ("torch", "transformers", "accelerate", "peft", "lm-eval-elude")  # what the weights depend on


def earlier_request(model: str) -> Manifest | None:
    """The manifest of a model that was made to forget targets before; None for any other model."""
    manifest = read_manifest(bundled.path_of(model))
    return manifest if manifest and manifest.targets and manifest.settings else None


def teacher_of(model: str) -> str:
    """The model that lessons are made with: before the first request, where that is at hand, otherwise the run's own.

    What an earlier request took from a model, it can no longer be asked about.
    """
    earlier = earlier_request(model)
    first = bundled.path_of(earlier.first_base if earlier else model)
    return first if Path(first).is_dir() else model


def write(folder: Path, model: str, base: Path, sets: Sets, settings: dict[str, Any], log: list[Any]) -> Manifest:
    """Write ``optout.json``; its presence means that the checkpoint is complete."""
    requests = []
    if earlier := earlier_request(model):
        written = datetime.fromtimestamp((Path(model) / FILE_NAME).stat().st_mtime, UTC)
        requests = [*earlier.requests, earlier.request(written.isoformat(timespec="seconds"))]
    manifest = Manifest(
        targets=tuple(sets.names), dataset=sets.dataset, method=settings["method"], data=dict(sets.data),
        data_fingerprints=dict(sets.fingerprints), settings=settings, weights=file_hashes(folder),
        base_model={"name": full_path(model), "weights": file_hashes(base)}, epochs=log, requests=requests,
        versions={name: version(name) for name in LIBRARIES}, processor_seconds=time.process_time(),
        seed=settings["seed"],
    )  # fmt: skip
    write_manifest(folder, manifest)
    return manifest


def write_card(folder: Path, manifest: Manifest, table: str, command: str) -> None:
    """Write ``README.md``: what was done, the scores with their limits, the command for them, and the settings."""
    base, data = manifest.base_model["name"], manifest.data.get("repository")
    head = [f"datasets: [{data}]"] * bool(data) + [f"base_model: {base}"] * ("/" in base and not Path(base).exists())
    text = Path(__file__).with_name("card.md").read_text(encoding="utf-8").format(
        head="".join(f"{line}\n" for line in head), title=folder.name, base=base, method=manifest.method,
        subject=", ".join(manifest.targets) or manifest.dataset, table=table, command=command, dataset=manifest.dataset,
        settings="\n".join(f"| {key} | `{value}` |" for key, value in manifest.settings.items()),
    )  # fmt: skip
    (folder / "README.md").write_text(text, encoding="utf-8")
