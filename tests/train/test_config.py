"""The configuration: presets, round trip, and one clear error for each bad value."""

import json
import math
from dataclasses import fields

import pytest

from lm_eval_elude.errors import UserError
from optout_train.config import BUNDLED_MODEL, DISTANCES, METHODS, TrainConfig, build_config, flag
from optout_train.data import refusal_texts
from optout_train.losses import FORGET


def test_the_papers_hyper_parameters_are_the_defaults_of_a_real_model():
    config = build_config({"target": ("ronaldo",), "model": "some/model"})
    assert (config.learning_rate, config.weight_decay, config.batch_size, config.epochs) == (1e-5, 0.01, 32, 3)
    assert (config.eta, config.transport_weight, config.max_grad_norm, config.directions) == (0.1, 0.1, 1.0, 100)
    assert (config.forget_loss, config.distance, config.dataset, config.patience) == ("npo", "wasserstein", "hub", 1)


def test_the_bundled_model_has_its_recipe_by_name_and_by_path():
    by_name = build_config({"target": ("ronaldo",)})
    assert by_name.bundled and by_name.dataset == "mini" and by_name.batch_size == 8
    if BUNDLED_MODEL.exists():
        assert build_config({"target": ("ronaldo",), "model": str(BUNDLED_MODEL)}) == by_name


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_a_preset_over_weights_and_survives_json(method):
    config = build_config({"target": ("a", "b"), "method": method})
    assert TrainConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    alone, rt = (
        method in (*FORGET, "finetune"),
        method.endswith(("+rt", "-muon")) or method.startswith("opt-out"),
    )
    assert (config.retain_weight > 0) == (rt or method.endswith("+neighbours"))
    assert (config.world_weight > 0) == (rt or method.endswith("+world"))
    assert (config.transport_weight > 0) == method.startswith("opt-out")
    named = method.removeprefix("opt-out-")
    assert config.distance == (named if named in DISTANCES else DISTANCES[0])
    assert alone == (config.retain_weight == config.world_weight == config.transport_weight == 0)


def test_an_automatic_rate_goes_with_the_model_and_is_what_was_found():
    adapter, muon = (
        build_config({"target": ("ronaldo",), "method": name}) for name in ("opt-out-stranger", "stranger-muon")
    )
    assert (adapter.peak_rate(192, 5, 180), muon.peak_rate(192, 5, 80)) == (0.005, 0.0042)
    assert muon.peak_rate(192, 5, 120) == pytest.approx(2.8e-3)
    assert muon.peak_rate(576, 30, 32) == pytest.approx(5.83e-4, rel=0.01)
    assert muon.peak_rate(192, 5, 1) == muon.peak_rate(192, 5, 32)
    assert muon.peak_rate(4096, 32, 80) < adapter.peak_rate(4096, 32, 80)
    assert build_config({"target": ("ronaldo",), "learning_rate": 1e-3}).peak_rate(192, 5, 80) == 1e-3


def test_what_the_user_says_wins_over_preset_and_recipe():
    config = build_config({"target": ("a",), "method": "ga", "world_weight": 2.0, "epochs": 1})
    assert (config.world_weight, config.epochs, config.retain_weight) == (2.0, 1, 0.0)


def test_world_only_drops_the_neighbours_and_refuses_contradictions():
    assert build_config({"target": ("a",)}, world_only=True).retain_weight == 0
    with pytest.raises(UserError, match="--world-only and --retain-weight"):
        build_config({"target": ("a",), "retain_weight": 1.0}, world_only=True)
    with pytest.raises(UserError, match="--world-only needs world data"):
        build_config({"target": ("a",), "method": "npo"}, world_only=True)


NUMBERS = [spec.name for spec in fields(TrainConfig) if type(spec.default) in (int, float)]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [-1, -0.5, math.nan, math.inf, True])
def test_negative_or_non_finite_numbers_are_refused_by_the_flags_name(name, value):
    with pytest.raises(UserError, match=flag(name)):
        build_config({"target": ("a",), name: value})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target": ()}, "--target is missing"),
        ({"method": "npo+wd+rt"}, "--method 'npo\\+wd\\+rt' is not known; the methods are opt-out"),
        (
            {"forget_loss": "repselect", "sam": 0.1},
            "--sam needs a gradient, and that of --forget-loss repselect is one",
        ),
        ({"sam": 0.1, "dtype": "bfloat16"}, "--sam takes steps that 16 bits lose"),
        ({"forget_loss": "repselect", "dtype": "bfloat16"}, "--forget-loss repselect takes steps that 16 bits lose"),
        ({"relearn": 1.0, "sam": 0.1}, "--relearn and --sam both say where"),
        ({"relearn": 1.0, "forget_loss": "repselect"}, "--relearn needs a forget loss whose gradient forgets"),
        ({"relearn": 1.0, "recipe": "released"}, "--relearn changes whole weights within a joint step"),
        ({"forget_loss": "undo", "eta": 10.0}, "--eta is the share by which --forget-loss undo shrinks"),
        ({"forget_loss": "repselect", "optimizer": "muon"}, "--optimizer muon: repselect has its own"),
        ({"teachers": 7}, "--teachers must be at most 6, got 7"),
        ({"retain_ratio": 0}, "--retain-ratio must be above 0"),
        ({"forget_loss": "sft"}, "--forget-loss must be one of ga, npo, dpo, altpo, simnpo, wga, satimp, ce-u"),
        ({"epochs": 0}, "--epochs must be above 0"),
        ({"forget_weight": 0.0, "retain_weight": 0.0, "world_weight": 0.0}, "nothing to train on"),
        ({"recipe": "released", "micro_batch_size": 2}, "--recipe released takes NPO and DPO of a whole batch's mean"),
        ({"recipe": "ours"}, "--recipe must be one of paper, released"),
        ({"validate": False}, "--patience needs"),
        ({"merge": True}, "--merge needs --lora"),
        ({"learning_rate": 0.0}, "--learning-rate must be above 0"),
        ({"learning_rate": "auto"}, "--learning-rate auto is the rate of an adapter or of Muon: give --lora"),
        ({"lora": True, "merge": True, "shard": True}, "--merge with --shard"),
        ({"learn": "retain"}, "--learn retain is of --method finetune"),
        ({"forget_loss": "nll"}, "--patience: early stopping judges forgetting"),
        ({"dataset": "tofu@main"}, "--dataset tofu@main needs --forget-split: one of forget01"),
        ({"forget_split": "forget05"}, "--target and --forget-split contradict each other"),
        ({"target": (), "forget_split": "forget05"}, "TOFU has no world set; give --world-weight 0"),
        ({"target": (), "forget_split": "forget07"}, "--forget-split must be one of forget01, forget05, forget10, got"),
        ({"forget_loss": "stranger", "target": (), "forget_split": "forget05", "world_weight": 0.0}, "swaps names"),
    ],
)
def test_settings_that_exclude_each_other(values, message):
    with pytest.raises(UserError, match=message):
        TrainConfig(**{"target": ("a",), **values})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora_rank": 64}, "--lora-rank does nothing without --lora"),
        ({"method": "npo", "lora_alpha": 8.0}, "--lora-alpha does nothing without --lora"),
        ({"bound": 0.1}, "--bound does nothing without a stranger method"),
        ({"answers": "refuse", "method": "undial"}, "--answers does nothing without a stranger method"),
        ({"exchange": 9}, "--exchange does nothing without --self-distill"),
        ({"method": "rmu+rt", "self_distill": True}, "--self-distill does nothing without retain losses on answers"),
        ({"tofu_evaluator": "open-unlearning"}, "--tofu-evaluator does nothing without --forget-split"),
        ({"method": "npo+rt", "directions": 10}, "--directions does nothing without --transport-weight"),
        ({"dual_step": 0.1}, "--dual-step does nothing without --retain-budget"),
        ({"method": "ga+rt", "eta": 5.0}, "--eta does nothing without a forget loss that has an eta"),
        ({"method": "opt-out-manhattan", "directions": 7}, "--directions does nothing without --distance wasserstein"),
        ({"method": "ga", "self_distill": True}, "--self-distill does nothing without --retain-weight or --world"),
        ({"method": "ga", "retain_ratio": 5}, "--retain-ratio does nothing without --retain-weight or --world-weight"),
        ({"method": "npo", "retain_budget": 0.3}, "--retain-budget does nothing without --retain-weight or --world"),
        ({"method": "opt-out-stranger", "answers": "refuse", "teachers": 5}, "--teachers does nothing without --ans"),
        ({"relearn": 1.0, "forget_weight": 0.0}, "--relearn does nothing without --forget-weight"),
        ({"method": "repselect", "weight_decay": 0.1}, "--weight-decay does nothing without AdamW or Muon"),
        ({"revision": "v9"}, "--revision does nothing without a model of the Hub"),
        ({"model": ".", "revision": "v9"}, "--revision does nothing without a model of the Hub"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        build_config({"target": ("a",), **values})
    assert build_config({"target": ("a",), "model": "org/name", "revision": "v9"}).revision == "v9"
    assert build_config({"target": ("a",), "method": "npo+world", "retain_ratio": 3}).retain_ratio == 3


def test_what_a_manifest_says_has_the_fields_types_and_what_is_no_setting_any_more_is_left_out():
    assert TrainConfig.from_json({"target": ["a"], "npo_form": "sequence"}) == TrainConfig(target=("a",))
    with pytest.raises(UserError, match="--epochs: Expected `int`, got `str`"):
        TrainConfig.from_json({"target": ["a"], "epochs": "3"})


def test_one_hundred_refusals():
    texts = refusal_texts()
    assert len(texts) == len({text.lower() for text in texts}) == 100
    assert all(text == text.strip() and text.endswith(".") for text in texts)


@pytest.mark.parametrize(("method", "expected"), [
    ("altpo", {"eta": 0.1}), ("simnpo", {"eta": 4.5, "forget_weight": 0.125}), ("wga", {"eta": 1.0}),
    ("satimp", {"eta": 5.0, "forget_weight": 0.1}), ("undial", {"eta": 10.0}),
    ("pdu", {"forget_weight": 0.01, "retain_budget": 0.3}), ("rmu", {"eta": 2.0}), ("undo", {"eta": 0.6}),
    ("repselect", {"learning_rate": 0.1}), ("task-vector", {"eta": 1.0}), ("npo", {"eta": 0.1}),
])  # fmt: skip
def test_a_method_of_other_authors_has_their_settings(method, expected):
    """As the papers and open-unlearning's configurations have them; docs/training.md says the same."""
    config = build_config({"target": ("x",), "model": "org/model", "method": method})
    assert {name: getattr(config, name) for name in expected} == expected
