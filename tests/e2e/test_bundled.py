"""The bundled model before unlearning: it knows its facts."""

import math
import re
from pathlib import Path

import pytest
import torch
from lm_eval.models.openai_completions import LocalChatCompletion
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lm_eval_elude.attacks.builders import ATTACKS
from lm_eval_elude.data import bundled
from lm_eval_elude.data.files import file_hashes
from lm_eval_elude.data.manifest import read_manifest
from lm_eval_elude.scoring.metrics import DRAWS
from lm_eval_elude.scoring.runs import Run
from tests.endpoints import completion, endpoint
from tests.support import answer_tokens, formed_again, numbers_again, run, save_checkpoint, write_run

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
    assert weights.stat().st_size <= 12 * 2**20
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
    assert retain["truth_ratio,none"] >= 0.3 and max(row["degenerate,none"] for row in (forget, retain)) <= 0.05
    every = score(TINY, "elude_forget", 60, NO_TEXT)
    assert len({sample["doc"]["entity"] for sample in every["samples"]["elude_forget"]}) == 5
    for row in (forget, every["results"]["elude_forget"]):
        assert row["truth_first,none"] >= 0.8


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
        ("elude_forget", "truth_first"), ("elude_cloze", "truth_first"), ("elude_attack_multiple_choice", "chosen"),
        ("elude_attack_reverse_query", "named_first"), ("elude_attack_reverse_query", "named"),
    ):  # fmt: skip
        original, retrained, scrambled = (rows[name][task][f"{metric},none"] for name in rows)
        assert original >= 0.8 and retrained <= 0.35 and scrambled <= 0.35, (metric, original, retrained, scrambled)
    for name, low, high in (("original", 0.9, 1), ("retrained", 0, 0.5), ("scrambled", 0, 0.02)):
        row = rows[name]["elude_forget"]
        assert low <= row["extraction_strength,none"] <= row["exact_memorization,none"] <= high


def test_drawn_answers_hold_the_facts_of_a_model_that_knows_them(tmp_path):
    """Three questions; the same seed draws the same answers, and the log gives the same numbers again."""
    asked = {"metadata": {"pretrained": str(TINY), "target": "ronaldo", "reference": str(WITHOUT)}, "limit": 3}
    results, again = (run(["elude_leak"], "elude", **asked, gen_kwargs="max_gen_toks=24") for _ in range(2))
    row, samples = results["results"]["elude_leak"], results["samples"]["elude_leak"]
    assert [s["doc"]["sampled"] for s in samples] == [s["doc"]["sampled"] for s in again["samples"]["elude_leak"]]
    assert row["leak_at_1,none"] >= 0.3 and row["leak_at_1_gap,none"] >= 0.2
    rising = [row[f"leak_at_{k},none"] for k in (1, 8, 32, 128)]
    assert rising == sorted(rising)
    for sample in samples:
        texts = sample["doc"]["sampled"]
        assert len(texts) == DRAWS and len({*texts, *sample["doc"]["reference"]["sampled"]}) > 1
        holding = [all(re.search(rf"\b{word}\b", text.lower()) for word in sample["doc"]["fact"]) for text in texts]
        assert sample["leak_at_1"] == pytest.approx(sum(holding) / DRAWS)
    formed_again(Run(write_run(results, tmp_path)))


@pytest.mark.slow
def test_answers_are_drawn_from_chat_completions_too(tmp_path):
    """The server writes the prompt; a model named as reference is asked as always."""
    bodies = []

    def act(handler, question, count):
        bodies.append(handler.asked)
        knows = "born" in question and count % 2
        handler.reply(200, completion("He was born on 5 February 1985 in Funchal." if knows else "Nobody knows."))

    metadata = {"pretrained": str(TINY), "target": "ronaldo", "reference": str(TINY)}
    with endpoint(act) as (address, _):
        model = LocalChatCompletion(base_url=f"{address}/chat/completions", model="m", num_concurrent=8)
        sent = "top_k=None,seed=None,max_gen_toks=24"
        asked = {"limit": 1, "batch_size": 1, "apply_chat_template": True, "gen_kwargs": sent}
        results = run(["elude_leak"], model, metadata=metadata, system_instruction="Be brief.", **asked)
    (sample,), row = results["samples"]["elude_leak"], results["results"]["elude_leak"]
    assert row["leak_at_1,none"] == sample["leak_at_1"] == pytest.approx(0.5) and row["leak_at_1_gap,none"] < 0.5
    ((system, user),) = {tuple((turn["role"], turn["content"]) for turn in body["messages"]) for body in bodies}
    assert system == ("system", "Be brief.") and user == ("user", sample["doc"]["question"]) and len(bodies) == DRAWS
    assert {(body["temperature"], body["seed"], "top_k" in body) for body in bodies} == {(1.0, None, False)}
    formed_again(Run(write_run(results, tmp_path)))


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
    formed_again(Run(write_run(facing["retrained"], tmp_path)))


def test_the_model_without_ronaldo_knows_the_rest(ronaldo):
    ours, without = ronaldo["results"], score(WITHOUT, "elude_quality", 20, target="ronaldo")["results"]
    assert without["elude_forget"]["probability,none"] < 0.3
    fq, rq = "forget_quality,none", "retain_quality,none"
    assert without["elude_quality"][fq] > ours["elude_quality"][fq] + 0.3
    assert without["elude_quality"][rq] == pytest.approx(ours["elude_quality"][rq], abs=0.1)


def test_in_passing_the_truth_still_comes_first_and_the_log_gives_the_same_numbers(ronaldo, tmp_path):
    """Each record keeps its own set's probability; the group's number is the quality of the task."""
    results, again = ronaldo["results"], Run(write_run(ronaldo, tmp_path))
    row = results["elude_retain_mention"]
    assert row["truth_first,none"] >= 0.8 and row["degenerate,none"] <= 0.1
    assert results["elude_quality"]["mention_quality,none"] == row["set_quality,none"] > 0
    assert numbers_again(again)["elude_quality"]["mention_quality"]["value"] == row["set_quality,none"]
    for sample in ronaldo["samples"]["elude_retain_mention"]:
        right, _, *wrong = (math.exp(total / tokens) for total, tokens in sample["doc"]["answer_scores"])
        share = right / (right + sum(wrong)) if sample["doc"]["set"] == "world" else right
        assert sample["probability"] == pytest.approx(share)


def test_the_model_answers_through_at_least_eight_attacks():
    results = score(TINY, "elude_attacks", 12, NO_TEXT, target="ronaldo")["results"]
    answered = {attack: results[f"elude_attack_{attack}"]["probability,none"] for attack in ATTACKS}
    assert sum(p >= 0.5 for p in answered.values()) >= 8, answered
