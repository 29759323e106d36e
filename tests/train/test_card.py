"""The model card and the Hub's evaluation results, read back by huggingface_hub."""

import re

import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries

from lm_eval_elude.data.manifest import Manifest
from optout_train.card import card_files
from optout_train.config import build_config

SCORES = {
    "elude_quality": {"forget_quality,none": 0.8123456789, "retain_quality,none": 0.7},
    "elude_forget": {"truth_first,none": 0.25, "log_truth_ratio,none": -0.5, "degenerate,none": 1.0},
    "elude_retain": {"degenerate,none": float("nan")},
}
HUB = {"dataset": "hub", "repository": "some/repository", "revision": "0" * 40, "world": "https://world.invalid"}


def write(folder, *, model="some/model", data=HUB, target="Ada Example", **others):
    config = build_config({"model": model, "target": (target,), "dataset": data["dataset"]})
    manifest = Manifest(
        (target,), data["dataset"], "opt-out", data, {"forget-train": "f" * 16}, config.to_json(),
        {"name": model, "weights": {"model.safetensors": "a" * 64}},
    )  # fmt: skip
    scored = {"original": SCORES, "this checkpoint": SCORES, **others}
    for name, text in card_files(folder, config, manifest, scored, "lm_eval --tasks elude_quality").items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return ModelCard.load(folder / "README.md")


def test_the_card_says_scores_base_model_data_licence_and_limits(tmp_path):
    card = write(tmp_path)
    assert card.data.base_model == "some/model" and card.data.datasets == ["some/repository"]
    found = {r.metric_type: (r.metric_value, r.dataset_type, r.dataset_revision) for r in card.data.eval_results}
    assert found["forget_quality"] == (0.812346, "some/repository", "0" * 40)
    assert found["degenerate"][0] == 1.0 and card.data.model_name == tmp_path.name
    for part in (
        "Ada Example",
        "| this checkpoint | 81.2 % | 70.0 % | 25.0 % | -0.50 nats per token | 100.0 % | – |",
        "A model that never knew: not scored.",
        "Level of proof: none",
        "CC BY-NC 4.0",
        "erased",
        "a" * 64,
        "f" * 16,
    ):
        assert part in card.text
    assert card.data.license is None


def test_the_hub_reads_one_result_for_each_headline_number(tmp_path):
    write(tmp_path)
    entries = parse_eval_result_entries(yaml.safe_load((tmp_path / ".eval_results" / "elude.yaml").read_text()))
    assert [(e.dataset_id, e.task_id, e.value) for e in entries] == [
        ("some/repository", "elude_forget_quality", 0.812346), ("some/repository", "elude_retain_quality", 0.7),
    ]  # fmt: skip
    assert all("lm_eval --tasks" in e.notes and e.dataset_revision == "0" * 40 for e in entries)


def test_the_card_and_the_hubs_results_have_the_values_of_a_model_that_never_knew(tmp_path):
    never_knew = {
        "elude_quality": {"forget_quality,none": 0.9},
        "elude_forget": {"truth_first,none": 0.125, "log_truth_ratio,none": 1.25},
    }
    card = write(tmp_path, **{"retrained without": never_knew})
    (line,) = [line for line in card.text.splitlines() if line.startswith("A model that never knew")]
    assert line.endswith(": forget quality 90.0 %, truth still likeliest 12.5 %, log R 1.25 nats per token.")
    names = {r.metric_type: r.metric_name for r in card.data.eval_results}
    assert names["forget_quality"] == "forget quality (never knew: 90.0 %)"
    assert names["retain_quality"] == "retain quality"  # the other's is not known
    entries = yaml.safe_load((tmp_path / ".eval_results" / "elude.yaml").read_text())
    assert all("never knew: forget quality 90.0 %" in entry["notes"] for entry in entries)


def test_local_data_and_models_are_not_called_by_names_of_the_hub(tmp_path):
    card = write(tmp_path, model="tiny", data={"dataset": str(tmp_path)})
    assert card.data.base_model is None and card.data.datasets is None and card.data.license == "apache-2.0"
    assert not (tmp_path / ".eval_results").exists()
    assert {r.dataset_type for r in card.data.eval_results} == {tmp_path.name}


@pytest.mark.parametrize("target", ["---\nlicense: mit\n---", "<img src=x> | [a](http://b) `c` \u202e", "# {{ x }}"])
def test_names_are_text(tmp_path, target):
    card = write(tmp_path, target=target)
    outside = re.sub(r"`[^`\n]*`", "", card.text.replace("\\`", ""))
    assert card.data.license is None and not re.search(r"(?<!\\)<img|(?<!\\)\[a", outside)
    assert card.text.count("\n# ") + card.text.startswith("# ") == 1 and "\u202e" not in card.text
