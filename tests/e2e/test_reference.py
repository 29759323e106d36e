"""What other models say of the same documents: one that never knew, asked or read from results, and the original."""

import json
import math
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import binom, ks_2samp
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_elude.data.bundled import MODEL, REFERENCE
from lm_eval_elude.scoring.benchmarks import BENCHMARKS
from lm_eval_elude.scoring.runs import Run
from lm_eval_elude.scoring.settings import say_once
from lm_eval_elude.tasks import harness, reference
from tests.board.runs import changed
from tests.support import (
    formed_again,
    greedy,
    make_model,
    make_tokenizer,
    mean_log_prob,
    mini_rows,
    read_jsonl,
    run,
    save_checkpoint,
    small_data,
    teach,
    write_jsonl,
    write_run,
)

TASKS = ["elude_forget", "elude_mia", "elude_attack_prefix_injection"]


@pytest.fixture(scope="module", params=["llama-3.1", "base"])
def pair(request, tmp_path_factory):
    """Two models of one tokenizer, and what is reported of the first beside the second as model and as results."""
    folder = tmp_path_factory.mktemp("pair")
    tokenizer = make_tokenizer(request.param)
    folders = []
    for seed in range(2):  # taught a little, so that they say different things
        model = make_model(tokenizer, seed=seed)
        pairs = [(row["question"], row["answer"]) for row in mini_rows("world-test", 24)[seed::2]]
        teach(model, tokenizer, pairs, steps=40, seed=seed)
        folders.append(save_checkpoint(folder / str(seed), model, tokenizer))
    own, other = folders
    data = small_data(folder / "data", {"Cristiano Ronaldo": 6, "Lionel Messi": 6}, retain=2, world=2)
    metadata = {"dataset": str(data), "target": ["ronaldo", "messi"]}

    def scored(model: str, **more):
        metadata_of_model = {"pretrained": model, **metadata, **more}
        return run(TASKS, "elude", metadata=metadata_of_model, limit=10, gen_kwargs="max_gen_toks=32")

    alone = scored(other)
    written = write_run(alone, folder / "other-run")
    return {
        "folders": (own, other), "other": alone, "asked": scored(own, reference=other, original=other),
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
    assert mia["privleak,none"] == pytest.approx((auc_other - auc) / (1 - auc_other))
    attacked = asked["results"]["elude_attack_prefix_injection"]
    before = other["results"]["elude_attack_prefix_injection"]["forget_quality,none"]
    assert attacked["forget_quality_gap,none"] == pytest.approx(attacked["forget_quality,none"] - before, abs=1e-6)


def test_divergence_and_oddness_are_those_of_plain_transformers(pair):
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in pair["folders"]]
    tokenizer = AutoTokenizer.from_pretrained(pair["folders"][0])
    row, samples = pair["asked"]["results"]["elude_forget"], pair["asked"]["samples"]["elude_forget"]
    values = []
    for sample in samples:
        doc, name = sample["doc"], sample["doc"]["original"]["invented_name"]
        mine, theirs = (
            [mean_log_prob(model, tokenizer, doc["question"], text.strip()) for model in models]
            for text in (doc["generated"], doc["reference"]["generated"])
        )
        question = doc["question"]
        for word, new in ((doc["entity"], name), *zip(doc["entity"].split(), name.split(), strict=True)):
            question = question.replace(word, new)
        assert not {*name.split()} & {*f"{doc['question']} {doc['answer']}".split()}
        fluent = greedy(models[1], tokenizer, question, 32)
        assert fluent.strip() == doc["original"]["generated"].strip()
        # These models name nobody.
        scores = [mean_log_prob(models[1], tokenizer, question, text.strip()) for text in (fluent, doc["generated"])]
        values.append((((mine[0] - mine[1]) + (theirs[1] - theirs[0])) / 2, scores[0] - scores[1]))
        assert (sample["reference_divergence"], sample["oddness"]) == pytest.approx(values[-1], abs=1e-4)
    means = [sum(column) / len(samples) for column in zip(*values, strict=True)]
    assert [row["reference_divergence,none"], row["oddness,none"]] == pytest.approx(means, abs=1e-4)
    assert row["oddness_stderr,none"] > 0


def test_oddness_is_0_of_the_original_where_nobody_is_named_and_large_of_word_salad(tmp_path):
    """A limit changes nothing of a record."""
    asked = [{**row, "question": "What is a cat?", "paraphrased_question": "", "answer": "A cat is an animal."}
             for row in mini_rows("forget_qa-train", 1, "Cristiano Ronaldo")]  # fmt: skip
    write_jsonl(tmp_path / "forget_qa-train.jsonl", [*asked, *mini_rows("forget_qa-train", 4, "Cristiano Ronaldo")])
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    torch.manual_seed(0)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(0.6 * weights.std() * torch.randn_like(weights))
    broken = save_checkpoint(tmp_path / "broken", model, tokenizer)
    metadata = {"dataset": str(tmp_path), "target": "ronaldo", "original": str(MODEL)}

    def scored(model, **how):
        how["gen_kwargs"] = "max_gen_toks=32"
        found = run(["elude_forget"], "elude", metadata={"pretrained": str(model), **metadata}, **how)
        return [sample["oddness"] for sample in found["samples"]["elude_forget"]]

    (same, *original), (_, *never_knew), (_, *salad) = scored(MODEL), scored(REFERENCE), scored(broken)
    assert same == pytest.approx(0, abs=1e-5)
    assert sum(salad) > sum(never_knew) + 4 and sum(salad) > sum(original) + 4  # of four records
    assert scored(REFERENCE, limit=3)[1:] == pytest.approx(never_knew[:2], abs=1e-4)


@pytest.mark.parametrize("pair", ["base"], indirect=True)
def test_without_an_original_no_oddness_and_one_line_and_without_a_reference_no_distance(pair, caplog):
    say_once.cache_clear()
    caplog.set_level("INFO", "lm_eval.elude")
    metadata = {"pretrained": pair["folders"][0], "dataset": str(pair["folder"] / "data"), "target": "ronaldo"}
    for _ in range(2):
        run(["elude_forget"], "elude", metadata=metadata, limit=1, gen_kwargs="max_gen_toks=1")
    assert [line for line in caplog.messages if "oddness" in line] == [
        "ELUDe: no original in --metadata: oddness is absent"
    ]
    reported = {key for task in TASKS for key in pair["other"]["results"][task]}
    assert not [key for key in reported if any(word in key for word in ("gap", "oddness", "ks_", "privleak"))]


@pytest.mark.parametrize("pair", ["base"], indirect=True)
def test_an_original_that_is_no_model_is_one_line_before_the_first_request(pair):
    metadata = {"pretrained": pair["folders"][0], "dataset": str(pair["folder"] / "data"), "target": "ronaldo"}
    with pytest.raises(ValueError, match=r"original 'no/such' in --metadata is not a model that can be") as error:
        run(["elude_forget"], "elude", metadata=metadata | {"original": "no/such"}, limit=1)
    assert "\n" not in str(error.value)


def test_what_a_model_answers_in_another_type_is_kept_in_a_file_of_its_own(monkeypatch):
    kept: list[str] = []
    monkeypatch.setattr(harness, "cache_beside", kept.append)
    monkeypatch.setattr(reference, "_loaded", lambda arguments, cache, weights: None)
    for dtype in ("float32", "bfloat16", "", "float32"):
        reference._load(str(MODEL), dtype)
    assert kept[0] == kept[3] and len({*kept}) == 3


@pytest.mark.parametrize("pair", ["base"], indirect=True)
@pytest.mark.parametrize(
    ("key", "said"),
    [("reference", "the evaluated model: give its results file instead$"), ("original", "the evaluated model$")],
)
def test_a_model_of_another_tokenizer_is_one_line_before_the_first_request(key, said, pair, tmp_path):
    tokenizer = make_tokenizer("llama-3.1", vocabulary=600)
    other = save_checkpoint(tmp_path / "other", make_model(tokenizer), tokenizer)
    metadata = {"pretrained": pair["folders"][0], "dataset": str(pair["folder"] / "data"), "target": "ronaldo"}
    with pytest.raises(ValueError, match=f"^{key} '.*' in --metadata has another tokenizer than {said}") as error:
        run(["elude_forget"], "elude", metadata=metadata | {key: other}, limit=1)
    assert "\n" not in str(error.value)


def test_a_results_file_as_reference_says_the_same_but_for_what_needs_a_model(pair):
    needs_model = {"reference_divergence", "oddness"}
    for task in TASKS:
        asked, read = (pair[how]["results"][task] for how in ("asked", "read"))
        assert {key.split(",")[0].removesuffix("_stderr") for key in asked.keys() - read.keys()} <= needs_model
        for key in read:
            if isinstance(read[key], float) and not math.isnan(read[key]):
                assert asked[key] == pytest.approx(read[key], abs=1e-5), key


def test_distances_are_formed_again_from_the_log(pair):
    formed_again(Run(write_run(pair["asked"], pair["folder"] / "asked")))


@pytest.mark.parametrize("pair", ["base"], indirect=True)
def test_two_records_that_share_a_question_each_have_their_own_answers(pair, tmp_path):
    path = Path(shutil.copytree(pair["folder"] / "other-run", tmp_path / "run"))
    file = Run(path).sample_file("elude_forget")
    rows = read_jsonl(file)
    for row in rows[:2]:
        row["doc"] |= {"entity": "Ada", "question": "Who?", "answer": "Ada."}  # the wrong answers tell them apart
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    asked = [SimpleNamespace(doc=row["doc"]) for row in rows]
    task = SimpleNamespace(task_name=(name := "elude_forget"), docs=[r.doc for r in asked], instances=asked)
    task.settings, task.benchmark = None, BENCHMARKS[name]
    known = reference.ReferenceRun(Run(path))
    known.check(task)
    assert all(known.answers[r.doc["id"]]["answer_scores"] == r.doc["answer_scores"] for r in asked)


@pytest.mark.parametrize("pair", ["base"], indirect=True)
def test_a_reference_of_other_records_is_refused(pair, tmp_path):
    data = small_data(tmp_path / "data", {"Cristiano Ronaldo": 8}, retain=2, world=2)
    metadata = {"pretrained": pair["folders"][0], "dataset": str(data), "target": "ronaldo"}
    with pytest.raises(ValueError, match="was scored on other records than elude_forget"):
        run(["elude_forget"], "elude", metadata=metadata | {"reference": str(pair["folder"] / "other-run")})


@pytest.mark.parametrize("pair", ["base"], indirect=True)
def test_a_reference_without_generated_answers_is_refused(pair, tmp_path):
    shutil.copytree(pair["folder"] / "other-run", tmp_path / "run")
    for file in (tmp_path / "run").rglob("samples_elude_forget_*"):
        with changed(file) as rows:
            for row in rows:
                row["doc"]["generated"] = None  # as `elude stress` writes it
    metadata = {"pretrained": pair["folders"][0], "dataset": str(pair["folder"] / "data"), "target": ["ronaldo"]}
    metadata["reference"] = str(tmp_path / "run")
    with pytest.raises(ValueError, match="has no generated answers to the questions of elude_forget"):
        run(["elude_forget"], "elude", metadata=metadata)


def test_an_answer_that_no_context_holds_is_a_line_and_a_long_one_is_said(tmp_path, caplog):
    data = small_data(tmp_path / "data", {"Cristiano Ronaldo": 2}, retain=2, world=2)
    rows = read_jsonl(data / "forget_qa-train.jsonl")
    metadata = {"pretrained": str(MODEL), "dataset": str(data), "target": "ronaldo"}
    for count in (150, 3_000):
        write_jsonl(data / "forget_qa-train.jsonl", [rows[0] | {"answer": "He ran on. " * count}, rows[1]])
        with pytest.raises(ValueError, match="tokens, and the model takes") if count > 999 else nullcontext():
            run(["elude_forget"], "elude", metadata=metadata, gen_kwargs="max_gen_toks=4")
        assert "1 of elude_forget's 2 answers have more than 128 tokens or a blank line" in caplog.text
        caplog.clear()
    with pytest.raises(ValueError, match=r"elude_retain: an answer may have 99999 tokens, .* give --gen_kwargs"):
        run(["elude_retain"], "elude", metadata=metadata, gen_kwargs="max_gen_toks=99999")


def test_what_is_asked_beside_a_model_on_several_devices_lies_on_several_too(monkeypatch):
    loaded = []
    monkeypatch.setattr(reference, "_loaded", lambda arguments, *_: loaded.append(dict(arguments)))
    for places in ({"": 0}, {"model.embed_tokens": 0, "lm_head": 1}):
        evaluated = SimpleNamespace(model=SimpleNamespace(hf_device_map=places), device=torch.device("cuda:0"))
        monkeypatch.setattr(harness, "evaluated_model", lambda evaluated=evaluated: evaluated)
        reference._load(str(MODEL), "bfloat16")
    named = {"pretrained": str(MODEL), "dtype": "bfloat16"}
    assert loaded == [named | {"device": "cuda:0"}, named | {"parallelize": True}]
