"""``--metadata``, the environment and the checkpoint's manifest made into checked settings; the model's tokenizer."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping
from importlib import metadata as packages
from pathlib import Path
from typing import Any

from lm_eval_elude.data.files import stamp
from lm_eval_elude.data.manifest import Manifest, read_manifest
from lm_eval_elude.errors import UserError
from lm_eval_elude.tasks.running import TEMPLATE
from lm_eval_elude.text.chat import Renderer, load_tokenizer

Reader = Callable[[Any], Any]  # of one value; ValueError, or KeyError, where it is none


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("text")
    return os.path.expanduser(value)


def names(value: Any) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not listed or not all(isinstance(n, str) and n for n in listed):
        raise ValueError("a name or a list of names")
    return tuple(listed)


def switch(value: Any) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise ValueError("true or false")
    return str(value).lower() == "true"


def one_of(*choices: str) -> Reader:
    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return str(value)

    return read


def integer(low: int, high: int) -> Reader:
    def read(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return value

    return read


# Keys of any benchmark of ours; a key that is none of them may be another task's, or a model argument.
_KNOWN: set[str] = set()


def read_metadata(metadata: Mapping[str, Any], keys: Mapping[str, Reader]) -> dict[str, Any]:
    """The values of a benchmark's keys, each of the right kind; those not given are absent.

    lm-eval merges ``--model_args`` into the metadata, so only a key that looks like a mistyped one of ours is refused.
    UserError for that, and for a value of the wrong kind.
    """
    _KNOWN.update(keys)
    for key in metadata.keys() - _KNOWN - {"datasets"}:
        if near := difflib.get_close_matches(key, keys, n=1, cutoff=0.8):
            raise UserError(f"--metadata has no key {key!r}; did you mean {near[0]!r}? The keys are {', '.join(keys)}")
    values = {}
    for key in keys.keys() & metadata.keys():
        try:
            values[key] = keys[key](metadata[key])
        except ValueError as error:
            raise UserError(f"{key} in --metadata must be {error}, got {metadata[key]!r}") from None
    return values


def checkpoint_manifest(metadata: Mapping[str, Any]) -> Manifest | None:
    """The manifest of the evaluated checkpoint, an adapter's first; None where it has none."""
    places = [metadata[key] for key in ("peft", "pretrained", "model") if isinstance(metadata.get(key), str)]
    return next((m for place in places if (m := read_manifest(place))), None)


def model_renderer(metadata: Mapping[str, Any], make: Callable[[Any, str], Renderer]) -> Renderer:
    """What ``make`` makes of the evaluated model's tokenizer and the name of its template.

    UserError where the model arguments name no tokenizer, or it cannot be loaded.
    """
    name = next((n for k in ("tokenizer", "pretrained", "model") if isinstance(n := metadata.get(k), str)), None)
    if name is None:
        raise UserError(
            "ELUDe tasks need the model's tokenizer and found none: pass --model_args pretrained=... or "
            "tokenizer=..., or with a model object metadata={'pretrained': ...}; a TaskManager of your own gets them, "
            "and the target, as TaskManager(metadata=...)"
        )
    tokenizer = load_tokenizer(
        name,
        revision=str(metadata.get("revision") or "main"),
        subfolder=str(metadata.get("subfolder") or ""),
        trust_remote_code=str(metadata.get("trust_remote_code", False)).lower() == "true",
    )
    return make(tokenizer, template_of(metadata))


def template_of(metadata: Mapping[str, Any]) -> str:
    """The chat template that was asked for by name, else the one that a checkpoint was trained with; "" for its own."""
    manifest = checkpoint_manifest(metadata)
    return TEMPLATE.get() or str(metadata.get("template") or (manifest and manifest.settings.get("template")) or "")


def provenance(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What was scored and with which versions, for the results file; paths of this machine as they were given."""
    model = {key: metadata[key] for key in ("pretrained", "model", "peft", "revision", "subfolder") if key in metadata}
    manifest = checkpoint_manifest(metadata)
    made = {"method": manifest.method, "targets": list(manifest.targets)} if manifest else {}
    versions = {name: packages.version(name) for name in ("lm-eval-elude", "lm-eval", "transformers", "torch")}
    return {"model": model, "made": made, "versions": versions}


def identity(metadata: Mapping[str, Any]) -> str:
    """What a cache of answers belongs to: the model's names, and of local folders how their weights lie there."""
    model = provenance(metadata)["model"]
    folders = [Path(name) for name in model.values() if isinstance(name, str) and Path(name).is_dir()]
    weights = {file.name: stamp(file) for folder in folders for file in sorted(folder.glob("*.safetensors"))}
    return json.dumps([model, weights], default=str)
