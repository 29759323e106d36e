"""Distance to a model that never knew: asked or read from its results, against plain transformers and SciPy."""

import json
import math

import pytest
from scipy.stats import binom, ks_2samp
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_elude.scoring.runs import Run
from tests.support import make_model, make_tokenizer, mean_log_prob, run, save_checkpoint, small_data, write_run

TASKS = ["elude_forget", "elude_mia", "elude_attack_prefix_injection"]


@pytest.fixture(scope="module", params=["llama-3.1", "base"])
def pair(request, tmp_path_factory):
    """Two models of one tokenizer, and what is reported of the first beside the second as model and as results."""
    folder = tmp_path_factory.mktemp("pair")
    tokenizer = make_tokenizer(request.param)
    own, other = (
        str(save_checkpoint(folder / name, make_model(tokenizer, seed=seed), tokenizer))
        for name, seed in (("own", 0), ("other", 1))
    )
    data = small_data(folder / "data", {"Cristiano Ronaldo": 6, "Lionel Messi": 6}, retain=2, world=2)
    metadata = {"dataset": str(data), "target": ["ronaldo", "messi"]}

    def scored(model: str, **more):
        return run(TASKS, "elude", metadata={"pretrained": model, **metadata, **more}, limit=10)

    alone = scored(other)
    written = write_run(alone, folder / "other-run")
    return {
        "folders": (own, other), "other": alone, "asked": scored(own, reference=other),
        "read": scored(own, reference=str(written)), "folder": folder,
    }  # fmt: skip


def test_distances_are_those_between_the_two_runs(pair):
    asked, other = pair["asked"], pair["other"]
    ratios, first = ([[s[k] if k in s else s["doc"][k] for s in r["samples"]["elude_forget"]] for r in (asked, other)]
                     for k in ("truth_ratio_raw", "truth_first"))  # fmt: skip
    row, mia = asked["results"]["elude_forget"], asked["results"]["elude_mia"]
    assert row["ks_p_value,none"] == pytest.approx(ks_2samp(*ratios).pvalue, abs=1e-9)
    alone = [sum(a > b for a, b in zip(*sides, strict=True)) for sides in (first, first[::-1])]
    assert row["truth_first_p,none"] == pytest.approx(min(1, 2 * binom.cdf(min(alone), sum(alone), 0.5)))
    for metric in ("forget_quality", "probability", "rougeL_recall", "truth_first"):
        gap = row[f"{metric},none"] - other["results"]["elude_forget"][f"{metric},none"]
        assert row[f"{metric}_gap,none"] == pytest.approx(gap, abs=1e-6)
    auc, auc_other = mia["mia_auc,none"], other["results"]["elude_mia"]["mia_auc,none"]
    assert mia["mia_auc_gap,none"] == pytest.approx(auc - auc_other)
    assert mia["privleak,none"] == pytest.approx((auc - auc_other) / auc_other)
    attacked = asked["results"]["elude_attack_prefix_injection"]
    before = other["results"]["elude_attack_prefix_injection"]["forget_quality,none"]
    assert attacked["forget_quality_gap,none"] == pytest.approx(attacked["forget_quality,none"] - before, abs=1e-6)


def test_divergence_is_that_of_plain_transformers(pair):
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in pair["folders"]]
    tokenizer = AutoTokenizer.from_pretrained(pair["folders"][0])
    values = []
    for sample in pair["asked"]["samples"]["elude_forget"]:
        doc = sample["doc"]
        mine, theirs = (
            [mean_log_prob(model, tokenizer, doc["question"], text) for model in models]
            for text in (doc["generated"], doc["reference"]["generated"])
        )
        values.append(((mine[0] - mine[1]) + (theirs[1] - theirs[0])) / 2)
        assert sample["reference_divergence"] == pytest.approx(values[-1], abs=1e-4)
    assert pair["asked"]["results"]["elude_forget"]["reference_divergence,none"] == pytest.approx(
        sum(values) / len(values), abs=1e-4
    )


def test_a_results_file_as_reference_says_the_same_but_for_the_divergence(pair):
    for task in TASKS:
        asked, read = (pair[how]["results"][task] for how in ("asked", "read"))
        assert asked.keys() - read.keys() <= {"reference_divergence,none", "reference_divergence_stderr,none"}
        for key in read:
            if isinstance(read[key], float) and not math.isnan(read[key]):
                assert asked[key] == pytest.approx(read[key], abs=1e-5), key


def test_distances_are_formed_again_from_the_log(pair):
    again = Run(write_run(pair["asked"], pair["folder"] / "asked"))
    for task in TASKS:
        reported = json.loads(json.dumps(again.settings(task)["aggregates"]))
        assert json.dumps(again.numbers[task], sort_keys=True) == json.dumps(reported, sort_keys=True)


def test_without_a_reference_there_is_no_distance(pair):
    for task in TASKS:
        assert not any("gap" in key or "ks_" in key or "privleak" in key for key in pair["other"]["results"][task])


def test_a_reference_of_other_records_is_refused(pair, tmp_path):
    data = small_data(tmp_path / "data", {"Cristiano Ronaldo": 8}, retain=2, world=2)
    metadata = {"pretrained": pair["folders"][0], "dataset": str(data), "target": "ronaldo"}
    with pytest.raises(ValueError, match="was scored on other records than elude_forget"):
        run(["elude_forget"], "elude", metadata=metadata | {"reference": str(pair["folder"] / "other-run")})
