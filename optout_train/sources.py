"""Where a run's records come from: ELUDe's sets about targets, or TOFU's of a split. The trainer asks nothing else."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub import try_to_load_from_cache

from lm_eval_elude.data import bundled, dataset, tofu
from lm_eval_elude.data.dataset import Selection
from lm_eval_elude.data.manifest import Manifest, full_path, read_manifest
from lm_eval_elude.data.records import QARecord, fingerprint
from lm_eval_elude.data.sets import Split, Subset
from lm_eval_elude.data.targets import Target
from lm_eval_elude.errors import UserError, reason
from lm_eval_elude.scoring.conventions import CONVENTIONS, Convention
from optout_train.config import METHODS, TrainConfig, earlier_request, has_learnt


class Elude:
    """ELUDe, or data in its schema.

    Attributes:
        task: the group that scores a checkpoint.
        halves: of what is forgotten and of what is kept a title, the group's metric, and the task with its parts.
        licence: of the published data.
        subsets: what can be trained on.
        convention: how questions are asked; None as the model's template does.
        remark: what the user is told of the validation, "" for nothing.
        targets: display names of all that the checkpoint will have forgotten, earlier requests first.
        forgets: those on whose records the forget loss is taken.
        slug: what a folder of the run is called after.
    """

    name, task, remark = "ELUDe", "elude_quality", ""
    halves: ClassVar = (
        ("forget set", "forget_quality", "elude_forget"),
        ("retain (neighbours)", "retain_quality", "elude_retain"),
    )
    licence: ClassVar = (
        "The published ELUDe data is CC BY-SA 4.0; its world set, Alpaca-GPT4,\n"
        "was generated with GPT-4 and released for non-commercial use (CC BY-NC 4.0)."
    )
    subsets: ClassVar[tuple[Subset, ...]] = ("forget", "retain", "world")
    convention: Convention | None = None

    def __init__(self, config: TrainConfig) -> None:
        self.dataset, self.strict = config.dataset, config.strict
        self.forgets = tuple(target.name for target in forgotten(config))
        asked = dataset.resolve_targets(config.dataset, config.target)
        earlier = earlier_request(config.model)
        # What lies in other data cannot be asked about.
        before = earlier.targets if earlier and _is_same(earlier.dataset, config.dataset) else ()
        self.targets = tuple(dict.fromkeys([*before, *(target.name for target in asked)]))
        self.slug = "+".join(target.slug for target in asked)

    def load(self, subset: Subset, split: Split) -> Selection:
        """A set's records; of the forget set there is the split ``train`` only. UserError where they cannot be used."""
        names = self.forgets if subset == "forget" else self.targets
        return dataset.load_records(self.dataset, subset, split, names)

    def describe(self) -> dict[str, str]:
        """Where the rows come from, for the manifest."""
        return dataset.describe(self.dataset)

    @staticmethod
    def subject(manifest: Manifest) -> str:
        """What a checkpoint is about, in words."""
        return ", ".join(manifest.targets)

    @staticmethod
    def metadata(manifest: Manifest) -> dict[str, Any]:
        """``--metadata`` of the task that scores a checkpoint."""
        return {"target": list(manifest.targets), "dataset": manifest.dataset, "original": original_of(manifest)}


class Tofu:
    """TOFU: the split that is forgotten and the one that is kept; no targets, no world set, no validation splits."""

    name, task = "TOFU", "tofu"
    halves: ClassVar = (
        ("forget set (FQ: KS p)", "forget_quality", "tofu_forget"),
        ("retain (utility: model utility)", "model_utility", "tofu_retain"),
    )
    licence: ClassVar = "TOFU's data is under the MIT licence."
    subsets: ClassVar[tuple[Subset, ...]] = ("forget", "retain")
    targets: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: TrainConfig) -> None:
        """Raises UserError where a finetuning would teach again what its model forgot; all splits share authors."""
        self.dataset, self.slug = config.dataset, config.forget_split
        before = read_manifest(config.model_path) if config.loss.learns and config.learn == "all" else None
        split = before.settings.get("forget_split") if before and before.method in METHODS else ""
        if before and split and not has_learnt(before):
            raise UserError(
                f"--method finetune would teach {self.slug} to a model that was asked to forget {split}. A request is "
                f"not undone: start from the model before it, {before.first_base}"
            )
        self.convention = CONVENTIONS[config.tofu_evaluator]
        self.remark = (
            "TOFU has no validation split: epochs are measured on what is scored "
            f"({config.forget_split}_perturbed, retain_perturbed)"
        )
        self.files = {
            ("forget", "train"): config.forget_split,
            ("retain", "train"): tofu.RETAIN_OF[config.forget_split],
            ("retain", "validation"): tofu.RETAIN.stems[0],
        }

    def load(self, subset: Subset, split: Split) -> Selection:
        """As :meth:`Elude.load`; forget records get their paraphrase and wrong answers from the split's other file."""
        rows = tofu.load(self.dataset, self.files[subset, split])
        if subset == "forget":
            with suppress(UserError):  # training does without
                scored = tofu.load(self.dataset, tofu.FORGET.stems[0].format(split=self.slug))
                by_text = {(record.question, record.answer): record for record in scored}
                rows = tuple(by_text.get((row.question, row.answer), row) for row in rows)
        records = tuple(QARecord("", r.question, r.answer, "", r.paraphrased_answer, r.perturbed_answer) for r in rows)
        return Selection(records, fingerprint(records))

    def describe(self) -> dict[str, str]:
        return tofu.HUB.describe(self.dataset)

    @staticmethod
    def subject(manifest: Manifest) -> str:
        return f"TOFU's {manifest.settings['forget_split']}"

    @staticmethod
    def metadata(manifest: Manifest) -> dict[str, Any]:
        split, evaluator = (manifest.settings[key] for key in ("forget_split", "tofu_evaluator"))
        return {"tofu_split": split, "tofu_evaluator": evaluator, "tofu_data": manifest.dataset}


Source = Elude | Tofu


def forgotten(config: TrainConfig) -> tuple[Target, ...]:
    """The targets of the forget loss: those asked for, and with ``--again`` those that the model forgot before.

    UserError for an unknown target, earlier ones of other data, or a finetuning that would teach them again.
    """
    asked = dataset.resolve_targets(config.dataset, config.target)
    earlier = earlier_request(config.model)
    if earlier is None:
        return tuple(asked)
    if config.loss.learns:
        gone = {*earlier.targets, *earlier.earlier_targets}  # the latter may be of other data
        taught = [target.name for target in asked if target.name in gone and config.learn == "all"]
        if taught:
            raise UserError(
                f"--method finetune would teach {', '.join(taught)} to a model that was asked to forget it. A "
                f"request is not undone: start from the model before it, {earlier.first_base}"
            )
    if config.loss.learns or not config.again:
        return tuple(asked)
    if not _is_same(earlier.dataset, config.dataset):
        raise UserError(
            f"--model {config.model} forgot {', '.join(earlier.targets)} of the data {earlier.dataset}: give a "
            "--dataset that has these, too, or --no-again to train on the new target alone"
        )
    return tuple(dict.fromkeys([*dataset.resolve_targets(config.dataset, earlier.targets), *asked]))


def _is_same(dataset: str, other: str) -> bool:
    """Whether two names, of which one may be a relative path, are of the same data."""
    return full_path(dataset) == full_path(other)


def original_of(manifest: Manifest) -> str:
    """The model before the first request where it is at hand, otherwise the one before the last; "" for a revision."""
    first, last = manifest.first_base, str(manifest.base_model.get("name", ""))
    if manifest.first_revision:  # another revision of the model would be loaded
        return last if manifest.requests else ""
    return bundled.original_of(manifest) or (first if at_hand(first) else last)


def at_hand(model: str) -> bool:
    """Whether a model is a folder here, or in the Hub's cache."""
    if Path(model).is_dir():
        return True
    with suppress(ValueError):  # the name of a folder
        return isinstance(try_to_load_from_cache(model, "config.json"), str)
    return False


def lessons_model(config: TrainConfig) -> str:
    """The model that lessons are made with: before the first request, where that is at hand, otherwise the run's own.

    What an earlier request took from a model, its lessons would lack: it no longer says what is to be forgotten, and
    less of what is to be kept. What is said of a model's own state (UNDO, RMU) is of the run's. What a finetuning since
    the first request has taught, the model before it would lack.
    """
    earlier = earlier_request(config.model)
    if earlier is None or config.loss.noised or config.loss.steers or _was_finetuned(earlier):
        return config.model_path
    original = original_of(earlier)
    return original if original and at_hand(original) else config.model_path


def _was_finetuned(manifest: Manifest) -> bool:
    """Whether a request, or the model that the manifest is of, goes on from other weights than the request before."""
    made = [request.get("weights") for request in manifest.requests]
    bases = [request["base_model"] for request in manifest.requests[1:]] + [manifest.base_model]
    return has_learnt(manifest) or any(w != b.get("weights") for w, b in zip(made, bases, strict=False))


def benchmark_of(config: TrainConfig) -> type[Elude] | type[Tofu]:
    """What a run is of, without a look at its data."""
    return Tofu if config.forget_split else Elude


def source_of(config: TrainConfig) -> Source:
    """The data of a run; UserError where ELUDe's data have no such target."""
    return benchmark_of(config)(config)


def base_folder(config: TrainConfig) -> Path:
    """Where the base model's files are: its folder, or the Hub's snapshot in the cache; UserError for neither."""
    from transformers.utils import cached_file

    try:
        path = cached_file(config.model_path, "config.json", revision=config.revision or None)
    except OSError as error:
        raise UserError(f"--model {config.model!r} cannot be loaded: {reason(error)}") from None
    if path is None:
        raise UserError(
            f"--model {config.model!r} cannot be trained: it has no config.json, as an adapter has none; merge it"
        )
    return Path(str(path)).parent
