"""The membership attack must be able to fail: real models in ``elude_mia``, forget records of two targets."""

import math

import pytest

from lm_eval_elude.scoring.estimates import Z95
from tests.support import make_model, make_tokenizer, mini_rows, run, save_checkpoint, teach

TARGETS = ["Cristiano Ronaldo", "Lionel Messi"]


def attack(folder: str, targets: list[str]) -> tuple[dict, dict]:
    results = run(["elude_mia"], metadata={"pretrained": folder, "dataset": "mini", "target": targets}, batch_size=32)
    row = {k.removesuffix(",none"): v for k, v in results["results"]["elude_mia"].items() if k.endswith(",none")}
    return row, results["configs"]["elude_mia"]["metadata"]["elude"]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer("llama-3.1", vocabulary=1500)


@pytest.mark.slow
def test_a_model_that_memorised_only_the_original_wording_is_caught(tokenizer, tmp_path):
    """It never saw a paraphrase."""
    model = make_model(tokenizer)
    rows = mini_rows("forget_qa-train", entity=TARGETS[0])
    teach(model, tokenizer, [(row["question"], row["answer"]) for row in rows], steps=60, lr=6e-3)
    row, settings = attack(save_checkpoint(tmp_path, model, tokenizer), TARGETS[:1])
    assert settings["n"] == len(rows) >= 40
    assert row["mia_accuracy"] > 0.75 and row["mia_accuracy"] - 3 * row["mia_accuracy_std"] / math.sqrt(10) > 0.5
    assert row["mia_auc"] > 0.8 and row["mia_auc_low"] > 0.5


def test_an_untrained_model_is_not_caught(tokenizer, tmp_path):
    """The interval of two targets is that of their mean, by the normal approximation."""
    row, settings = attack(save_checkpoint(tmp_path, make_model(tokenizer), tokenizer), TARGETS)
    assert settings["n"] >= 80 and row["mia_auc_low"] < 0.5 < row["mia_auc_high"]
    assert row["mia_accuracy"] == pytest.approx(0.5, abs=max(row["mia_accuracy_std"], 0.05))
    low, high = (settings["aggregates"][f"mia_auc_{end}"]["per_target"] for end in ("low", "high"))
    half = math.hypot(*((high[target]["value"] - low[target]["value"]) / 2 for target in TARGETS)) / len(TARGETS)
    assert row["mia_auc_high"] - row["mia_auc"] == pytest.approx(half) == row["mia_auc"] - row["mia_auc_low"]
    assert settings["aggregates"]["mia_auc"]["stderr"] == pytest.approx(half / Z95)
