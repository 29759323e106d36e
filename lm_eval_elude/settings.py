"""What a run scores: ``--metadata``, the environment and the checkpoint's manifest made into checked settings."""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata as packages
from pathlib import Path
from typing import Any

from lm_eval_elude.core import dataset, tofu
from lm_eval_elude.core.chat import Renderer, Wording, load_tokenizer
from lm_eval_elude.core.likelihood import TruthRatioMean
from lm_eval_elude.core.manifest import FILE_NAME, Manifest, file_hashes, read_manifest
from lm_eval_elude.core.records import DataError, given

log = logging.getLogger("lm_eval.elude")

MOST_PROMPTS = 100  # of an attack and target
PACKAGES = ("lm-eval-elude", "lm-eval", "transformers", "torch")


@dataclass(frozen=True)
class Settings:
    """What a run scores, resolved from the user's word, the checkpoint's manifest and the defaults.

    Attributes:
        targets: display names.
        dataset: ``hub``, ``mini`` or a path.
        truth_ratio: mean of the wrong answers' probabilities, ``geometric`` or ``arithmetic``.
        guardrail: whether the paper's system prompt stands before every prompt.
        attack_file: JSONL of attack prompts that replaces the built ones, "" for none.
        seed: of the attack prompts and the membership attack.
        reference: results file, or model, of a model that never knew the targets; "" for none.
        attack_prompts: of each type and target; the paper's appendix has 100.
    """

    targets: tuple[str, ...]
    dataset: str
    truth_ratio: TruthRatioMean = "geometric"
    guardrail: bool = False
    attack_file: str = ""
    seed: int = 0
    reference: str = ""
    attack_prompts: int = MOST_PROMPTS


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("text")
    return value


def _names(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else (None,)
    if not all(isinstance(name, str) and name for name in names):
        raise TypeError("a name or a list of names")
    return names  # type: ignore[return-value]


def _mean(value: Any) -> str:
    if value not in ("geometric", "arithmetic"):
        raise TypeError("'geometric' or 'arithmetic'")
    return str(value)


def _switch(value: Any) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise TypeError("true or false")
    return str(value).lower() == "true"


def _seed(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise TypeError("a whole number from 0 to 4294967295")
    return value


def _prompts(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_PROMPTS:
        raise TypeError(f"a whole number from 1 to {MOST_PROMPTS}")
    return value


# Our keys of --metadata: how each value is read. What is expected is the TypeError's message.
KEYS: dict[str, Callable[[Any], Any]] = {
    "target": _names, "dataset": _text, "truth_ratio": _mean, "guardrail": _switch, "attack_file": _text,
    "attack_seed": _seed, "attack_prompts": _prompts, "mia_reference": _text, "reference": _text,
}  # fmt: skip


def read_metadata(metadata: Mapping[str, Any], keys: Mapping[str, Callable[[Any], Any]] = KEYS) -> dict[str, Any]:
    """The values of our keys, each of the right kind; those not given are absent.

    lm-eval merges ``--model_args`` into the metadata, and other tasks may have keys there, so a key of neither is only
    refused where it looks like one of ours that was mistyped.

    Raises:
        DataError: a value of the wrong kind, or a key that is nearly one of ours.
    """
    for key in metadata:
        near = difflib.get_close_matches(key, keys, n=1, cutoff=0.8)
        if key not in keys and key not in _MODEL_ARGUMENTS and near:
            raise DataError(f"--metadata has no key {key!r}; did you mean {near[0]!r}? The keys are {', '.join(keys)}")
    values = {}
    for key, read in keys.items():
        if key in metadata:
            try:
                values[key] = read(metadata[key])
            except TypeError as error:
                raise DataError(f"{key} in --metadata must be {error}, got {given(metadata[key])}") from None
    return values


# Model arguments that a near match could be mistaken for.
_MODEL_ARGUMENTS = frozenset({"seed", "data", "datasets"})


def resolve_settings(metadata: Mapping[str, Any]) -> Settings:
    """Decide targets and data set: the user's word, else the checkpoint's ``optout.json``, else all of the Hub's data.

    Args:
        metadata: the task's metadata, in which lm-eval merges ``--model_args`` and ``--metadata``.

    Raises:
        DataError: an unknown target, data set or option.
    """
    values = read_metadata(metadata)
    manifest = next((m for folder in model_folders(metadata) if (m := read_manifest(folder))), None)
    asked = values.get("target") or _names(os.environ.get("ELUDE_TARGET") or ())
    return _resolve(
        values.get("dataset") or os.environ.get("ELUDE_DATASET"),
        asked,
        manifest.dataset if manifest else None,
        manifest.targets if manifest else (),
        values.get("truth_ratio", "geometric"),
        values.get("guardrail", False),
        values.get("attack_file", ""),
        values.get("attack_seed", 0),
        values.get("reference") or _bundled_reference(manifest),
        values.get("attack_prompts", MOST_PROMPTS),
    )


def _bundled_reference(manifest: Manifest | None) -> str:
    """The model trained without a checkpoint's targets, where the checkpoint comes from the bundled model."""
    if manifest is None or manifest.base_model.get("name") != "tiny":
        return ""
    folders = sorted(dataset.MINI.parent.glob("tiny-without-*"))
    return next((str(f) for f in folders if (m := read_manifest(f)) and m.targets == manifest.targets), "")


def model_folders(metadata: Mapping[str, Any]) -> list[str]:
    """Folders (or Hub ids) of the evaluated checkpoint, an adapter's first."""
    named = (metadata.get(key) for key in ("peft", "delta", "pretrained", "model"))
    return [folder for folder in named if isinstance(folder, str)]


@lru_cache(maxsize=8)
def _resolve(
    source: str | None, asked: tuple[str, ...], own_dataset: str | None, own_targets: tuple[str, ...],
    truth_ratio: TruthRatioMean, guardrail: bool, attack_file: str, seed: int, reference: str,
    prompts: int,
) -> Settings:  # fmt: skip
    """The cached part of :func:`resolve_settings`, so that each line is said once for all tasks of a run."""
    chosen = source or own_dataset or "hub"
    if names := asked or own_targets:
        targets = tuple(t.name for t in dataset.resolve_targets(chosen, names))
    else:
        targets = tuple(dataset.entities(chosen))
        log.warning(
            "ELUDe: no target given and none in the checkpoint: scoring all %d of data set '%s'", len(targets), chosen
        )
    if source and own_dataset and os.path.abspath(os.path.expanduser(source)) != os.path.abspath(own_dataset):
        log.warning(
            "ELUDe: scoring data set '%s' as asked; the checkpoint's optout.json says '%s'", source, own_dataset
        )
    if own_targets and sorted(targets) != sorted(own_targets):
        said = ", ".join(own_targets)
        log.warning("ELUDe: scoring %s as asked; the checkpoint's optout.json says %s", ", ".join(targets), said)
    log.info("ELUDe: target %s, data set '%s'", ", ".join(targets), chosen)
    return Settings(targets, chosen, truth_ratio, guardrail, attack_file, seed, reference, prompts)


@dataclass(frozen=True)
class TofuSettings:
    """What a run of TOFU's tasks scores.

    Attributes:
        split: what was forgotten, ``forget01``, ``forget05`` or ``forget10``.
        dataset: ``tofu``, ``tofu@REVISION`` or a folder.
        evaluator: whose convention is followed, a key of :data:`lm_eval_elude.core.tofu.CONVENTIONS`.
        reference: results file, released log or model of a retained model; "" for none.
        truth_ratio: mean of the wrong answers' probabilities; the released evaluator's is geometric.
    """

    split: str
    dataset: str = tofu.SOURCE
    evaluator: str = "released"
    reference: str = ""
    truth_ratio: TruthRatioMean = "geometric"
    targets: tuple[str, ...] = ()  # the data have no entities
    guardrail: bool = False
    seed: int = 0  # nothing is drawn


def one_of(choices: Collection[str]) -> Callable[[Any], str]:
    """A reader of one of several texts."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise TypeError(f"one of {', '.join(choices)}")
        return value

    return read


TOFU_KEYS: dict[str, Callable[[Any], Any]] = {
    "tofu_split": one_of(tofu.RETAIN_OF), "tofu_data": _text, "tofu_evaluator": one_of(tofu.CONVENTIONS),
    "reference": _text,
}  # fmt: skip


def resolve_tofu_settings(metadata: Mapping[str, Any]) -> TofuSettings:
    """Decide split, data and convention of TOFU: the user's word, else the checkpoint's manifest.

    Raises:
        DataError: an unknown split or option, or nobody says which split.
    """
    values = read_metadata(metadata, TOFU_KEYS)
    manifest = next((m for folder in model_folders(metadata) if (m := read_manifest(folder))), None)
    trained = manifest.settings if manifest else {}
    own = trained.get("forget_split")
    split = values.get("tofu_split") or own
    if split not in tofu.RETAIN_OF:
        known = ", ".join(tofu.RETAIN_OF)
        raise DataError(f"TOFU's tasks need tofu_split in --metadata (one of {known}): what was forgotten")
    source = values.get("tofu_data") or (manifest.dataset if manifest and own else tofu.SOURCE)
    evaluator = values.get("tofu_evaluator") or str(trained.get("tofu_evaluator"))
    asked = evaluator if evaluator in tofu.CONVENTIONS else "released"
    return TofuSettings(split, source, asked, values.get("reference", ""))


def model_renderer(metadata: Mapping[str, Any], wording: Wording | None = None) -> Renderer:
    """The renderer of the evaluated model's tokenizer, with a prompt format in place of its template if one is given.

    Raises:
        DataError: the model arguments name no tokenizer, or it cannot be loaded.
    """
    for key in ("tokenizer", "pretrained", "model"):
        if isinstance(name := metadata.get(key), str):
            remote = str(metadata.get("trust_remote_code", False)).lower() == "true"
            return _renderer(name, metadata.get("revision") if key == "pretrained" else None, remote, wording)
    raise DataError(
        "ELUDe tasks need the model's tokenizer to count answer tokens and found none: pass "
        "--model_args pretrained=... or tokenizer=..., or with a model object metadata={'pretrained': ...}"
    )


@lru_cache(maxsize=2)
def _renderer(name: str, revision: str | None, trust_remote_code: bool, wording: Wording | None) -> Renderer:
    return Renderer(load_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code), wording)


def provenance(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What was scored and with what: the checkpoint by hashes, versions; all in the results file.

    A folder with ``optout.json`` is known by that file's SHA-256 (it holds the weights'), one without by the weights'
    own, a Hub model by its name and revision.
    """
    folders = tuple(model_folders(metadata))
    revision = metadata.get("revision")
    return {
        "checkpoint": [_identity(name, revision if isinstance(revision, str) else "") for name in folders],
        "versions": {name: packages.version(name) for name in PACKAGES},
    }


@lru_cache(maxsize=8)
def _identity(name: str, revision: str) -> dict[str, Any]:
    folder = Path(name)
    if manifest := read_manifest(folder):
        digest = hashlib.sha256((folder / FILE_NAME).read_bytes()).hexdigest()
        return {"name": name, "manifest": digest, "weights": manifest.weights}
    if folder.is_dir():
        return {"name": name, "weights": file_hashes(folder)}
    return {"name": name, "revision": revision or "main"}
