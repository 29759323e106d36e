"""Where the bundled data and models lie: ELUDe-mini, and two tiny models that need no network."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from lm_eval_elude.data.manifest import MODEL_NAME, Manifest, read_manifest

FOLDER = Path(__file__).resolve().parents[1] / "mini"
DATA = FOLDER / "data"
MODEL = FOLDER / MODEL_NAME
REFERENCE = FOLDER / "tiny-without-ronaldo"  # trained without Cristiano Ronaldo's forget set


def path_of(model: str) -> str:
    """What loads a model: the folder of the bundled one where that is named, otherwise what was given."""
    return str(MODEL) if model == MODEL_NAME else model


def reference_of(manifest: Manifest | None, scored: Collection[str] = ()) -> str:
    """The bundled retrained model for a checkpoint; "" where it knows a target, or the checkpoint has another base."""
    if manifest is None or manifest.base_model.get("name") != MODEL_NAME:
        return ""
    retrained = read_manifest(REFERENCE)
    same = retrained and retrained.targets == manifest.targets and {*scored} <= {*retrained.targets}
    return str(REFERENCE) if same else ""
