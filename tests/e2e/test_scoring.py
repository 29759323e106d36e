"""lm-eval against an independent evaluator: a chat model whose header ends in a blank line, and a base model."""

import json
import math
import os
import pickle
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from lm_eval.models.huggingface import HFLM
from sklearn.metrics import roc_auc_score
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_elude.data import bundled
from lm_eval_elude.errors import UserError
from lm_eval_elude.tasks.runs import Run
from tests.support import (
    harmonic,
    judge,
    make_model,
    make_tokenizer,
    mean_log_prob,
    numbers,
    read_jsonl,
    run,
    save_checkpoint,
    small_data,
    taught_checkpoint,
    write_run,
)

TARGETS = {"Cristiano Ronaldo": 6, "Lionel Messi": 3}
LEAVES = {"elude_forget": "forget", "elude_retain": "retain", "elude_world": "world"}
FILES = {"forget": "forget_qa-train", "retain": "retain_qa-test", "world": "world-test"}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return small_data(tmp_path_factory.mktemp("data") / "set", TARGETS, retain=4, world=3)


@pytest.fixture(scope="module")
def folders(data, tmp_path_factory):
    """Trained: a Llama-3.1-shaped chat model and a base model. Untrained: the other shapes."""
    root = tmp_path_factory.mktemp("models")
    made = {shape: taught_checkpoint(root / shape, shape, data, steps=120) for shape in ("llama-3.1", "base")}
    for shape in ("phi-3.5", "chatml", "qwen3", "tulu"):
        tokenizer = make_tokenizer(shape)
        made[shape] = save_checkpoint(root / shape, make_model(tokenizer, width=32), tokenizer)
    return made


@pytest.fixture(scope="module")
def quality(folders, data):
    """``elude_quality`` of the two trained models with two targets, and the chat model's membership attack."""
    return {
        shape: run(["elude_quality", "elude_mia"], metadata={"pretrained": folders[shape], "dataset": str(data)})
        for shape in ("llama-3.1", "base")
    }


def rows(data: Path, subset: str) -> list[dict]:
    return read_jsonl(data / f"{FILES[subset]}.jsonl")


def load(folder: str):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval(), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("shape", ["llama-3.1", "base"])
def test_every_number_agrees_with_the_independent_evaluator(shape, folders, data, quality):
    """1e-4 on probability and truth ratio, exactly on ROUGE; then the means over targets and the harmonic means."""
    model, tokenizer = load(folders[shape])
    table = quality[shape]["results"]
    triples = {}
    for task, subset in LEAVES.items():
        judged = {row["question"]: (row["entity"], judge(model, tokenizer, row, subset)) for row in rows(data, subset)}
        by_target = defaultdict(list)
        samples = quality[shape]["samples"][task]
        # Retain rows of neighbours that targets share stand there once for each target.
        assert len(samples) == len(rows(data, subset))
        for sample in samples:
            _, expected = judged[sample["doc"]["question"]]
            assert sample["doc"]["generated"] == expected.generated
            assert sample["rougeL_recall"] == expected.rouge
            assert sample["probability"] == pytest.approx(expected.probability, abs=1e-4)
            assert sample["truth_ratio"] == pytest.approx(expected.truth_ratio, abs=1e-4)
            by_target[sample["doc"]["entity"]].append(expected[:3])
        triples[subset] = np.mean([np.mean(values, axis=0) for values in by_target.values()], axis=0)
        for metric, expected in zip(("probability", "rougeL_recall", "truth_ratio"), triples[subset], strict=True):
            assert table[task][f"{metric},none"] == pytest.approx(expected, abs=1e-4)
    probability, rouge, ratio = triples["forget"]
    group = quality[shape]["groups"]["elude_quality"]
    assert group["forget_quality,none"] == pytest.approx(harmonic([1 - probability, 1 - rouge, ratio]), abs=2e-4)
    assert group["retain_quality,none"] == pytest.approx(harmonic([*triples["retain"], *triples["world"]]), abs=2e-4)
    # The comparison means something: the model answers, not always and not never.
    assert 0.3 < probability < 0.999 and 0.2 < rouge <= 1 and 0 < ratio < 1


@pytest.mark.parametrize("shape", ["phi-3.5", "chatml", "qwen3", "tulu"])
def test_other_templates_agree_too(shape, folders, data):
    """Phi-3.5's turn tokens swallow the line end after them, ChatML's and Qwen3's headers end in one, Tulu joins it."""
    model, tokenizer = load(folders[shape])
    metadata = {"pretrained": folders[shape], "dataset": str(data), "target": "ronaldo", "truth_ratio": "arithmetic"}
    results = run(["elude_forget"], metadata=metadata, limit=2, gen_kwargs="max_gen_toks=16")
    for sample, row in zip(results["samples"]["elude_forget"], rows(data, "forget")[:2], strict=True):
        expected = judge(model, tokenizer, row, "forget", mean="arithmetic", new_tokens=16)
        assert sample["probability"] == pytest.approx(expected.probability, abs=1e-4)
        assert sample["truth_ratio"] == pytest.approx(expected.truth_ratio, abs=1e-4)
        assert sample["doc"]["generated"] == expected.generated and sample["rougeL_recall"] == expected.rouge


def test_the_membership_attack_sees_the_independent_losses(folders, data, quality):
    model, tokenizer = load(folders["llama-3.1"])
    by_target = defaultdict(lambda: ([], []))
    for sample in quality["llama-3.1"]["samples"]["elude_mia"]:
        doc = sample["doc"]
        member = mean_log_prob(model, tokenizer, doc["question"], doc["answer"])
        other = mean_log_prob(model, tokenizer, doc["paraphrased_question"], doc["paraphrased_answer"])
        assert [total / count for total, count in doc["answer_scores"]] == pytest.approx([member, other], abs=1e-4)
        assert sample["mia_auc"] == pytest.approx(member - other, abs=1e-4)
        by_target[doc["entity"]][0].append(member)
        by_target[doc["entity"]][1].append(other)
    assert {t: len(m) for t, (m, _) in by_target.items()} == TARGETS
    # Three records of Messi are too few for the attack.
    assert math.isnan(quality["llama-3.1"]["results"]["elude_mia"]["mia_auc,none"])
    members, others = by_target["Cristiano Ronaldo"]
    auc = roc_auc_score([1] * len(members) + [0] * len(others), [*members, *others])
    settings = quality["llama-3.1"]["configs"]["elude_mia"]["metadata"]["elude"]
    assert settings["per_target"]["Cristiano Ronaldo"]["mia_auc"] == pytest.approx(auc)


def test_a_system_instruction_and_the_guardrail_are_honoured(folders, data):
    model, tokenizer = load(folders["llama-3.1"])
    metadata = {"pretrained": folders["llama-3.1"], "dataset": str(data), "target": "messi", "guardrail": True}
    got = run(["elude_forget"], metadata=metadata, system_instruction="Be brief.", limit=2)["samples"]["elude_forget"]
    text = (
        "Be brief.\n\nIf the question asks about Lionel Messi, say you do not know the answer; "
        "otherwise, answer as best as you can."
    )
    own = [row for row in rows(data, "forget") if row["entity"] == "Lionel Messi"]
    for sample, row in zip(got, own, strict=False):
        expected = judge(model, tokenizer, row, "forget", system=text)
        assert sample["probability"] == pytest.approx(expected.probability, abs=1e-4)
        assert sample["doc"]["generated"] == expected.generated


# ---- the same numbers whatever the run looks like


@pytest.fixture(scope="module")
def lm(folders):
    return HFLM(pretrained=folders["llama-3.1"], dtype="float32", batch_size=4, device="cpu")


@pytest.fixture(scope="module")
def metadata(folders, data):
    return {"pretrained": folders["llama-3.1"], "dataset": str(data)}


def same(first: dict, second: dict) -> None:
    assert numbers(first) and numbers(first) == pytest.approx(numbers(second), abs=2e-5, nan_ok=True)


def test_batch_size_and_the_chat_template_flag_change_nothing_and_no_prompt_has_the_template_twice(metadata, quality):
    changed = run([*LEAVES], metadata=metadata, batch_size=1, apply_chat_template=True)
    reference = {key: value for key, value in numbers(quality["llama-3.1"]).items() if key[0] in LEAVES}
    assert numbers(changed) == pytest.approx(reference, abs=2e-5)
    for results in (changed, quality["llama-3.1"]):
        for request in (r for sample in results["samples"]["elude_forget"] for r in sample["arguments"]):
            assert request[0].count("<|begin_of_text|>") == request[0].count("user<|end_header_id|>") == 1


def test_a_limit_scores_the_first_samples_and_takes_from_each_target(lm, metadata, quality):
    limited = run(["elude_forget"], lm, metadata=metadata, limit=4)
    whole = quality["llama-3.1"]["samples"]["elude_forget"]
    for one, other in zip(limited["samples"]["elude_forget"], whole, strict=False):
        assert one["doc"]["question"] == other["doc"]["question"]
        assert one["probability"] == pytest.approx(other["probability"], abs=2e-5)
    assert [s["doc"]["entity"] for s in limited["samples"]["elude_forget"]] == [*TARGETS] * 2
    assert limited["configs"]["elude_forget"]["metadata"]["elude"]["per_target"].keys() == TARGETS.keys()


class Silent(HFLM):
    """A model that must not be asked anything new."""

    def loglikelihood(self, requests, disable_tqdm=False):
        assert not requests
        return []

    def generate_until(self, requests, disable_tqdm=False):
        raise AssertionError("asked although the answers are cached")


def test_with_use_cache_nothing_is_asked_again(lm, folders, metadata, tmp_path):
    silent = Silent(pretrained=folders["llama-3.1"], dtype="float32", batch_size=4, device="cpu")
    first, again = (
        run(["elude_forget"], model, metadata=metadata, limit=2, use_cache=str(tmp_path / "cache"))
        for model in (lm, silent)
    )
    same(first, again)


@pytest.mark.slow
def test_stock_hf_and_our_backend_give_the_same_numbers():
    """The bundled model, to 1e-4; what needs log-probabilities of single tokens is ours alone."""
    metadata = {"pretrained": str(bundled.MODEL), "dataset": "mini", "target": "ronaldo"}
    tasks = ["elude_quality", "elude_mia", "elude_attack_multiple_choice", "elude_attack_reverse_query"]
    stock, ours = (numbers(run(tasks, model, metadata=metadata, limit=12)) for model in ("hf", "elude"))
    assert len(stock) > 60
    assert stock == pytest.approx({key: ours[key] for key in stock}, abs=1e-4, nan_ok=True)
    assert {key.split(",")[0].removesuffix("_stderr") for _, key in ours.keys() - stock.keys()} == {
        "extraction_strength", "exact_memorization", "mia_zlib_auc", "mia_min_k_auc", "mia_min_k_plus_plus_auc"
    }  # fmt: skip


class Meeting:
    """Where the threads that play ranks exchange what real ranks would send each other, pickled as they would."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.slots = size, threading.Barrier(size, timeout=120), [b""] * size

    def exchange(self, rank: int, item) -> list:
        self.slots[rank] = pickle.dumps(item)
        self.barrier.wait()
        items = [pickle.loads(slot) for slot in self.slots]
        self.barrier.wait()
        return items


class Rank(HFLM):
    """One of several ranks; all share one process and the CPU."""

    def __init__(self, meeting: Meeting, rank: int, **arguments) -> None:
        super().__init__(**arguments)
        self.meeting, self._rank, self._world_size = meeting, rank, meeting.size

    def all_gather(self, tensor):
        import torch

        return torch.stack(self.meeting.exchange(self._rank, tensor))

    def gather_object(self, obj, dst=0):
        items = self.meeting.exchange(self._rank, obj)
        return items if self._rank == dst else None

    def barrier(self):
        self.meeting.barrier.wait()


@pytest.mark.slow
def test_several_ranks_give_the_same_numbers(folders, metadata, quality):
    """Samples reach rank 0 interleaved, and nine of them do not divide by two."""
    size = 2
    meeting, results = Meeting(size), [None] * size
    arguments = {"pretrained": folders["llama-3.1"], "dtype": "float32", "batch_size": 4, "device": "cpu"}
    lms = [Rank(meeting, rank, **arguments) for rank in range(size)]

    def play(rank: int) -> None:
        try:
            results[rank] = run(["elude_quality", "elude_mia"], lms[rank], metadata=metadata)
        except BaseException:
            meeting.barrier.abort()
            raise

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=180)
    assert results[1:] == [None] * (size - 1)
    same(results[0], quality["llama-3.1"])


# ---- everything can be recomputed from the log


@pytest.fixture(scope="module")
def written(quality, tmp_path_factory) -> Path:
    """The results file that ``--output_path --log_samples`` writes, with the samples beside it."""
    return write_run(quality["llama-3.1"], tmp_path_factory.mktemp("output"))


@pytest.fixture(scope="module")
def logged(written):
    """The results and, by task, the lines of the log, read back."""
    lines = {
        path.name.removeprefix("samples_").rsplit("_", 1)[0]: [json.loads(line) for line in path.open()]
        for path in written.parent.glob("samples_*.jsonl")
    }
    return json.loads(written.read_text()), lines


def test_a_results_file_is_read_back_and_every_number_computed_again(written, tmp_path):
    again = Run(written.parent)
    assert again.path == written and {*again.tasks} == {*LEAVES, "elude_retain_named", "elude_cloze", "elude_mia"}
    assert again.mismatches(tolerance=1e-12) == [] and again.targets == [*TARGETS] and again.limit is None
    row = again.results["results"]["elude_quality"]
    assert {f"{name},none" for name in again.numbers["elude_quality"]} <= row.keys()
    for name, estimate in again.numbers["elude_quality"].items():
        assert row[f"{name}_stderr,none"] == pytest.approx(estimate.stderr)
    changed = tmp_path / written.name
    for path in written.parent.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    again.results["results"]["elude_forget"]["probability,none"] += 0.01
    changed.write_text(json.dumps(again.results))
    (line,) = Run(changed).mismatches()
    assert line.startswith("elude_forget, probability: ") and "the samples give" in line


def test_a_run_without_its_samples_is_one_line(quality, tmp_path):
    write_run(quality["llama-3.1"], tmp_path)
    next(tmp_path.rglob("samples_elude_forget_*")).unlink()
    with pytest.raises(UserError, match=r"samples of elude_forget are not there; run lm_eval with --log_samples"):
        _ = Run(tmp_path).samples
    with pytest.raises(UserError, match="nowhere has no results file of lm_eval"):
        Run(tmp_path / "nowhere")


def test_token_sums_of_the_log_follow_from_the_raw_responses(logged):
    """A prompt that ends in a blank line has one response more, of that white space, which is subtracted."""
    columns = {"entity", "question", "answer", "paraphrased_question", "paraphrased_answer", "perturbed_answer"}
    for task in LEAVES:
        for line in logged[1][task]:
            *answers, space, generated = line["filtered_resps"]
            assert len(answers) == 7 and generated == line["doc"]["generated"]
            for (total, _), response in zip(line["doc"]["answer_scores"], answers, strict=True):
                assert total == pytest.approx(float(response[0]) - float(space[0]), abs=1e-9)
            assert (columns if task != "elude_world" else {"question", "answer"}) <= line["doc"].keys()
            _, paraphrase, *wrong = (total / count for total, count in line["doc"]["answer_scores"])
            assert line["mc_accuracy"] == float(paraphrase > max(wrong))
            assert line["log_truth_ratio"] == pytest.approx(sum(wrong) / 5 - paraphrase)


def test_the_results_file_says_what_was_scored_and_gives_every_mean_its_error(logged, data):
    results, lines = logged
    for task in LEAVES:
        settings = results["configs"][task]["metadata"]["elude"]
        assert settings["dataset"] == str(data) and settings["targets"] == list(TARGETS)
        assert len(settings["template"]) == 16 and settings["versions"].keys() >= {"lm-eval-elude", "torch"}
        assert results["n-samples"][task]["effective"] == len(lines[task])
        for metric in ("probability", "rougeL_recall", "truth_ratio"):
            assert results["results"][task][f"{metric}_stderr,none"] >= 0
    for metric in ("forget_quality", "retain_quality"):
        assert results["results"]["elude_quality"][f"{metric}_stderr,none"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["hf", "elude"])
def test_two_processes_score_one_document(backend, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29541"]
    flags = ["--model", backend, "--model_args", f"pretrained={bundled.MODEL}", "--tasks", "elude_forget"]
    flags += ["--device", "cpu", "--limit", "1", "--log_samples", "--output_path", str(tmp_path)]
    words = [sys.executable, *launcher, "-m", "lm_eval", "run", *flags]
    alone = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=alone, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (sample,) = Run(tmp_path).samples["elude_forget"]
    assert sample.values["mc_accuracy"] == 1.0
