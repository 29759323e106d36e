"""``optout.json``: what a checkpoint forgot and how, written last by the trainer and read by the tasks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from lm_eval_elude.data import jsonio
from lm_eval_elude.errors import UserError

FILE_NAME = "optout.json"
SCHEMA_VERSION = 1
MODEL_NAME = "tiny"  # how a user and a manifest name the bundled model
_NAMES = ("", "hub", "mini", "tofu")  # of data, whatever a folder is called
_MAX_BYTES = 1 << 26  # of a manifest that is read
_FORGOT_NOBODY = ("none", "finetune", "retrained-without")  # methods


class Request(TypedDict):
    """What the manifests of later requests keep of an earlier one (:meth:`Manifest.request`)."""

    targets: list[str]
    base_model: dict[str, Any]
    dataset: str
    data_fingerprints: NotRequired[dict[str, str]]
    method: NotRequired[str]
    seed: NotRequired[int | None]
    weights: NotRequired[dict[str, str]]
    written: NotRequired[str]
    revision: NotRequired[str]


@dataclass(frozen=True)
class Manifest:
    """Provenance of a checkpoint."""

    targets: tuple[str, ...]  # display names; () for a base model
    dataset: str  # as a user would name it: ``hub``, ``mini`` or a path
    method: str = "none"  # preset name; ``none`` for a base model
    data: dict[str, str] = field(default_factory=dict)  # as :func:`~lm_eval_elude.data.dataset.describe` says
    data_fingerprints: dict[str, str] = field(default_factory=dict)  # by subset and split: ``forget-train``
    settings: dict[str, Any] = field(default_factory=dict)  # every field of the training configuration
    base_model: dict[str, Any] = field(default_factory=dict)  # ``name``, and ``weights`` as below
    weights: dict[str, str] = field(default_factory=dict)  # SHA-256 of each weight file
    seed: int | None = None
    versions: dict[str, str] = field(default_factory=dict)  # of packages
    epochs: list[dict[str, Any]] = field(default_factory=list)  # losses and validation measures
    drift: dict[str, float] = field(default_factory=dict)  # by layer: how far the weights moved, over their norm
    processor_seconds: float | None = None  # of training's first process, without scoring
    requests: list[Request] = field(default_factory=list)  # before this one, oldest first
    schema_version: int = SCHEMA_VERSION

    def request(self, written: str) -> Request:
        """What the manifests of later requests keep of this one; ``written`` is when the checkpoint was finished."""
        forgotten = [name for name in self.targets if name not in self.earlier_targets]
        kept = ("method", "dataset", "data_fingerprints", "seed", "base_model", "weights")
        revision = {"revision": text} if (text := self.settings.get("revision")) else {}
        kept_fields = {name: getattr(self, name) for name in kept} | revision
        return cast(Request, {"targets": forgotten, "written": written} | kept_fields)

    @property
    def earlier_targets(self) -> tuple[str, ...]:
        """What was forgotten before the last request."""
        return tuple(name for request in self.requests for name in request["targets"])

    @property
    def first_base(self) -> str:
        """The name of the model that nothing had been forgotten in."""
        return str((self.requests[0]["base_model"] if self.requests else self.base_model).get("name", ""))

    @property
    def first_revision(self) -> str:
        """Of that model on the Hub, where the first request named one."""
        return str((self.requests[0] if self.requests else self.settings).get("revision") or "")

    def has_known(self, model: Mapping[str, Any]) -> bool:
        """Whether a model, by ``name`` and ``weights``, knew the targets: a request began from it or left it, or the
        manifest in its folder says that it was made to forget one of them, or was made from a model that knew.

        What this run left counts, too: it is no model that never knew either. What a finetuning began from may be one.
        """
        if self._began_from_or_left(model):
            return True
        made = read_manifest(str(model.get("name") or ""))
        if made is None or made.weights != model.get("weights"):
            return False
        base = made.base_model | {"revision": made.settings.get("revision") or "main"}
        forgot = made.method not in _FORGOT_NOBODY and bool({*made.targets} & {*self.targets})
        return forgot or self._began_from_or_left(base)

    def _began_from_or_left(self, model: Mapping[str, Any]) -> bool:
        bases = [(request["base_model"], request.get("revision")) for request in self.requests]
        if self.method != "finetune":
            bases.append((self.base_model, self.settings.get("revision")))
        weights = [*(base.get("weights") for base, _ in bases), *(each.get("weights") for each in self.requests)]
        named = [base.get("name") for base, at in bases if model.get("revision") in (None, at or "main")]
        known = ((model.get("weights"), [*weights, self.weights]), (model.get("name"), named))
        return any(bool(mine) and mine in others for mine, others in known)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``optout.json`` atomically; its presence means that the checkpoint is complete.

    A data set or base model that lies at a relative path is written with its full path.
    """
    jsonio.write(folder / FILE_NAME, asdict(_with_paths(manifest, full_path, full_path_of_model)), indent=2)


def read_manifest(folder: str | Path | None) -> Manifest | None:
    """The manifest of a local checkpoint folder, or None where there is none (also for a Hub id).

    UserError where the file is there but is not a manifest of a known version.
    """
    path = Path(folder or "") / FILE_NAME
    if not folder or not os.path.isfile(path):
        return None
    table = jsonio.load(path, nan=True, max_bytes=_MAX_BYTES)
    if isinstance(table, dict) and table.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise UserError(f"{path}: schema_version {table['schema_version']!r:.40}, expected {SCHEMA_VERSION}")
    manifest: Manifest = jsonio.check(table, Manifest, f"{path}: not an Opt-Out manifest")

    def resolve(name: str) -> str:
        return _resolve_path(name, path.parent)

    # A model's name without a slash is one of the Hub, whatever a folder is called.
    return _with_paths(manifest, resolve, lambda name: resolve(name) if os.sep in name else name)


def _with_paths(manifest: Manifest, of_data: Callable[[str], str], of_model: Callable[[str], str]) -> Manifest:
    """The manifest with the names of its data set and of its base model changed."""
    model = manifest.base_model
    if isinstance(name := model.get("name"), str):
        model = model | {"name": of_model(name)}
    return replace(manifest, dataset=of_data(manifest.dataset), base_model=model)


def full_path(name: str) -> str:
    """A path that is there in full; any other name of data or of a model as it is."""
    path = os.path.abspath(os.path.expanduser(name))
    return path if name not in _NAMES and os.path.exists(path) else name


def full_path_of_model(name: str) -> str:
    """A model's folder in full; a Hub id, and the bundled model's name, as it is."""
    path = os.path.abspath(os.path.expanduser(name))
    return path if name not in ("", MODEL_NAME) and os.path.isdir(path) else name


def _resolve_path(name: str, folder: Path) -> str:
    """A path as a checkpoint's manifest names it, from wherever the checkpoint is read and wherever it was moved to.

    A relative path was meant from the folder that training ran in, above the checkpoint most often: the nearest folder
    at or above the checkpoint that has it is taken. Where none has it (Hub ids, ``hub``, ``mini``) the name stays.
    """
    if name in _NAMES or os.path.isabs(name):
        return name
    for above in (folder.absolute(), *folder.absolute().parents):
        if os.path.exists(path := above / name):
            return name if os.path.exists(name) and os.path.samefile(path, name) else os.path.normpath(path)
    return name
