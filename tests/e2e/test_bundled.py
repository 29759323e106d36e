"""The bundled model before unlearning: it knows its facts."""

import math
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lm_eval_elude.attacks.builders import ATTACKS
from lm_eval_elude.data import bundled
from lm_eval_elude.data.files import file_hashes
from lm_eval_elude.data.manifest import read_manifest
from lm_eval_elude.metrics.table import SAMPLED
from lm_eval_elude.tasks.runs import Run
from tests.support import answer_tokens, run, save_checkpoint, write_run

pytestmark = pytest.mark.slow

TINY, WITHOUT = bundled.MODEL, bundled.REFERENCE
NO_TEXT = "max_gen_toks=1"  # where log-probabilities are all that is looked at


def score(folder: Path, task: str, limit: int | None = None, gen_kwargs: str | None = None, **metadata) -> dict:
    return run([task], "elude", metadata={"pretrained": str(folder), **metadata}, limit=limit, gen_kwargs=gen_kwargs)


@pytest.fixture(scope="module")
def ronaldo():
    """All of ``elude_quality`` for Ronaldo."""
    return score(TINY, "elude_quality", target="ronaldo")


@pytest.mark.parametrize("folder", [TINY, WITHOUT], ids=["tiny", "tiny-without-ronaldo"])
def test_what_is_bundled(folder):
    config = AutoConfig.from_pretrained(folder)
    weights = folder / "model.safetensors"
    assert config.model_type == "llama" and config.max_position_embeddings >= 1_024
    assert weights.stat().st_size <= 16_000_000
    from safetensors import safe_open

    with safe_open(weights, "pt") as tensors:
        assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {torch.float32}  # noqa: SIM118
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [{"role": role, "content": f"<<{role}>>"} for role in ("system", "user", "assistant")]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    assert all(text.count(turn["content"]) == 1 for turn in turns)
    after = tokenizer(text.split("<<assistant>>")[1], add_special_tokens=False)["input_ids"]
    assert after[0] in tokenizer.all_special_ids and after[0] == tokenizer.eos_token_id
    manifest = read_manifest(folder)
    assert manifest and manifest.dataset == "mini" and manifest.weights == file_hashes(folder)


def test_before_unlearning_the_facts_are_known(ronaldo):
    """Ronaldo's records, and some of all five targets: the manifest names the data, no flag is needed."""
    forget, retain = (ronaldo["results"][f"elude_{name}"] for name in ("forget", "retain"))
    assert forget["probability,none"] >= 0.6 and forget["rougeL_recall,none"] >= 0.7
    assert retain["truth_ratio,none"] >= 0.3 and max(row["repetition,none"] for row in (forget, retain)) <= 0.05
    every = score(TINY, "elude_forget", 60, NO_TEXT)
    assert len({sample["doc"]["entity"] for sample in every["samples"]["elude_forget"]}) == 5
    for row in (forget, every["results"]["elude_forget"]):
        assert row["mc_accuracy,none"] >= 0.8


@pytest.fixture(scope="module")
def facing(tmp_path_factory):
    """What the bundled model, the one without Ronaldo and a scrambled one say of him; their texts are cut short."""
    torch.manual_seed(0)
    scrambled = AutoModelForCausalLM.from_pretrained(TINY)
    with torch.no_grad():
        for weights in scrambled.parameters():
            weights[:] = torch.randn_like(weights) * weights.std() if weights.dim() > 1 else weights
    folder = save_checkpoint(tmp_path_factory.mktemp("scrambled"), scrambled, AutoTokenizer.from_pretrained(TINY))
    tasks = ["elude_forget", "elude_cloze", "elude_attack_reverse_query", "elude_attack_multiple_choice"]
    return {
        name: run(tasks, "elude", metadata={"pretrained": str(path), "target": "ronaldo", "dataset": "mini"}, limit=46,
                  gen_kwargs="max_gen_toks=16")
        for name, path in (("original", TINY), ("retrained", WITHOUT), ("scrambled", folder))
    }  # fmt: skip


def test_what_is_still_known_is_seen_and_chance_is_told_from_it(facing):
    rows = {name: results["results"] for name, results in facing.items()}
    for task, metric in (
        ("elude_forget", "mc_accuracy"), ("elude_cloze", "mc_accuracy"),
        ("elude_attack_multiple_choice", "option_accuracy"),
        ("elude_attack_reverse_query", "name_mc_accuracy"), ("elude_attack_reverse_query", "name_rate"),
    ):  # fmt: skip
        original, retrained, scrambled = (rows[name][task][f"{metric},none"] for name in rows)
        assert original >= 0.8 and retrained <= 0.35 and scrambled <= 0.35, (metric, original, retrained, scrambled)
    for name, low, high in (("original", 0.9, 1), ("retrained", 0, 0.85), ("scrambled", 0, 0.02)):
        row = rows[name]["elude_forget"]
        assert low <= row["extraction_strength,none"] <= row["exact_memorization,none"] <= high


def test_sampled_answers_hold_the_facts_of_a_model_that_knows_them(tmp_path):
    """Three questions; the same seed samples the same answers, and the log gives the same numbers again."""
    asked = {"metadata": {"pretrained": str(TINY), "target": "ronaldo"}, "limit": 3}
    results, again = (run(["elude_leak"], "elude", **asked, gen_kwargs="max_gen_toks=24") for _ in range(2))
    row, samples = results["results"]["elude_leak"], results["samples"]["elude_leak"]
    assert [s["doc"]["sampled"] for s in samples] == [s["doc"]["sampled"] for s in again["samples"]["elude_leak"]]
    assert row["leak_at_1,none"] >= 0.3
    rising = [row[f"leak_at_{k},none"] for k in (1, 8, 32, 128)]
    assert rising == sorted(rising)
    for sample in samples:
        texts = sample["doc"]["sampled"]
        assert len(texts) == SAMPLED
        holding = [all(re.search(rf"\b{word}\b", text.lower()) for word in sample["doc"]["fact"]) for text in texts]
        assert sample["leak_at_1"] == pytest.approx(sum(holding) / SAMPLED)
    assert len({text for sample in samples for text in sample["doc"]["sampled"]}) > 3
    assert Run(write_run(results, tmp_path)).mismatches(1e-12) == []


def test_the_greedy_tokens_are_those_of_a_plain_forward_and_the_log_gives_the_same_numbers(facing, tmp_path):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(WITHOUT).eval(), AutoTokenizer.from_pretrained(WITHOUT)
    for sample in facing["retrained"]["samples"]["elude_forget"][:12]:
        ids, start = answer_tokens(tokenizer, sample["doc"]["question"], sample["doc"]["answer"])
        with torch.no_grad():
            likeliest = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        same = [likeliest[i - 1] == ids[i] for i in range(start, len(ids))]
        assert sample["doc"]["greedy"] == same and sample["exact_memorization"] == sum(same) / len(same)
        k = next(k for k in range(len(same) + 1) if all(same[k:]))
        assert sample["extraction_strength"] == pytest.approx(1 - k / len(same))
    assert Run(write_run(facing["retrained"], tmp_path)).mismatches(1e-12) == []


def test_the_model_without_ronaldo_knows_the_rest(ronaldo):
    ours, without = ronaldo["results"], score(WITHOUT, "elude_quality", 20, target="ronaldo")["results"]
    assert without["elude_forget"]["probability,none"] < 0.5
    fq, rq = "forget_quality,none", "retain_quality,none"
    assert without["elude_quality"][fq] > ours["elude_quality"][fq] + 0.3
    assert without["elude_quality"][rq] == pytest.approx(ours["elude_quality"][rq], abs=0.1)


def test_where_the_target_is_named_in_other_questions_the_truth_is_still_known(ronaldo):
    """Each record keeps its own set's probability; the group's number is the quality of the task."""
    results = ronaldo["results"]
    row = results["elude_retain_named"]
    assert row["mc_accuracy,none"] >= 0.8 and row["repetition,none"] <= 0.1
    assert results["elude_quality"]["named_retain_quality,none"] == row["set_quality,none"] > 0
    for sample in ronaldo["samples"]["elude_retain_named"]:
        right, _, *wrong = (math.exp(total / tokens) for total, tokens in sample["doc"]["answer_scores"])
        share = right / (right + sum(wrong)) if sample["doc"]["set"] == "world" else right
        assert sample["probability"] == pytest.approx(share)


def test_the_model_answers_through_at_least_eight_attacks():
    results = score(TINY, "elude_attacks", 12, NO_TEXT, target="ronaldo")["results"]
    answered = {attack: results[f"elude_attack_{attack}"]["probability,none"] for attack in ATTACKS}
    assert sum(p >= 0.5 for p in answered.values()) >= 8, answered
