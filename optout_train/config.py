"""What a run does: one frozen configuration with explicit weights, validated once, and the table of methods.

``--method`` names a preset over explicit fields; nothing in the trainer reads the name. The loss is
``forget_weight * L_forget + retain_weight * L_neighbours + world_weight * L_world + transport_weight * D`` (Eq. 8).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import msgspec

from lm_eval_elude.data import bundled
from lm_eval_elude.data.manifest import Manifest, read_manifest
from lm_eval_elude.data.tofu import RETAIN_OF, SOURCE
from lm_eval_elude.errors import UserError
from lm_eval_elude.scoring.conventions import CONVENTIONS
from optout_train.losses import FORGET, WITHOUT_ETA, ForgetLoss

DISTANCES = ("wasserstein", "manhattan", "euclidean", "chebyshev", "cosine")
BUNDLED, BUNDLED_MODEL = bundled.MODEL_NAME, bundled.MODEL
# What differs from the paper in the released code, beside how it averages and steps (see TrainConfig.released).
RECIPES: dict[str, dict[str, Any]] = {"paper": {}, "released": {"eta": 0.1, "batch_size": 8}}
AUTO = "auto"
WHOLE_BATCH = "--recipe released takes NPO and DPO of a whole batch's mean"
CHOICES: dict[str, tuple[str, ...]] = {
    "recipe": tuple(RECIPES), "forget_loss": tuple(FORGET), "distance": DISTANCES, "tofu_evaluator": tuple(CONVENTIONS),
    "learn": ("all", "retain"), "answers": ("stranger", "refuse"), "dtype": ("float32", "bfloat16"),
    "optimizer": ("adamw", "muon"),
}  # fmt: skip
SPEED_ONLY = {"micro_batch_size", "gradient_checkpointing", "compile"}  # and rounding, as the number of processes
POSITIVE = (
    "directions", "epochs", "batch_size", "retain_ratio", "eta", "learning_rate", "lora_rank", "lora_alpha",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Every setting that the resulting weights depend on; ``flags.toml`` says what each is.

    The defaults are the paper's (appendix A) where it has one. UserError where a value is outside its range, or two
    settings exclude each other.
    """

    target: tuple[str, ...] = ()
    method: str = "opt-out"
    recipe: str = "paper"
    model: str = BUNDLED
    revision: str = ""
    strict: bool = False
    dataset: str = "hub"
    again: bool = True
    forget_split: str = ""
    tofu_evaluator: str = "released"
    learn: str = "all"
    forget_loss: str = "npo"
    forget_weight: float = 1.0
    retain_weight: float = 1.0
    world_weight: float = 1.0
    transport_weight: float = 0.1
    distance: str = "wasserstein"
    directions: int = 100
    eta: float = 0.1
    retain_budget: float = 0.0
    dual_step: float = 0.05
    sam: float = 0.0
    relearn: float = 0.0
    answers: str = "stranger"
    bound: float = 0.6
    elicit: int = 48
    teachers: int = 3
    reverse: bool = True
    self_distill: bool = False
    exchange: int = 2
    epochs: int = 3
    batch_size: int = 32
    retain_ratio: int = 1
    micro_batch_size: int = 0
    learning_rate: float | Literal["auto"] = 1e-5
    optimizer: str = "adamw"
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    validate: bool = True
    patience: int = 1
    seed: int = 0
    dtype: str = "float32"
    autocast: bool = False
    lora: bool = False
    lora_rank: int = 16
    lora_alpha: float = 32.0
    merge: bool = False
    shard: bool = False
    gradient_checkpointing: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        for spec in fields(self):
            value, choices = getattr(self, spec.name), CHOICES.get(spec.name)
            texts = value if isinstance(value, tuple) else (value,) if isinstance(value, str) else ()
            if any("\0" in text or text != text.encode(errors="ignore").decode() for text in texts):
                raise UserError(f"{flag(spec.name)} must be text in UTF-8 without NUL, got {value!r:.200}")
            if choices and value not in choices:
                raise UserError(f"{flag(spec.name)} must be one of {', '.join(choices)}, got {value!r}")
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise UserError(f"{flag(spec.name)} must be a finite number and not negative, got {value:g}")
        for is_wrong, message in self._faults():
            if is_wrong:
                raise UserError(message)

    def _faults(self) -> Iterator[tuple[bool, str]]:
        """Every fault that settings can have: whether these have it, and the error message."""
        for name in POSITIVE:
            yield not getattr(self, name), f"{flag(name)} must be above 0, got 0"
        yield self.seed >= 1 << 63, f"--seed must be below 2**63, got {self.seed}"
        unknown = f"--method {self.method!r} is not known; the methods are {', '.join(METHODS)}"
        yield self.method not in METHODS, unknown
        yield not self.model, "--model is empty"
        split, splits = self.forget_split, ", ".join(RETAIN_OF)
        yield bool(split) and split not in RETAIN_OF, f"--forget-split must be one of {splits}, got {split!r}"
        if split:
            entities = "--target and --forget-split contradict each other: TOFU's data have no entities"
            yield bool(self.target), entities
            world = "--forget-split: TOFU has no world set; give --world-weight 0 or another --method"
            yield self.world_weight > 0, world
            swaps = (
                f"--forget-split: --forget-loss {self.forget_loss} swaps names; TOFU's rows do not say whose they are"
            )
            yield bool({"substitute", "alternate"} & {*self.loss.reads}) and self.forget_weight > 0, swaps
        else:
            is_tofu = self.dataset.partition("@")[0] == SOURCE
            yield is_tofu, f"--dataset {self.dataset} needs --forget-split: one of {splits}"
            yield not self.target, "--target is missing: name the entity to forget"
        learns = self.loss.learns
        yield self.learn != "all" and not learns, "--learn retain is of --method finetune, which forgets nothing"
        judged = f"--patience: early stopping judges forgetting; --forget-loss {self.forget_loss} needs --patience 0"
        yield self.patience > 0 and (learns or self.loss.negated), judged
        muon = (
            "--optimizer muon turns whole matrices of float32 weights: give --no-lora, --no-shard and --dtype float32"
        )
        yield self.optimizer == "muon" and (self.lora or self.shard or self.dtype == "bfloat16"), muon
        whole = f"--forget-loss {self.forget_loss} changes the model's own weights: give --no-lora"
        yield self.lora and (self.loss.noised or self.loss.direction or self.loss.steers), whole
        share = f"--eta is the share by which --forget-loss {self.forget_loss} shrinks the weights, at most 1"
        yield self.loss.noised and self.eta > 1, f"{share}: got {self.eta:g}"
        yield self.loss.direction and self.optimizer == "muon", "--optimizer muon: repselect has its own, plain descent"
        fixed = f"--sam needs a gradient, and that of --forget-loss {self.forget_loss} is one fixed direction"
        yield self.sam > 0 and self.loss.direction, fixed
        lost = "--sam takes steps that 16 bits lose: give --dtype float32, or --lora"
        yield self.sam > 0 and self.dtype == "bfloat16" and not self.lora, lost
        lost = f"--forget-loss {self.forget_loss} takes steps that 16 bits lose: give --dtype float32"
        yield self.loss.direction and self.dtype == "bfloat16", lost
        yield self.teachers > STAND_INS, f"--teachers must be at most {STAND_INS}, got {self.teachers}"
        where = "--relearn and --sam both say where the forget gradient is taken: leave out one"
        yield self.relearn > 0 and self.sam > 0, where
        nowhere = f"--relearn needs a forget loss whose gradient forgets, and --forget-loss {self.forget_loss} has none"
        yield self.relearn > 0 and (self.loss.direction or learns or self.loss.negated), nowhere
        joint = "--relearn changes whole weights within a joint step: leave out --shard and --recipe released"
        yield self.relearn > 0 and (self.shard or self.released), joint
        kept = "--forget-loss task-vector: what the retain losses teach would be turned round; give them weight 0"
        yield self.loss.negated and (self.retain_weight > 0 or self.world_weight > 0), kept
        no_weight = "--forget-weight, --retain-weight and --world-weight are all 0: nothing to train on"
        yield not any(self.set_weights.values()), no_weight
        yield self.whole_batch and self.micro_batch_size > 0, f"{WHOLE_BATCH}: leave out --micro-batch-size"
        unseen = "--patience needs the validation: give --patience 0 with --no-validate"
        yield self.patience > 0 and not self.validate, unseen
        auto = "--learning-rate auto is the rate of an adapter or of Muon: give --lora, --optimizer muon, or a number"
        yield self.learning_rate == AUTO and not self.lora and self.optimizer != "muon", auto
        yield self.merge and not self.lora, "--merge needs --lora"
        sharded = "--merge with --shard is not supported: save the adapter, and merge it in one process"
        yield self.merge and self.shard, sharded

    @property
    def loss(self) -> ForgetLoss:
        return FORGET[self.forget_loss]

    @property
    def bundled(self) -> bool:
        """Whether the model is the bundled one."""
        return self.model == BUNDLED

    @property
    def set_weights(self) -> dict[str, float]:
        return {"forget": self.forget_weight, "retain": self.retain_weight, "world": self.world_weight}

    @property
    def released(self) -> bool:
        """Whether losses are averaged and stepped as in the released code, whose runs made the paper's tables.

        A mean NLL is one over all tokens of a batch (the paper: over each record's, then over the records). NPO and DPO
        are of a batch's mean log-probability (Eq. 2: of each record's sum). A forget step alternates with a step on the
        rest of Eq. 8 and is not clipped (one clipped step on the whole). Norms and biases do not decay.
        """
        return self.recipe == "released"

    @property
    def whole_batch(self) -> bool:
        """Whether the forget loss is one value of a whole batch, which no pass may split."""
        return self.released and bool(self.loss.reference)

    def peak_rate(self, width: int, layers: int, steps: int) -> float:
        """The peak learning rate of a run of so many steps on a model of this width and this many layers.

        What ``auto`` is for an adapter goes with 1 / width: 5e-3 for the bundled model, 2e-4 at 4,096. For Muon all
        three count: what was found for 64 to 120 steps of the bundled model (5 layers, 192 wide) and for 32 of SmolLM2
        135M (30 layers, 576 wide) has about one product of rate, steps, layers and width. For 80 steps the rates are
        4.2e-3 and 2.3e-4. Fewer steps than 32 count as 32.
        """
        if self.learning_rate != AUTO:
            return float(self.learning_rate)
        if self.optimizer == "muon":
            return 4.2e-3 * (80 * 5 * 192) / (max(steps, 32) * layers * width)
        return 0.96 / width

    @property
    def model_path(self) -> str:
        """What ``from_pretrained`` takes."""
        return bundled.path_of(self.model)

    def to_json(self) -> dict[str, Any]:
        """All fields, JSON-ready; :meth:`from_json` is the inverse."""
        return asdict(self) | {"target": list(self.target)}

    def differences(self, before: Mapping[str, Any]) -> str:
        """The flags in which an earlier run's settings differ from these, with the earlier values; "" for none.

        A setting that did not exist then counts as its default. One that changes memory and speed only never differs.
        """
        now, old = self.to_json(), {spec.name: spec.default for spec in fields(self)} | dict(before)
        other = [name for name in sorted(old.keys() - SPEED_ONLY) if name not in now or old[name] != now[name]]
        return ", ".join(f"{flag(name)} {old[name]!r}" for name in other)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The inverse of :meth:`to_json`; what is no setting (any more) is left out.

        UserError as of the class, or where a value has another type than its field.
        """
        try:
            return msgspec.convert(dict(values), cls)
        except msgspec.ValidationError as error:
            problem, _, place = str(error).partition(" - at `$.")
            raise UserError(f"{flag(place.strip('`').partition('[')[0])}: {problem}" if place else problem) from None


# The forget term's gradients are many times the retain losses'; an adapter forgets other wordings too, where full
# weights learn those that they are shown; distilled retain losses move nothing that need not move.
_STRANGER: dict[str, Any] = {
    "forget_loss": "stranger", "forget_weight": 0.4, "retain_weight": 2.0, "self_distill": True, "lora": True,
    "merge": True, "learning_rate": AUTO, "epochs": 30, "batch_size": 8, "patience": 0,
}  # fmt: skip


# Every direction of a matrix moves as far, so what is forgotten does not lie in the few that an adapter has; that also
# moves what no retain record speaks of, so these are many and new. It moves as far in a direction in which the few
# records of a small step differ by chance, so a step reads as many as it can. All was found on the bundled model.
_MUON: dict[str, Any] = {
    "lora": False, "merge": False, "optimizer": "muon", "learning_rate": AUTO, "weight_decay": 0.0, "epochs": 80,
    "batch_size": 48, "exchange": 24, "relearn": 1.0,
}  # fmt: skip


def _methods() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = {"opt-out": {}, "opt-out-stranger": _STRANGER}
    table |= {f"opt-out-{name}": {"distance": name} for name in DISTANCES[1:]}
    parts = {"": (0.0, 0.0), "+rt": (1.0, 1.0), "+neighbours": (1.0, 0.0), "+world": (0.0, 1.0)}
    for loss, row in FORGET.items():
        for suffix, (retain, world) in parts.items() if not row.learns else ():
            if row.negated and suffix:  # what is kept would be turned round, too
                continue
            kept = {"retain_weight": retain, "world_weight": world, "transport_weight": 0.0}
            table[loss + suffix] = {"forget_loss": loss, **kept, **row.preset}
    table["stranger+rt"] |= _STRANGER
    table["stranger-muon"] = {**table["stranger+rt"], **_MUON}
    table["finetune"] = {**table["ga"], "forget_loss": "nll", "patience": 0}
    return table


# The paper's methods by name. "+rt" is the tables' +RT: neighbours and world data; the other two are its halves.
METHODS: dict[str, dict[str, Any]] = _methods()
# What differs from the paper's hyper-parameters for the bundled model, which is 3,000 times smaller. At the paper's eta
# NPO saturates there before the paraphrases are forgotten; eta was lowered until they were, looking at the forget set.
BUNDLED_RECIPE: dict[str, Any] = {
    "dataset": "mini", "learning_rate": 3e-4, "eta": 0.03, "epochs": 30, "batch_size": 8, "patience": 0,
}  # fmt: skip


STAND_INS = 6  # invented names about which the stranger method asks


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return f"--{name.replace('_', '-')}"


def earlier_request(model: str) -> Manifest | None:
    """The manifest of a model that was made to forget targets before; None for any other model.

    Of a model that was finetuned since, its manifest with the data of the last request before that and the targets that
    were forgotten in these data. UserError where the manifest cannot be read.
    """
    manifest = read_manifest(bundled.path_of(model))
    if manifest is None or not manifest.targets or manifest.method not in METHODS:
        return None
    if not has_learnt(manifest):
        return manifest
    if not manifest.requests:
        return None
    data = manifest.requests[-1]["dataset"]
    targets = [name for request in manifest.requests if request["dataset"] == data for name in request["targets"]]
    return replace(manifest, targets=tuple(targets), dataset=data)


def has_learnt(manifest: Manifest) -> bool:
    """Whether a run finetuned its model, and forgot nothing."""
    loss = FORGET.get(str(manifest.settings.get("forget_loss")))  # of a later version there may be others
    return loss is not None and loss.learns


# Settings that act with others only: what they act with, and whether a configuration has it.
NEEDS: tuple[tuple[tuple[str, ...], str, Callable[[TrainConfig], bool]], ...] = (
    (("lora_rank", "lora_alpha"), "--lora", lambda config: config.lora),
    (("bound", "answers", "elicit", "teachers", "reverse"), "a stranger method",
     lambda config: config.forget_loss == "stranger" and config.forget_weight > 0),
    (("teachers",), "--answers stranger", lambda config: config.answers == "stranger"),
    (("eta",), "a forget loss that has an eta",
     lambda config: config.forget_loss not in WITHOUT_ETA and config.forget_weight > 0),
    (("exchange",), "--self-distill", lambda config: config.self_distill),
    (("exchange",), "--retain-weight", lambda config: config.retain_weight > 0),
    (("self_distill", "retain_budget", "retain_ratio"), "--retain-weight or --world-weight",
     lambda config: config.retain_weight > 0 or config.world_weight > 0),
    (("directions",), "--distance wasserstein", lambda config: config.distance == "wasserstein"),
    (("self_distill",), "retain losses on answers, and this method holds inner states",
     lambda config: not config.loss.steers),
    (("tofu_evaluator",), "--forget-split", lambda config: bool(config.forget_split)),
    (("distance", "directions"), "--transport-weight", lambda config: config.transport_weight > 0),
    (("dual_step",), "--retain-budget", lambda config: config.retain_budget > 0),
    (("relearn", "sam"), "--forget-weight", lambda config: config.forget_weight > 0),
    (("weight_decay",), "AdamW or Muon, and this method goes along a fixed direction",
     lambda config: not config.loss.direction),
    (("revision",), "a model of the Hub", lambda config: not config.bundled and not os.path.isdir(config.model)),
)  # fmt: skip


def build_config(given: Mapping[str, Any], *, world_only: bool = False) -> TrainConfig:
    """Fill what the user did not give: explicit values, then method's and recipe's presets, then the model's recipe.

    ``world_only`` drops the neighbours' retain loss (the paper's neighbour ablation). UserError as of
    :class:`TrainConfig`, or where ``world_only`` contradicts the rest, or a given setting does nothing.
    """
    values = dict(given)
    model = values.setdefault("model", BUNDLED)
    if os.path.realpath(model) == str(BUNDLED_MODEL):
        model = values["model"] = BUNDLED
    method = values.setdefault("method", "opt-out")
    # What is no method or recipe the configuration refuses.
    preset, recipe = METHODS.get(method, {}), RECIPES.get(values.get("recipe", "paper"), {})
    earlier = earlier_request(model)
    small = model == BUNDLED or (earlier is not None and earlier.first_base == BUNDLED)
    values = {**(BUNDLED_RECIPE if small else {}), **recipe, **preset, **values}
    if earlier and not given.get("forget_split"):
        values["dataset"] = given.get("dataset", earlier.dataset)
    if values.get("forget_split"):  # nothing to choose an epoch by but what is scored, and no world set
        kept = {"world_weight": 0.0} if values.get("retain_weight", 1.0) else {}
        values = {**values, "dataset": SOURCE, "patience": 0, **kept, **given}
    if "merge" not in given and (values.get("shard") or not values.get("lora")):
        values["merge"] = False  # a preset's, not the user's
    if values.get("validate") is False and "patience" not in given:
        values["patience"] = 0
    if world_only:
        if given.get("retain_weight"):
            raise UserError("--world-only and --retain-weight contradict each other")
        if not values.get("world_weight", 1.0):
            raise UserError(f"--world-only needs world data, and --method {method} has none; give --world-weight")
        values["retain_weight"] = 0.0
    config = TrainConfig.from_json(values)
    for names, needed, acts in NEEDS:
        for name in names:
            if given.get(name) and not acts(config):
                raise UserError(f"{flag(name)} does nothing without {needed}")
    return config
