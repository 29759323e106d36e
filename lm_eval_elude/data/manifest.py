"""``optout.json``: what a checkpoint forgot and how, written last by the trainer and read by the tasks."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lm_eval_elude.data import jsonio
from lm_eval_elude.errors import UserError

FILE_NAME = "optout.json"
SCHEMA_VERSION = 1
MODEL_NAME = "tiny"  # how a user and a manifest name the bundled model
_NAMES = ("", "hub", "mini", "tofu", MODEL_NAME)  # of data and models, whatever a folder is called


@dataclass(frozen=True)
class Manifest:
    """Provenance of a checkpoint."""

    targets: tuple[str, ...]  # display names; () for a base model
    dataset: str  # as a user would name it: ``hub``, ``mini`` or a path
    method: str = "none"  # ``none`` for a base model
    data: dict[str, str] = field(default_factory=dict)  # as :func:`~lm_eval_elude.data.dataset.describe` says
    data_fingerprints: dict[str, str] = field(default_factory=dict)  # by subset and split: ``forget-train``
    settings: dict[str, Any] = field(default_factory=dict)  # every field of the training configuration
    base_model: dict[str, Any] = field(default_factory=dict)  # ``name``, and ``weights`` as below
    weights: dict[str, str] = field(default_factory=dict)  # SHA-256 of each weight file
    seed: int | None = None
    versions: dict[str, str] = field(default_factory=dict)  # of packages
    epochs: list[dict[str, Any]] = field(default_factory=list)  # losses and validation measures
    processor_seconds: float | None = None  # of training's first process, without scoring
    requests: list[dict[str, Any]] = field(default_factory=list)  # before this one, oldest first: see request()
    schema_version: int = SCHEMA_VERSION

    def request(self, written: str) -> dict[str, Any]:
        """What the manifests of later requests keep of this one; ``written`` is when the checkpoint was finished."""
        kept = ("method", "dataset", "data_fingerprints", "seed", "base_model", "weights")
        request = {"targets": [name for name in self.targets if name not in self.earlier_targets], "written": written}
        revision = {"revision": text} if (text := self.settings.get("revision")) else {}
        return request | {name: getattr(self, name) for name in kept} | revision

    @property
    def earlier_targets(self) -> tuple[str, ...]:
        """What was forgotten before the last request."""
        return tuple(name for request in self.requests for name in request["targets"])

    @property
    def first_base(self) -> str:
        """The name of the model that nothing had been forgotten in."""
        return str((self.requests[0]["base_model"] if self.requests else self.base_model).get("name", ""))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``optout.json``; its presence means that the checkpoint is complete. Paths are written in full."""
    base = manifest.base_model
    if isinstance(name := base.get("name"), str):
        base = base | {"name": full_path(name)}
    manifest = replace(manifest, dataset=full_path(manifest.dataset), base_model=base)
    jsonio.write(folder / FILE_NAME, asdict(manifest), indent=2)


def read_manifest(folder: str | Path | None) -> Manifest | None:
    """The manifest of a local checkpoint folder, or None where there is none (also for a Hub id).

    UserError where the file is there but is not a manifest of a known version.
    """
    path = Path(folder or "") / FILE_NAME
    if not folder or not path.is_file():
        return None
    manifest = jsonio.read(path, Manifest)
    if manifest.schema_version != SCHEMA_VERSION:
        raise UserError(f"{path}: schema_version {manifest.schema_version}, expected {SCHEMA_VERSION}")
    return manifest


def full_path(name: str) -> str:
    """A path of data or of a model that is there in full; any other name as it is."""
    path = os.path.abspath(os.path.expanduser(name))
    return path if name not in _NAMES and os.path.exists(path) else name
