"""What a run does: one frozen configuration with explicit weights, validated once, and the table of methods.

``--method`` names a preset over explicit fields; nothing in the trainer reads the name. The loss is
``forget_weight * L_forget + retain_weight * L_neighbours + world_weight * L_world + transport_weight * D`` (Eq. 8).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lm_eval_elude.core.tofu import CONVENTIONS, RETAIN_OF, SOURCE
from optout_train.losses import FORGET

DISTANCES = ("wasserstein", "manhattan", "euclidean", "chebyshev", "cosine")
BUNDLED = "tiny"
BUNDLED_MODEL = Path(__file__).resolve().parent.parent / "lm_eval_elude" / "mini" / "tiny"
BUNDLED_REFERENCE = BUNDLED_MODEL.with_name("tiny-without-ronaldo")


# How losses are averaged and stepped. "released" is what the authors' code does, whose runs made the paper's tables.
RECIPES: dict[str, dict[str, Any]] = {
    "paper": {},
    "released": {
        "npo_form": "batch-mean", "nll_average": "batch", "updates": "alternating", "clip_forget": False,
        "decay_vectors": False, "eta": 0.1, "batch_size": 8,
    },
}  # fmt: skip
# The rate of an adapter times the width of its model: 5e-3 for the bundled one, 2e-4 where the width is 4,096.
RATE = 0.96


class ConfigError(ValueError):
    """A setting that cannot be used; the message names the flag."""


def _f(default: Any, help: str, *choices: str) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Every setting that the resulting weights depend on. The defaults are the paper's (appendix A) where it has one.

    Raises:
        ConfigError: a value is outside its range, or two settings exclude each other.
    """

    target: tuple[str, ...] = _f((), "Entity to forget: name, slug or alias. Repeat for several.")
    method: str = _f("opt-out", "Preset of losses and weights; explicit flags win over it.")
    recipe: str = _f(
        "paper", "Preset of how losses are averaged and stepped: the paper's, or its released code's.", *RECIPES
    )
    model: str = _f(BUNDLED, "Bundled model ('tiny'), Hub id, or model folder.")
    revision: str = _f("", "Branch, tag or commit of a Hub model.")
    strict: bool = _f(False, "Refuse a data set with an odd row instead of naming it and going on.")
    dataset: str = _f(
        "hub", "'hub' (published ELUDe), 'mini' (bundled), or a folder in its schema; 'tofu' or one alike."
    )
    forget_split: str = _f("", f"TOFU's split to forget, instead of a target: {', '.join(RETAIN_OF)}.")
    tofu_evaluator: str = _f(
        "released", "Whose prompts TOFU's questions are put in, in training and scores.", *CONVENTIONS
    )
    learn: str = _f(
        "all", "Finetuning: all data (the starting model), or all but what is to be forgotten.", "all", "retain"
    )
    forget_loss: str = _f("npo", "Loss on the forget set.", *FORGET)
    forget_weight: float = _f(1.0, "Weight of the forget loss.")
    retain_weight: float = _f(1.0, "Weight of the retain loss on neighbours.")
    world_weight: float = _f(1.0, "Weight of the retain loss on world data.")
    transport_weight: float = _f(0.1, "Lambda of Eq. 8: weight of the distance from the initial weights.")
    distance: str = _f("wasserstein", "Distance from the initial weights.", *DISTANCES)
    directions: int = _f(100, "Fresh random directions for each parameter in each step (sliced Wasserstein).")
    eta: float = _f(0.1, "Inverse temperature of NPO and DPO.")
    npo_form: str = _f("sequence", "NPO and DPO per sequence (Eq. 2), or of a batch's mean.", "sequence", "batch-mean")
    nll_average: str = _f(
        "record", "Average NLL (retain losses, GA, IDK) over each record's tokens, or a batch's.", "record", "batch"
    )
    answers: str = _f(
        "stranger", "What the stranger loss teaches: an answer as about a stranger, or a refusal.", "stranger", "refuse"
    )
    bound: float = _f(
        0.6, "Stranger loss: how far down a token is pushed, relative to its log-probability in random order."
    )
    elicit: int = _f(48, "Stranger loss: answers of the initial model about each forget record (0: none).")
    teachers: int = _f(3, "Stranger loss: stand-ins whose distributions are averaged (0: their answers alone).")
    reverse: bool = _f(True, "Stranger loss: also teach the other direction, from facts to the name.")
    self_distill: bool = _f(
        False, "Retain losses learn the initial model's distributions over question and answer, not the answer alone."
    )
    updates: str = _f(
        "joint", "One step on Eq. 8, or the released code's forget step then retain step.", "joint", "alternating"
    )
    epochs: int = _f(3, "Passes over the forget set.")
    batch_size: int = _f(32, "Forget records in a step, over all processes; as many neighbours and world records.")
    micro_batch_size: int = _f(
        0, "Records of one forward pass of a process (0: all; a CPU gets short passes). Changes memory and speed only."
    )
    learning_rate: float = _f(
        1e-5, f"Peak learning rate; decays linearly to 0, no warm-up. 0: {RATE:g} / the model's width (--lora)."
    )
    weight_decay: float = _f(0.01, "Decoupled weight decay.")
    decay_vectors: bool = _f(True, "Decay norms and biases too.")
    max_grad_norm: float = _f(1.0, "Clip the gradient of an update to this norm (0: never).")
    clip_forget: bool = _f(True, "Clip the forget step of alternating updates too.")
    validate: bool = _f(
        True, "Measure probability and truth ratio after each epoch; with --patience 0 after each tenth."
    )
    patience: int = _f(
        1,
        "Stop after this many epochs in a row with a validation score below the epoch before's, or with less than half "
        "of the retain quality before training; keep the best epoch (0: never).",
    )
    seed: int = _f(0, "Seed of data order, refusals and directions.")
    dtype: str = _f(
        "float32",
        "Type of the weights; bfloat16 ones are stepped with stochastic rounding (torchao).",
        "float32",
        "bfloat16",
    )
    autocast: bool = _f(False, "Compute in bfloat16 over float32 weights.")
    lora: bool = _f(False, "Train a low-rank adapter on all linear layers instead of the weights.")
    lora_rank: int = _f(16, "Rank of the adapter.")
    lora_alpha: float = _f(32.0, "Scale of the adapter (alpha / rank).")
    merge: bool = _f(False, "Save the adapter merged into the model.")
    shard: bool = _f(False, "Shard parameters over the processes (FSDP2) instead of replicating them (DDP).")
    gradient_checkpointing: bool = _f(False, "Recompute activations in the backward pass.")
    compile: bool = _f(False, "Compile the model with torch.compile.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", tuple(self.target))
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(spec.default, float):
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                    raise ConfigError(f"{flag(spec.name)} must be a finite number, got {value!r}")
                object.__setattr__(self, spec.name, float(value))
                if value < 0:
                    raise ConfigError(f"{flag(spec.name)} must not be negative, got {value:g}")
            elif type(spec.default) is not type(value):
                raise ConfigError(f"{flag(spec.name)} must be of type {type(spec.default).__name__}, got {value!r}")
            elif type(value) is int and value < 0:
                raise ConfigError(f"{flag(spec.name)} must not be negative, got {value}")
            for text in (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ():
                if not isinstance(text, str) or "\0" in text or text != text.encode(errors="ignore").decode():
                    raise ConfigError(f"{flag(spec.name)} must be text in UTF-8 without NUL, got {text!r:.200}")
            choices = spec.metadata["choices"]
            if choices and value not in choices:
                raise ConfigError(f"{flag(spec.name)} must be one of {', '.join(choices)}, got {value!r}")
        for name in ("directions", "epochs", "batch_size", "eta", "lora_rank", "lora_alpha"):
            if not getattr(self, name):
                raise ConfigError(f"{flag(name)} must be above 0, got 0")
        if self.seed >= 1 << 63:
            raise ConfigError(f"--seed must be below 2**63, got {self.seed}")
        self._check_data()
        if not self.model:
            raise ConfigError("--model is empty")
        if self.method not in METHODS:
            raise ConfigError(f"--method {self.method!r} is not known; the methods are {', '.join(METHODS)}")
        if not self.forget_weight + self.retain_weight + self.world_weight:
            raise ConfigError("--forget-weight, --retain-weight and --world-weight are all 0: nothing to train on")
        if self.whole_batch and self.micro_batch_size:
            raise ConfigError("--npo-form batch-mean is one loss of the whole batch: leave out --micro-batch-size")
        if self.patience and not self.validate:
            raise ConfigError("--patience needs the validation: give --patience 0 with --no-validate")
        if not self.learning_rate and not self.lora:
            raise ConfigError("--learning-rate must be above 0 without --lora, got 0")
        if self.merge and not self.lora:
            raise ConfigError("--merge needs --lora")
        if self.merge and self.shard:
            raise ConfigError("--merge with --shard is not supported: save the adapter, and merge it in one process")

    def _check_data(self) -> None:
        """Whether target, split and sets are those of one benchmark, and what the forget loss can be made of."""
        tofu, row = self.dataset.partition("@")[0] == SOURCE, FORGET[self.forget_loss]
        if self.forget_split and self.forget_split not in RETAIN_OF:
            raise ConfigError(f"--forget-split must be one of {', '.join(RETAIN_OF)}, got {self.forget_split!r}")
        if not self.forget_split:
            if tofu:
                raise ConfigError(f"--dataset {self.dataset} needs --forget-split: one of {', '.join(RETAIN_OF)}")
            if not self.target:
                raise ConfigError("--target is missing: name the entity to forget")
        elif self.target:
            raise ConfigError("--target and --forget-split contradict each other: TOFU's data have no entities")
        elif self.world_weight:
            raise ConfigError("--forget-split: TOFU has no world set; give --world-weight 0 or another --method")
        elif row.made and self.forget_weight:
            raise ConfigError("--forget-split: the stranger loss swaps names; TOFU's rows do not say whose they are")
        if self.learn != "all" and not row.learns:
            raise ConfigError("--learn retain is of --method finetune, which forgets nothing")
        if self.patience and row.learns:
            raise ConfigError("--patience: early stopping judges forgetting; --method finetune needs --patience 0")

    @property
    def bundled(self) -> bool:
        """Whether the model is the bundled one."""
        return self.model == BUNDLED

    @property
    def set_weights(self) -> dict[str, float]:
        """The weight of each set's loss."""
        return {"forget": self.forget_weight, "retain": self.retain_weight, "world": self.world_weight}

    @property
    def whole_batch(self) -> bool:
        """Whether the forget loss is one value of a whole batch, which no pass may split."""
        return self.npo_form == "batch-mean" and bool(FORGET[self.forget_loss].reference)

    @property
    def model_path(self) -> str:
        """What ``from_pretrained`` takes."""
        return str(BUNDLED_MODEL) if self.bundled else self.model

    def to_json(self) -> dict[str, Any]:
        """All fields, JSON-ready; :meth:`from_json` is the inverse."""
        return {**asdict(self), "target": list(self.target)}

    def differences(self, before: Mapping[str, Any]) -> str:
        """The flags in which an earlier run's settings differ from these, with the earlier values; "" for none.

        A setting that did not exist then counts as its default.
        """
        now, old = self.to_json(), {spec.name: spec.default for spec in fields(self)} | dict(before)
        other = [name for name in sorted(old) if name not in now or old[name] != now[name]]
        return ", ".join(f"{flag(name)} {old[name]!r}" for name in other)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Raises: ConfigError: a field is unknown or has a wrong value."""
        if unknown := sorted(set(values) - {spec.name for spec in fields(cls)}):
            raise ConfigError(f"unknown setting {', '.join(map(repr, unknown))}")
        return cls(**{**values, "target": tuple(values.get("target", ()))})


# The forget term's gradients are many times the retain losses'; an adapter forgets other wordings too, where full
# weights learn those that they are shown; distilled retain losses move nothing that need not move.
_STRANGER: dict[str, Any] = {
    "forget_loss": "stranger", "forget_weight": 0.4, "retain_weight": 2.0, "self_distill": True, "lora": True,
    "merge": True, "learning_rate": 0.0, "epochs": 30, "batch_size": 8, "patience": 0,
}  # fmt: skip


def _methods() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = {
        "opt-out": {},
        "opt-out-stranger": _STRANGER,
    }
    table |= {f"opt-out-{name}": {"distance": name} for name in DISTANCES[1:]}
    parts = {"": (0.0, 0.0), "+rt": (1.0, 1.0), "+neighbours": (1.0, 0.0), "+world": (0.0, 1.0)}
    for loss, row in FORGET.items():
        for suffix, (retain, world) in parts.items() if not row.learns else ():
            table[loss + suffix] = {
                "forget_loss": loss, "retain_weight": retain, "world_weight": world, "transport_weight": 0.0,
            }  # fmt: skip
    table["stranger+rt"] |= _STRANGER
    nothing_kept = dict.fromkeys(("retain_weight", "world_weight", "transport_weight"), 0.0)
    table["finetune"] = {"forget_loss": "nll", **nothing_kept, "patience": 0}
    return table


# The paper's methods by name. "+rt" is the tables' +RT: neighbours and world data; the other two are its halves.
METHODS: dict[str, dict[str, Any]] = _methods()
# What differs from the paper's hyper-parameters for the bundled model, which is 3,000 times smaller. At the paper's eta
# NPO saturates there before the paraphrases are forgotten; eta was lowered until they were, looking at the forget set.
BUNDLED_RECIPE: dict[str, Any] = {
    "dataset": "mini", "learning_rate": 3e-4, "eta": 0.03, "epochs": 30, "batch_size": 8, "patience": 0,
}  # fmt: skip


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return f"--{name.replace('_', '-')}"


def build_config(given: Mapping[str, Any], *, world_only: bool = False) -> TrainConfig:
    """Fill what the user did not give: explicit values, then method's and recipe's presets, then the model's recipe.

    Args:
        given: fields the user named.
        world_only: drop the neighbours' retain loss (the paper's neighbour ablation).

    Raises:
        ConfigError: as :class:`TrainConfig`, or ``world_only`` contradicts the rest.
    """
    values = dict(given)
    model = values.setdefault("model", BUNDLED)
    if os.path.realpath(model) == str(BUNDLED_MODEL):
        model = values["model"] = BUNDLED
    method = values.setdefault("method", "opt-out")
    if method not in METHODS:
        raise ConfigError(f"--method {method!r} is not known; the methods are {', '.join(METHODS)}")
    if (recipe := values.get("recipe", "paper")) not in RECIPES:
        raise ConfigError(f"--recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
    values = {**(BUNDLED_RECIPE if model == BUNDLED else {}), **RECIPES[recipe], **METHODS[method], **values}
    if values.get("forget_split"):  # nothing to choose an epoch by but what is scored, and no world set
        kept = {"world_weight": 0.0} if values.get("retain_weight", 1.0) else {}
        values = {**values, "dataset": SOURCE, "patience": 0, **kept, **given}
    if "merge" not in given and (values.get("shard") or not values.get("lora")):
        values["merge"] = False  # a preset's, not the user's
    if values.get("validate") is False and "patience" not in given:
        values["patience"] = 0
    if world_only:
        if given.get("retain_weight"):
            raise ConfigError("--world-only and --retain-weight contradict each other")
        if not values.get("world_weight", 1.0):
            raise ConfigError(f"--world-only needs world data, and --method {method} has none; give --world-weight")
        values["retain_weight"] = 0.0
    return TrainConfig(**values)
