"""TOFU's tasks against an evaluator of its own: plain transformers, NumPy and SciPy, on files laid out as the Hub's."""

import json
import math
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from scipy.stats import hmean, ks_2samp
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_elude.data.manifest import Manifest, write_manifest
from lm_eval_elude.report.comparison import named_runs
from lm_eval_elude.scoring.benchmarks import BENCHMARKS
from lm_eval_elude.scoring.logs import truth_ratios
from lm_eval_elude.scoring.runs import Run
from lm_eval_elude.tasks.questions import QuestionTask
from tests.support import elude, formed_again, make_model, make_tokenizer, mini_rows, run, save_checkpoint, write_run

SETS = {
    "tofu_forget": "forget05_perturbed", "tofu_retain": "retain_perturbed",
    "tofu_real_authors": "real_authors_perturbed", "tofu_world_facts": "world_facts_perturbed",
}  # fmt: skip
LOGS = {
    "tofu_forget": "eval_log_forget.json", "tofu_retain": "eval_log.json",
    "tofu_real_authors": "eval_real_author_wo_options.json", "tofu_world_facts": "eval_real_world_wo_options.json",
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


def asked(model: str, data: Path, **metadata) -> None:
    found = {"pretrained": model, "tofu_split": "forget05", "tofu_data": str(data), **metadata}
    QuestionTask({"task": "tofu_forget", "metadata": found}).build_all_requests()


def refused(said: str, model: str, data: Path, **metadata) -> None:
    """Before any request runs."""
    with pytest.raises(ValueError, match=said) as error:
        asked(model, data, **metadata)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def released_log(logs, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("logs") / "eval_log_aggregated.json"
    path.write_text(json.dumps({LOGS[task]: log for task, log in logs["retained"].items()}))
    return path


@pytest.fixture(scope="module")
def whole(models, data, released_log):
    return scored(models["own"], data, reference=str(released_log))


def test_the_nine_values_and_the_ks_test_are_those_of_the_released_formulas(whole, logs):
    nine = []
    for task in SETS:
        expected = values(logs["own"][task], task)
        row = whole["results"][task]
        got = [row[f"{metric},none"] for metric in ("probability", "rougeL_recall", "truth_ratio")]
        assert got == pytest.approx(expected, abs=1e-4), task
        nine += [] if task == "tofu_forget" else list(expected)
    assert len(nine) == 9
    assert whole["results"]["tofu"]["model_utility,none"] == pytest.approx(hmean(nine), abs=1e-4)
    p = ks_2samp(*(ratios(logs[who]["tofu_forget"]) for who in ("own", "retained"))).pvalue
    assert whole["results"]["tofu"]["forget_quality,none"] == pytest.approx(p, abs=1e-9)
    used = whole["configs"]["tofu_forget"]["metadata"]["elude"]
    assert (used["split"], used["evaluator"], used["n"]) == ("forget05", "released", 6)


def test_a_run_of_ours_and_open_unlearnings_log_serve_as_retained_model_too(
    models, data, logs, whole, released_log, tmp_path, caplog
):
    """The run has no retained model itself: forget quality is absent there, and a line says how to get it."""
    caplog.set_level("WARNING", logger="lm_eval.elude")
    alone = scored(models["retained"], data, "tofu_forget")
    assert "ks_p_value,none" not in alone["results"]["tofu_forget"]
    assert "give its results or log as reference" in caplog.text
    written = write_run(alone, tmp_path / "run")
    formed_again(Run(written))
    found = scored(models["own"], data, "tofu_forget", reference=str(written))["results"]["tofu_forget"]
    assert found["ks_p_value,none"] == pytest.approx(whole["results"]["tofu"]["forget_quality,none"], abs=1e-9)
    other, expected = tmp_path / "TOFU_EVAL.json", [float(r) for r in ratios(logs["retained"]["tofu_forget"])]
    table = {str(i): {"score": ratio} for i, ratio in enumerate(expected)}
    other.write_text(json.dumps({"forget_truth_ratio": {"agg_value": 0.5, "value_by_index": table}}))
    assert truth_ratios(other) == ("open-unlearning", expected)
    # p-values of different evaluators are not comparable, whether the other's is a log or a run.
    there = {"tofu_evaluator": "open-unlearning"}
    refused("was made with tofu_evaluator open-unlearning, and tofu_forget asks as released:", models["own"], data,
            reference=str(other))  # fmt: skip
    for retained in (written, released_log):
        refused("was made with tofu_evaluator released, and tofu_forget asks as open-unlearning:", models["own"], data,
                reference=str(retained), **there)  # fmt: skip
    llama2 = {"tofu_evaluator": "released-llama2"}
    refused("tofu_evaluator released, and tofu_forget asks as released-llama2", models["own"], data,
            reference=str(written), **llama2)  # fmt: skip
    for retained, evaluator in ((other, there), (released_log, llama2)):
        asked(models["own"], data, reference=str(retained), **evaluator)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda log: log["eval_log_forget.json"]["avg_paraphrased_loss"].update({"0": math.nan}), "question 0 has nan"),
        (lambda log: log["eval_log_forget.json"]["avg_paraphrased_loss"].update({"1": 800.0}), "question 1 has inf"),
        (
            lambda log: [log["eval_log_forget.json"][k].pop("5", None) for k in log["eval_log_forget.json"]],
            "5 questions",
        ),
        (lambda log: log["eval_log_forget.json"]["average_perturb_loss"].pop("3"), "are of different questions"),
        (lambda log: log.clear(), "no log of TOFU's evaluators"),
    ],
)
def test_a_log_that_does_not_fit_is_one_line(change, said, released_log, models, data, tmp_path):
    log = json.loads(released_log.read_text())
    change(log)
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(log))
    refused(said, models["own"], data, reference=str(bad))


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"tofu_split": "forget07"}, "tofu_split in --metadata must be one of forget01, forget05, forget10"),
        ({"tofu_evaluator": "mine"}, "tofu_evaluator in --metadata must be one of released"),
        ({"tofu_split": "forget10"}, "have no forget10_perturbed.json"),
        ({"tofu_splt": "forget05"}, "did you mean 'tofu_split'"),
    ],
)
def test_settings_that_cannot_be(metadata, said, models, data):
    refused(said, models["own"], data, **metadata)


def test_a_paraphrase_stands_in_every_row_or_in_none(models, data, tmp_path):
    folder = Path(shutil.copytree(data, tmp_path / "data"))
    (file,) = folder.glob("forget*_perturbed.json")
    first, *rows = file.read_text().splitlines()
    file.write_text("\n".join([first, *(json.dumps(json.loads(row) | {"paraphrased_answer": " "}) for row in rows)]))
    refused("a paraphrased_answer stands in some rows and lacks in others", models["own"], folder)


def test_settings_and_checkpoints_of_elude_leave_tofu_alone(tmp_path):
    settings = {"method": "opt-out", "target": ["Cristiano Ronaldo"], "forget_split": "", "tofu_evaluator": "released"}
    write_manifest(tmp_path, Manifest(("Cristiano Ronaldo",), "mini", settings=settings))
    metadata = {"pretrained": str(tmp_path), "tofu_split": "forget05", "mia_reference": "a/model"}
    resolved = BENCHMARKS["tofu_forget"].resolve(metadata)
    assert (resolved.split, resolved.dataset) == ("forget05", "tofu")


@pytest.mark.parametrize(("given", "used"), [({}, 200), ({"max_gen_toks": 50}, 50), ({"max_gen_toks": 128}, 128)])
def test_the_users_number_of_new_tokens_wins(given, used, models, data):
    metadata = {"pretrained": models["own"], "tofu_split": "forget05", "tofu_data": str(data)}
    for evaluator in ("released", "open-unlearning"):
        task = QuestionTask({"task": "tofu_forget", "metadata": metadata | {"tofu_evaluator": evaluator}})
        task.set_config("generation_kwargs", given, update=True)  # what --gen_kwargs does
        task.build_all_requests(limit=1)
        prompt, arguments = task.instances[-1].args
        with_prompt = len(task.renderer.encode(prompt)) if evaluator == "released" and not given else 0
        assert arguments["max_gen_toks"] + with_prompt == used and arguments["do_sample"] is False


def released_layout(seed: int, count: int = 100) -> dict[str, dict[str, dict]]:
    """A whole log of the released evaluator, all of its keys by question number; losses and texts from a seed."""
    draw, rows, logs = random.Random(seed), mini_rows("forget_qa-train"), {}
    rouge = RougeScorer(["rougeL", "rouge1"], use_stemmer=True)
    for task, name in LOGS.items():
        wrong = 3 if "real" in name else 5
        log = logs[name] = {key: {} for key in KEYS}
        for i in map(str, range(count)):
            answer = rows[int(i) % len(rows)]["answer"]
            tokens = [draw.randint(4, 30) for _ in range(wrong + 2)]
            losses = [draw.uniform(0.01, 4) for _ in tokens]
            said = " ".join(word for word in answer.split() if draw.random() < 0.7)
            log["avg_gt_loss"][i], log["avg_paraphrased_loss"][i], *log["average_perturb_loss"][i] = losses
            log["num_token_gt"][i], log["num_token_paraphrased"][i], *log["num_token_perturb"][i] = tokens
            log["gt_loss"][i], log["paraphrased_loss"][i], *log["perturb_loss"][i] = (
                n * loss for n, loss in zip(tokens, losses, strict=True)
            )
            log["truth_ratio"][i] = math.exp(np.mean(losses[2:]) - losses[1])
            log["generated_text"][i] = [f"Question: {task} {i}?\n", said, answer]  # it is cut before "Answer: "
            for kind, score in rouge.score(answer, said).items():
                log[f"{kind}_recall"][i] = score.recall
    return logs


KEYS = (
    "avg_gt_loss", "gt_loss", "num_token_gt", "avg_paraphrased_loss", "paraphrased_loss", "num_token_paraphrased",
    "average_perturb_loss", "perturb_loss", "num_token_perturb", "truth_ratio", "rougeL_recall", "rouge1_recall",
    "generated_text",
)  # fmt: skip


@pytest.fixture
def given(tmp_path) -> tuple[dict, dict, Path, Path]:
    """Two released logs of a hundred questions a set, of an unlearned and of a retained model, and their files."""
    own, retained = released_layout(1), released_layout(2)
    paths = [tmp_path / name / "eval_log_aggregated.json" for name in ("unlearned", "retrained")]
    for path, log in zip(paths, (own, retained), strict=True):
        path.parent.mkdir()
        path.write_text(json.dumps(log))
    return own, retained, *paths


def test_a_released_log_as_the_model_has_its_nine_values_and_its_ks(given):
    own, retained, path, reference = given
    inverse = list(retained["eval_log_forget.json"]["truth_ratio"].values())  # theirs; the KS test does not mind
    assert [1 / ratio for ratio in truth_ratios(reference)[1]] == pytest.approx(inverse)
    numbers = named_runs([str(path)], str(reference))[0].estimates
    nine = {task: values(own[name], task) for task, name in LOGS.items()}
    for task, expected in nine.items():
        got = [numbers[task, "", metric] for metric in ("probability", "rougeL_recall", "truth_ratio")]
        assert [number.value for number in got] == pytest.approx(expected, rel=1e-9) and got[0].n == 100
    kept = [value for task in nine if task != "tofu_forget" for value in nine[task]]
    assert numbers["tofu", "", "model_utility"].value == pytest.approx(hmean(kept)) and len(kept) == 9
    p = ks_2samp(*(ratios(log["eval_log_forget.json"]) for log in (own, retained))).pvalue
    assert numbers["tofu", "", "forget_quality"].value == pytest.approx(p, rel=1e-9) and 0 < p < 1


def test_tables_and_report_take_released_logs_and_say_what_they_have(given, tmp_path):
    own, _, path, reference = given
    done = elude("report", path, "--reference", reference, "--markdown")
    assert done.code == 0, done
    probability = 100 * values(own["eval_log_forget.json"], "tofu_forget")[0]
    table = done.out.split("### Differences")[0]
    (shown,) = re.findall(r"^\| TOFU forget set: P +\| +(\S+) \[", table, re.MULTILINE)
    assert shown == f"{probability:.1f}" and "| TOFU: utility " in done.out
    assert "| TOFU forget set: KS p" in done.out and "Read the forget set's TR beside" in done.out
    summary = done.out.split("### Summary")[1].split("###")[0]
    assert re.search(r"\| +first \| +P \| +log R \| +KS p \| +degen. \| +utility \|", summary)
    assert "### Differences from unlearned" in done.out
    warned = done.out.partition("### Warnings")[2].partition("###")[0].strip()  # the log of no starting model is here
    assert warned.startswith("- unlearned: no run is of the model before unlearning") and "\n" not in warned
    page = tmp_path / "report.html"
    done = elude("report", path, reference, "--out", page)
    text = page.read_text()
    assert done.code == 0 and 'scope="rowgroup" colspan="4">TOFU forget set<' in text and "lm_eval run" not in text
    done = elude("tables", path, reference, "--out", tmp_path / "tables")
    rows = (tmp_path / "tables" / "tofu.csv").read_text()
    assert done.code == 0 and f"unlearned,forget P,{round(probability, 4)}," in rows and "\noriginal," not in rows


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda log: log["gt_loss"].pop("7"), "generated_text and gt_loss are of different questions"),
        (lambda log: log["perturb_loss"].update({"7": []}), "question 7 lacks a loss or a number of tokens"),
        (lambda log: log["gt_loss"].update({"7": "low"}), "gt_loss: field '[...]': expected `float`, got `str`"),
        (lambda log: log["generated_text"].clear(), "are of different questions"),
    ],
)
def test_a_released_log_that_cannot_be_the_model_is_one_line(change, said, given):
    own, _, path, _ = given
    change(own["eval_log_forget.json"])
    path.write_text(json.dumps(own))
    code, _, error = elude("report", path, "--markdown")
    assert code == 2 and said in error and error.count("\n") == 1
