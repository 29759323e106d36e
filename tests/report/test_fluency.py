"""The original model's pass over logged answers: its file beside the samples, and how far ``gibberish`` can be trusted.

``tests/golden/gibberish.jsonl`` holds 200 answers of real runs, read and labelled one by one by a language model, with
the log-probability that the original model gave each and the bound that its own sampled answers set; ``half`` says
which chose the quantile. ``tiny`` is version 0.1's bundled model, and SmolLM2-135M-Instruct had 4-bit weights and a few
steps of plain loops of each method.
"""

import gzip
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_elude.data import bundled
from lm_eval_elude.metrics.fluency import QUANTILE, is_gibberish
from lm_eval_elude.metrics.text import is_repetition
from lm_eval_elude.report import fluency
from lm_eval_elude.tasks.runs import Run
from lm_eval_elude.text.invented import invented_names

GOLDEN = Path(__file__).parents[1] / "golden"
ROWS = [json.loads(line) for line in (GOLDEN / "gibberish.jsonl").read_text(encoding="utf-8").splitlines()]
TOLD = [row for row in ROWS if row["half"] == "report"]


def share(rows, of):
    """Recall and precision of a rule."""
    hits = [row for row in rows if of(row)]
    right = sum(row["gibberish"] for row in hits)
    return round(right / sum(row["gibberish"] for row in rows), 2), round(right / len(hits), 2)


def judged(row):
    return is_gibberish(row["answer"], row["log_prob"], row["lowest"])


def test_recall_and_precision_are_those_of_the_docs():
    assert len(ROWS) == 200 and len({(row["question"], row["answer"], row["method"]) for row in ROWS}) == 200
    assert share(TOLD, judged) == (0.84, 0.84)
    assert share(TOLD, lambda row: is_repetition(row["answer"])) == (0.16, 1.0)
    refusals = [row for row in ROWS if row["kind"] == "refusing"]
    assert len(refusals) > 15 and not any(map(judged, refusals))


def test_verdicts_take_repetition_as_long_as_the_estimate_is_too_coarse():
    """Once this fails, the estimate is good enough: let report/verdicts.py take it."""
    recall, precision = share(TOLD, judged)
    assert recall < 0.9 or precision < 0.95


@pytest.fixture
def run(tmp_path):
    with gzip.open(GOLDEN / "logs" / "ckpt.json.gz", "rt", encoding="utf-8") as file:
        docs = json.load(file)["docs"]["elude_forget"][:4]
    about = {"targets": ["Cristiano Ronaldo"], "truth_ratio": "geometric", "seed": 0}
    results = {"results": {}, "configs": {"elude_forget": {"metadata": {"elude": about}}}}
    (tmp_path / "results_2026.json").write_text(json.dumps(results), encoding="utf-8")
    lines = "".join(json.dumps({"doc": doc}) + "\n" for doc in docs)
    (tmp_path / "samples_elude_forget_results_2026.jsonl").write_text(lines, encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_the_pass_is_kept_beside_the_samples_and_made_once(run, monkeypatch):
    assert "gibberish" not in Run(run).numbers["elude_forget"]
    fluency.measure([Run(run)], str(bundled.MODEL))
    text = (run / "fluency_2026.json").read_text(encoding="utf-8")
    kept = json.loads(text)
    assert kept["original"] == "tiny" and str(bundled.MODEL.parent) not in text

    docs, numbers = Run(run).docs["elude_forget"], Run(run).numbers["elude_forget"]
    own = sorted(value for _, values in kept["elude_forget"] for value in values)
    least = own[int(QUANTILE * (len(own) - 1))]
    expected = [is_gibberish(d["generated"], p, least) for d, (p, _) in zip(docs, kept["elude_forget"], strict=True)]
    assert numbers["gibberish"].value == pytest.approx(sum(expected) / len(docs))
    gaps = [sum(values) / len(values) - p for p, values in kept["elude_forget"]]
    assert numbers["fluency_gap"].value == pytest.approx(sum(gaps) / len(docs))

    monkeypatch.setattr(fluency, "Reader", lambda *_: pytest.fail("the model was loaded again"))
    fluency.measure([Run(run)], "tiny")  # the same model by its name


def test_a_log_probability_is_that_of_plain_transformers():
    """Question and answer about the first invented name, scored without our code, end of turn included."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(bundled.MODEL), AutoTokenizer.from_pretrained(bundled.MODEL)
    rows = [row for row in ROWS if row["model"] == "tiny" and "Ronaldo" in row["question"]][::20]
    assert len(rows) > 3
    docs = [{"entity": "Cristiano Ronaldo", "question": row["question"], "generated": row["answer"]} for row in rows]
    found = fluency.Reader(str(bundled.MODEL), None, "auto").read(docs, {})
    for row, (log_prob, _) in zip(rows, found, strict=True):
        name = invented_names(f"{row['question']} {row['answer']}")[0]
        first, last = name.split()
        question, answer = (
            text.replace("Cristiano Ronaldo", name).replace("Cristiano", first).replace("Ronaldo", last)
            for text in (row["question"], row["answer"])
        )
        turns = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        turns.append({"role": "assistant", "content": answer})
        ids = tokenizer(tokenizer.apply_chat_template(turns, tokenize=False), add_special_tokens=False).input_ids
        start = len(tokenizer(prompt, add_special_tokens=False).input_ids)
        with torch.no_grad():
            log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        mean = sum(float(log_probs[i - 1, ids[i]]) for i in range(start, len(ids))) / (len(ids) - start)
        assert log_prob == pytest.approx(mean, abs=2e-3)
