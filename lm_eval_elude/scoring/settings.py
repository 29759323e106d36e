"""What a run scores: ``--metadata``, the environment and the checkpoint's manifest made into checked settings."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata as packages
from pathlib import Path
from typing import Any

from lm_eval_elude.data import bundled, dataset, jsonio
from lm_eval_elude.data.files import Stamp, file_hashes, sha256, stamp
from lm_eval_elude.data.manifest import FILE_NAME, Manifest, read_manifest
from lm_eval_elude.errors import UserError
from lm_eval_elude.scoring.likelihood import TruthRatioMean
from lm_eval_elude.text.chat import Renderer, Wording, load_tokenizer

log = logging.getLogger("lm_eval.elude")

MOST_PROMPTS = 100  # of an attack and target


@dataclass(frozen=True)
class Settings:
    """What a run scores, resolved from the user's options, the checkpoint's manifest and the defaults.

    Attributes:
        targets: display names.
        dataset: ``hub``, ``mini`` or a path.
        truth_ratio: mean of the wrong answers' probabilities, ``geometric`` or ``arithmetic``.
        guardrail: whether the paper's system prompt stands before every prompt.
        attack_file: JSONL of attack prompts that replaces the built ones, "" for none.
        seed: of the attack prompts and the membership attack.
        reference: results file, or model, of a model that never knew the targets; "" for none.
        attack_prompts: of each type and target; the paper's appendix has 100.
        mia_reference: model whose loss the reference attack on membership subtracts; "" for none.
        original: model that the evaluated one was made from, or any that knows how fluent text reads; "" for none.
    """

    targets: tuple[str, ...]
    dataset: str
    truth_ratio: TruthRatioMean = "geometric"
    guardrail: bool = False
    attack_file: str = ""
    seed: int = 0
    reference: str = ""
    attack_prompts: int = MOST_PROMPTS
    mia_reference: str = ""
    original: str = ""


def reader(
    expected: str, accepts: Callable[[Any], bool], convert: Callable[[Any], Any] = lambda value: value
) -> Callable[[Any], Any]:
    """What reads one value of ``--metadata``; of one that is not accepted, a ``TypeError`` says what is expected."""

    def read(value: Any) -> Any:
        if not accepts(value):
            raise TypeError(expected)
        return convert(value)

    return read


def one_of(choices: Collection[str]) -> Callable[[Any], str]:
    return reader(f"one of {', '.join(choices)}", lambda value: isinstance(value, str) and value in choices)


def _integer(low: int, high: int) -> Callable[[Any], int]:
    return reader(f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


read_text = reader("text", lambda value: isinstance(value, str), os.path.expanduser)  # names of no other kind begin so
_names = reader(
    "a name or a list of names",
    lambda value: (
        bool(value) and all(isinstance(name, str) and name for name in value)
        if isinstance(value, list | tuple)
        else isinstance(value, str) and value != ""
    ),
    lambda value: (value,) if isinstance(value, str) else tuple(value),
)
_switch = reader(
    "true or false", lambda value: str(value).lower() in ("true", "false"), lambda value: str(value).lower() == "true"
)
KEYS: dict[str, Callable[[Any], Any]] = {
    "target": _names,
    "dataset": read_text,
    "truth_ratio": one_of(("geometric", "arithmetic")),
    "guardrail": _switch,
    "attack_file": read_text,
    "attack_seed": _integer(0, 2**32 - 1),
    "attack_prompts": _integer(1, MOST_PROMPTS),
    "mia_reference": read_text,
    "reference": read_text,
    "original": read_text,
}


def read_metadata(metadata: Mapping[str, Any], keys: Mapping[str, Callable[[Any], Any]] = KEYS) -> dict[str, Any]:
    """The values of our keys, each of the right kind; those not given are absent.

    lm-eval merges ``--model_args`` into the metadata, and other tasks may have keys there, so a key of neither is only
    refused where it looks like one of ours that was mistyped. UserError for that, a value of the wrong kind, or a key
    of ours inside another table.
    """
    for key, value in metadata.items():
        near = difflib.get_close_matches(key, keys, n=1, cutoff=0.8)
        if near and key not in keys and key not in _OF_OTHERS:
            raise UserError(f"--metadata has no key {key!r}; did you mean {near[0]!r}? The keys are {', '.join(keys)}")
        if key == "metadata" and isinstance(value, Mapping) and (nested := keys.keys() & value.keys()):
            raise UserError(f"--metadata has {min(nested)!r} inside a table 'metadata': write it without that table")
    values = {}
    for key, read in keys.items():
        if key in metadata:
            try:
                values[key] = read(metadata[key])
            except TypeError as error:
                raise UserError(f"{key} in --metadata must be {error}, got {metadata[key]!r:.80}") from None
    return values


# What a near match could be mistaken for: a key of other tasks, and one of ELUDe's that TOFU's tasks see, too.
_OF_OTHERS = frozenset({"datasets", "mia_reference"})


def resolve_settings(metadata: Mapping[str, Any]) -> Settings:
    """Decide what is scored by a task's metadata, in which lm-eval merges ``--model_args`` and ``--metadata``.

    That is what ``--metadata`` says, otherwise the environment, otherwise the checkpoint's ``optout.json``, otherwise
    all targets of the Hub's data. The choice is logged. UserError for an unknown target, data set or option.
    """
    values = read_metadata(metadata)
    manifest = checkpoint_manifest(metadata)
    requested_data = values.get("dataset") or os.environ.get("ELUDE_DATASET")
    trained, forgotten = (manifest.dataset, manifest.targets) if manifest else ("", ())
    source = requested_data or trained or "hub"
    names = values.get("target") or _environment_targets() or forgotten
    if names:
        targets = tuple(target.name for target in dataset.resolve_targets(source, names))
    else:
        targets = tuple(dataset.entities(source))
        say_once(f"no target given and none in the checkpoint: scoring all {len(targets)} of data set '{source}'")
    if requested_data and trained and os.path.abspath(os.path.expanduser(source)) != os.path.abspath(trained):
        say_once(f"scoring data set '{source}' as asked; the checkpoint's optout.json says '{trained}'")
    if forgotten and sorted(targets) != sorted(forgotten):
        say_once(f"scoring {', '.join(targets)} as asked; the checkpoint's optout.json says {', '.join(forgotten)}")
    say_once(f"target {', '.join(targets)}, data set '{source}'", logging.INFO)
    if values.get("attack_file") and "attack_prompts" in values:
        say_once("attack_prompts in --metadata does not limit attack_file: each attack asks all of the file's rows")
    values = {"seed" if key == "attack_seed" else key: value for key, value in values.items() if key != "target"}
    return Settings(
        **values
        | {"targets": targets, "dataset": source}
        | {"reference": values.get("reference") or bundled.reference_of(manifest, targets)}
        | {"original": bundled.path_of(values.get("original") or bundled.original_of(manifest))}
    )


def _environment_targets() -> tuple[str, ...]:
    """``ELUDE_TARGET``: a name, or a JSON list of names; UserError where it looks like a list and is none of names."""
    text = os.environ.get("ELUDE_TARGET", "")
    if not text.lstrip().startswith("["):
        return (text,) if text else ()
    try:
        return _names(jsonio.loads(text, "ELUDE_TARGET"))
    except TypeError as error:
        raise UserError(f"ELUDE_TARGET must be {error}, got {text!r:.80}") from None


@lru_cache(maxsize=64)
def say_once(line: str, level: int = logging.WARNING) -> None:
    """Log a line once for all tasks of a process."""
    log.log(level, "ELUDe: %s", line)


def checkpoint_manifest(metadata: Mapping[str, Any]) -> Manifest | None:
    """The manifest of the evaluated checkpoint, where it has one."""
    return next((m for folder in model_folders(metadata) if (m := read_manifest(folder))), None)


def model_folders(metadata: Mapping[str, Any]) -> list[str]:
    """Folders (or Hub ids) of the evaluated checkpoint, an adapter's first."""
    named = {
        key: name for key in ("peft", "delta", "pretrained", "model") if isinstance(name := metadata.get(key), str)
    }
    inside = _subfolder(metadata)
    if inside and os.path.isdir(inner := os.path.join(named.get("pretrained", ""), inside)):
        named["pretrained"] = inner  # one of the Hub is stated beside the id
    return list(named.values())


def _revision(metadata: Mapping[str, Any]) -> str:
    """Of the evaluated model on the Hub; lm-eval makes a number of one that is all digits."""
    return str(metadata.get("revision") or "main")


def _subfolder(metadata: Mapping[str, Any]) -> str:
    """Of the evaluated model, for its weights and its tokenizer."""
    return str(metadata.get("subfolder") or "")


def model_renderer(metadata: Mapping[str, Any], wording: Wording | None = None) -> Renderer:
    """The renderer of the evaluated model's tokenizer, with a prompt format in place of its template if one is given.

    UserError where the model arguments name no tokenizer, or it cannot be loaded.
    """
    for key in ("tokenizer", "pretrained", "model"):
        if isinstance(name := metadata.get(key), str):
            remote = str(metadata.get("trust_remote_code", False)).lower() == "true"
            # As the harness has it, revision and subfolder are of either.
            return _renderer(name, _revision(metadata), _subfolder(metadata), remote, wording)
    raise UserError(
        "ELUDe tasks need the model's tokenizer to count answer tokens and found none: pass "
        "--model_args pretrained=... or tokenizer=..., or with a model object metadata={'pretrained': ...}; a "
        "TaskManager of your own gets them, and the target, as TaskManager(metadata=...)"
    )


@lru_cache(maxsize=4)  # the evaluated model's, and those of the three that may be asked beside it
def _renderer(name: str, revision: str, subfolder: str, remote: bool, wording: Wording | None) -> Renderer:
    tokenizer = load_tokenizer(name, revision=revision, subfolder=subfolder, trust_remote_code=remote)
    return Renderer(tokenizer, wording)


def provenance(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What was scored and with what: the checkpoint by hashes, versions; all in the results file.

    A folder with ``optout.json`` is known by that file's SHA-256 (it holds the weights'), one without by the weights'
    own, a Hub model by its name, revision and subfolder.
    """
    names, place = model_folders(metadata), (_revision(metadata), _subfolder(metadata))
    return {
        "checkpoint": [_identity(name, *place, weights_stamp(Path(name))) for name in names],
        "versions": dict(_versions()),
    }


def weights_stamp(folder: Path) -> tuple[tuple[str, Stamp], ...]:
    """The stamps of a checkpoint's manifest and weights, by name; of none where it is no folder."""
    files = [*folder.glob("*.json"), *folder.glob("*.safetensors")] if os.path.isdir(folder) else []
    return tuple((path.name, stamp(path)) for path in sorted(files))


def has_known(manifest: Manifest, model: Mapping[str, Any]) -> bool:
    """Whether a model, by ``name`` and ``weights``, knew the targets: a request began from it or left it, or the
    manifest in its folder says that it was made to forget one of them, or was made from a model that knew.
    """

    def began_from_or_left(model: Mapping[str, Any]) -> bool:
        bases = [(request["base_model"], request.get("revision")) for request in manifest.requests]
        if manifest.method != "finetune":
            bases.append((manifest.base_model, manifest.settings.get("revision")))
        weights = [*(base.get("weights") for base, _ in bases), *(each.get("weights") for each in manifest.requests)]
        named = [base.get("name") for base, at in bases if model.get("revision") in (None, at or "main")]
        known = ((model.get("weights"), [*weights, manifest.weights]), (model.get("name"), named))
        return any(bool(mine) and mine in others for mine, others in known)

    if began_from_or_left(model):
        return True
    made = read_manifest(str(model.get("name") or ""))
    if made is None or made.weights != model.get("weights"):
        return False
    base = made.base_model | {"revision": made.settings.get("revision") or "main"}
    forgot = made.method not in ("none", "finetune", "retrained-without") and {*made.targets} & {*manifest.targets}
    return bool(forgot) or began_from_or_left(base)


@lru_cache(maxsize=1)  # reading them takes 40 ms, and each task states them
def _versions() -> dict[str, str]:
    return {name: packages.version(name) for name in ("lm-eval-elude", "lm-eval", "transformers", "torch")}


@lru_cache(maxsize=8)
def _identity(name: str, revision: str, subfolder: str, weights: tuple[Any, ...]) -> dict[str, Any]:
    folder = Path(name)
    if manifest := read_manifest(folder):
        return {"name": name, "manifest": sha256(folder / FILE_NAME), "weights": manifest.weights}
    if folder.is_dir():
        return {"name": name, "weights": file_hashes(folder)}
    return {"name": name, "revision": revision, **({"subfolder": subfolder} if subfolder else {})}
