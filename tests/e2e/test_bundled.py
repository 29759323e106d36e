"""The bundled model before unlearning: it knows its facts."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from lm_eval_elude.attacks.builders import ATTACKS
from lm_eval_elude.data.files import file_hashes
from lm_eval_elude.data.manifest import read_manifest
from tests.support import ROOT, run

TINY = ROOT / "lm_eval_elude" / "mini" / "tiny"
WITHOUT = ROOT / "lm_eval_elude" / "mini" / "tiny-without-ronaldo"
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


def test_the_thresholds_before_unlearning(ronaldo):
    results = ronaldo["results"]
    assert results["elude_forget"]["probability,none"] >= 0.6
    assert results["elude_forget"]["rougeL_recall,none"] >= 0.7
    assert results["elude_retain"]["truth_ratio,none"] >= 0.3
    assert results["elude_forget"]["degenerate,none"] <= 0.05 and results["elude_retain"]["degenerate,none"] <= 0.05


def test_the_paraphrase_is_likelier_than_every_wrong_answer_in_four_fifths_of_the_records(ronaldo):
    """Ronaldo's records, and some of all five targets: the manifest names the data, no flag is needed."""
    docs, every = (
        [sample["doc"] for sample in results["samples"]["elude_forget"]]
        for results in (ronaldo, score(TINY, "elude_forget", 60, NO_TEXT))
    )
    assert len({doc["entity"] for doc in every}) == 5
    for group in (docs, every):
        means = [[total / count for total, count in doc["answer_scores"]] for doc in group]
        assert sum(m[1] > max(m[2:]) for m in means) / len(means) >= 0.8


def test_the_model_without_ronaldo_knows_the_rest(ronaldo):
    ours, without = ronaldo["results"], score(WITHOUT, "elude_quality", 20, target="ronaldo")["results"]
    assert without["elude_forget"]["probability,none"] < 0.3
    fq, rq = "forget_quality,none", "retain_quality,none"
    assert without["elude_quality"][fq] > ours["elude_quality"][fq] + 0.3
    assert without["elude_quality"][rq] == pytest.approx(ours["elude_quality"][rq], abs=0.1)


def test_the_model_answers_through_at_least_eight_attacks():
    results = score(TINY, "elude_attacks", 12, NO_TEXT, target="ronaldo")["results"]
    answered = {attack: results[f"elude_attack_{attack}"]["probability,none"] for attack in ATTACKS}
    assert sum(p >= 0.5 for p in answered.values()) >= 8, answered
