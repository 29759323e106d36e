"""TOFU's tasks against an evaluator of its own: plain transformers, NumPy and SciPy, on files laid out as the Hub's."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from scipy.stats import hmean, ks_2samp
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_elude.errors import UserError
from lm_eval_elude.tasks.harness import EludeTask
from lm_eval_elude.tasks.runs import Run
from tests.support import make_model, make_tokenizer, mini_rows, run, save_checkpoint, write_run

SETS = {
    "tofu_forget": "forget05_perturbed", "tofu_retain": "retain_perturbed",
    "tofu_real_authors": "real_authors_perturbed", "tofu_world_facts": "world_facts_perturbed",
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Questions of ELUDe-mini in TOFU's columns: JSON rows, five wrong answers or three and no paraphrase."""
    folder = tmp_path_factory.mktemp("tofu")
    rows = [*mini_rows("forget_qa-train", 6), *mini_rows("retain_qa-test", 2), *mini_rows("world-test", 4)]
    keys = ("question", "answer", "paraphrased_answer", "perturbed_answer")
    for name, part in zip(SETS.values(), (rows[:6], rows[6:8], rows[8:10], rows[10:]), strict=True):
        lines = [{key: row[key] for key in keys} for row in part]
        if "real" in name or "world" in name:
            lines = [
                {**row, "paraphrased_answer": None, "perturbed_answer": row["perturbed_answer"][:3]} for row in lines
            ]
        (folder / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    tokenizer = make_tokenizer("llama-3.1")
    return {
        name: save_checkpoint(folder / name, make_model(tokenizer, width=32, layers=1, seed=seed), tokenizer)
        for seed, name in enumerate(("own", "retained"))
    }


def evaluate(folder: str, data: Path, name: str, generates: bool) -> dict[str, dict[str, object]]:
    """One set as the released evaluator logs it: per-token losses of everything after the question, and ROUGE."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    keys = ("avg_gt_loss", "avg_paraphrased_loss", "average_perturb_loss", "rougeL_recall")
    log: dict[str, dict] = {key: {} for key in keys}

    def loss(question: str, answer: str) -> float:
        start = len(tokenizer(f"Question: {question}\n").input_ids)
        ids = [*tokenizer(f"Question: {question}\nAnswer: {answer}").input_ids, tokenizer.eos_token_id]
        with torch.no_grad():
            log_probs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        return -np.mean([log_probs[t - 1, ids[t]].item() for t in range(start, len(ids))])

    for i, line in enumerate((data / f"{name}.json").read_text().splitlines()):
        row = json.loads(line)
        question = row["question"]
        log["avg_gt_loss"][str(i)] = loss(question, row["answer"])
        log["avg_paraphrased_loss"][str(i)] = loss(question, row["paraphrased_answer"] or row["answer"])
        log["average_perturb_loss"][str(i)] = [loss(question, wrong) for wrong in row["perturbed_answer"]]
        if not generates:
            continue
        ids = tokenizer(f"Question: {question}\n", return_tensors="pt").input_ids
        with torch.no_grad():
            out = model.generate(ids, max_length=200, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        scorer = RougeScorer(["rougeL"], use_stemmer=True)
        log["rougeL_recall"][str(i)] = scorer.score(row["answer"], text)["rougeL"].recall
    return log


def values(log: dict, task: str) -> tuple[float, float, float]:
    """Probability, ROUGE and truth ratio of a set, by the released formulas."""
    gt, paraphrase = (np.array(list(log[k].values())) for k in ("avg_gt_loss", "avg_paraphrased_loss"))
    wrong = np.array(list(log["average_perturb_loss"].values()))
    probability = np.exp(-gt)
    if task in ("tofu_real_authors", "tofu_world_facts"):
        probability = probability / (probability + np.exp(-wrong).sum(-1))
    ratio = np.exp(paraphrase - wrong.mean(-1))  # wrong over right
    told = np.minimum(ratio, 1 / ratio) if task == "tofu_forget" else np.maximum(0, 1 - ratio)
    return probability.mean(), np.mean(list(log["rougeL_recall"].values())), told.mean()


def ratios(log: dict) -> np.ndarray:
    wrong = np.array(list(log["average_perturb_loss"].values())).mean(-1)
    return np.exp(np.array(list(log["avg_paraphrased_loss"].values())) - wrong)


@pytest.fixture(scope="module")
def logs(models, data) -> dict[str, dict[str, dict]]:
    return {
        "own": {task: evaluate(models["own"], data, name, True) for task, name in SETS.items()},
        "retained": {"tofu_forget": evaluate(models["retained"], data, SETS["tofu_forget"], False)},
    }


def scored(model: str, data: Path, task: str = "tofu", **metadata):
    found = {"pretrained": model, "tofu_split": "forget05", "tofu_data": str(data), **metadata}
    return run([task], "elude", metadata=found)


def test_the_nine_values_and_the_ks_test_are_those_of_the_released_formulas(models, data, logs, tmp_path):
    whole = scored(models["own"], data)
    nine = []
    for task in SETS:
        expected = values(logs["own"][task], task)
        row = whole["results"][task]
        got = [row[f"{metric},none"] for metric in ("probability", "rougeL_recall", "truth_ratio")]
        assert got == pytest.approx(expected, abs=1e-4), task
        nine += [] if task == "tofu_forget" else list(expected)
    assert len(nine) == 9
    assert whole["results"]["tofu"]["model_utility,none"] == pytest.approx(hmean(nine), abs=1e-4)
    used = whole["configs"]["tofu_forget"]["metadata"]["elude"]
    assert (used["split"], used["evaluator"]) == ("forget05", "released")
    retained = scored(models["retained"], data, "tofu_forget")
    own, other = Run(write_run(whole, tmp_path / "own")), Run(write_run(retained, tmp_path / "retained"))
    assert own.mismatches(1e-12) == other.mismatches(1e-12) == []
    p = ks_2samp(*(ratios(logs[who]["tofu_forget"]) for who in ("own", "retained"))).pvalue
    assert own.beside(other)["tofu_forget"]["ks_p_value"].value == pytest.approx(p, abs=1e-9)
    assert other.beside(other)["tofu_forget"]["ks_p_value"].value == 1


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"tofu_split": "forget07"}, "tofu_split in --metadata must be one of forget01, forget05, forget10"),
        ({"tofu_evaluator": "mine"}, "tofu_evaluator in --metadata must be one of released"),
        ({"tofu_split": "forget10"}, "has no forget10_perturbed "),
        ({"tofu_splt": "forget05"}, "did you mean 'tofu_split'"),
    ],
)
def test_settings_that_cannot_be_are_one_line(metadata, said, models, data):
    found = {"pretrained": models["own"], "tofu_split": "forget05", "tofu_data": str(data), **metadata}
    with pytest.raises(UserError, match=said) as error:
        EludeTask({"task": "tofu_forget", "metadata": found})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("given", "used"), [({}, 200), ({"max_gen_toks": 50}, 50), ({"max_gen_toks": 128}, 128)])
def test_the_users_number_of_new_tokens_wins(given, used, models, data):
    metadata = {"pretrained": models["own"], "tofu_split": "forget05", "tofu_data": str(data)}
    for evaluator in ("released", "open-unlearning"):
        task = EludeTask({"task": "tofu_forget", "metadata": metadata | {"tofu_evaluator": evaluator}})
        task.set_config("generation_kwargs", given, update=True)  # what --gen_kwargs does
        task.build_all_requests(limit=1)
        prompt, arguments = task.instances[-1].args
        with_prompt = len(task.renderer.encode(prompt)) if evaluator == "released" and not given else 0
        assert arguments["max_gen_toks"] + with_prompt == used and arguments["do_sample"] is False
