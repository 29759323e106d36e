"""Training on TOFU's sets, and fine-tuning the starting and the retained model with the same loop."""

import json

import pytest
import torch
from safetensors.torch import load_file

from lm_eval_elude.data.files import file_hashes
from lm_eval_elude.data.manifest import read_manifest
from lm_eval_elude.errors import UserError
from lm_eval_elude.scoring.conventions import CONVENTIONS
from lm_eval_elude.scoring.runs import Run
from lm_eval_elude.tasks.questions import QuestionTask
from lm_eval_elude.text.chat import Renderer
from optout_train.config import METHODS
from optout_train.data import plan_steps
from optout_train.sources import source_of
from optout_train.train import train
from tests.support import optout, read_jsonl
from tests.train.conftest import config_of, rows

KEYS = ("question", "answer", "paraphrased_answer", "perturbed_answer")


@pytest.fixture(scope="module")
def tofu_data(tmp_path_factory):
    """Six forget and ten retain questions as on the Hub, and a few in each set that is only scored."""
    folder = tmp_path_factory.mktemp("tofu")
    forget, retain = rows(6, "", "the author's secret"), rows(10, "", "another author's habit")
    other = [{**row, "paraphrased_answer": None, "perturbed_answer": row["perturbed_answer"][:3]} for row in retain]
    files = {
        "forget05": (forget, KEYS[:2]), "retain95": (retain, KEYS[:2]), "forget05_perturbed": (forget, KEYS),
        "retain_perturbed": (retain[:4], KEYS), "real_authors_perturbed": (other[4:6], KEYS),
        "world_facts_perturbed": (other[6:8], KEYS),
    }  # fmt: skip
    for name, (lines, keys) in files.items():
        (folder / f"{name}.json").write_text("".join(json.dumps({k: row[k] for k in keys}) + "\n" for row in lines))
    return folder


@pytest.fixture(scope="module")
def settings(model_folder, tofu_data):
    places = {"model": str(model_folder), "dataset": str(tofu_data), "forget_split": "forget05"}
    return lambda **changes: config_of(
        {**places, "epochs": 2, "batch_size": 4, "learning_rate": 1e-3, "directions": 3, **changes}
    )


@pytest.fixture(scope="module")
def trained(settings, tmp_path_factory):
    def go(**changes):
        output, messages = tmp_path_factory.mktemp("runs") / "run", []
        train(settings(**changes), output, messages.append)
        return output, read_jsonl(output / "train_log.jsonl"), messages

    return go


@pytest.mark.parametrize("method", ["opt-out", "dpo+neighbours", "finetune"])
def test_methods_train_on_a_split(method, settings, trained, model_folder):
    config = settings(method=method)
    folder, lines, messages = trained(method=method, epochs=1)
    names = {"forget"} | ({"retain"} if config.retain_weight else set())
    assert names == {"forget", "retain", "world"} & set(lines[1])
    assert sum("step" in line for line in lines) == (4 if method == "finetune" else 2)
    assert "TOFU has no validation split: epochs are measured on what is scored" in messages[0]
    assert {"forget_truth_ratio", "retain_truth_ratio"} <= set(lines[-1]["validation"])
    assert "world_probability" not in lines[-1]["validation"]
    manifest = read_manifest(folder)
    assert manifest.targets == () and manifest.method == method and manifest.settings["forget_split"] == "forget05"
    assert file_hashes(folder) != file_hashes(model_folder)
    again = {"model": str(folder), "method": "finetune"}
    if method == "finetune":
        source_of(settings(**again))
    else:
        with pytest.raises(UserError, match=f"would teach forget05 .* asked to forget forget05.*{model_folder}$"):
            source_of(settings(**again))
        source_of(settings(**again, learn="retain"))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_settings_for_tofu_or_says_what_it_lacks(method, settings):
    if method.endswith("+world") or "stranger" in method or "altpo" in method:
        with pytest.raises(UserError, match="no world set" if method.endswith("+world") else "swaps names"):
            settings(method=method)
    else:
        assert settings(method=method).world_weight == 0


def test_a_step_of_fine_tuning_is_that_of_a_plain_transformers_loop(trained, tofu_data, model_folder):
    """Three epochs over all questions, records averaged, AdamW with linear decay: the same weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, lines, _ = trained(method="finetune", epochs=3, batch_size=8, validate=False)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
    pairs = [
        json.loads(line) for name in ("forget05", "retain95")
        for line in (tofu_data / f"{name}.json").read_text().splitlines()
    ]  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    plan = [step.forget for epoch in plan_steps(len(pairs), 0, 0, 3, 8, 0) for step in epoch]
    assert sorted(i for step in plan[:2] for i in step) == list(range(16)) and len(plan) == 6
    means = []
    for number, step in enumerate(plan):
        loss = 0.0
        for i in step:
            prompt = f"Question: {pairs[i]['question']}\n"  # as the released evaluator asks; its tag counts as answer
            ids = tokenizer(f"{prompt}Answer: {pairs[i]['answer']}<|im_end|>", return_tensors="pt").input_ids
            labels = ids.clone()
            labels[:, : len(tokenizer(prompt).input_ids)] = -100
            loss = loss + model(input_ids=ids, labels=labels).loss / len(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - number / len(plan))
        optimizer.step()
        optimizer.zero_grad()
        means.append(loss.item())
    logged = [line["loss"] for line in lines if "step" in line]
    assert logged == pytest.approx(means, abs=1e-4) and logged[-1] < logged[0]
    now = load_file(folder / "model.safetensors")
    for name, weight in model.state_dict().items():
        if name in now:
            torch.testing.assert_close(now[name], weight, atol=2e-4, rtol=0)


@pytest.mark.parametrize("evaluator", CONVENTIONS)
def test_what_is_trained_on_is_what_the_tasks_ask_of_the_checkpoint(evaluator, settings, trained, monkeypatch):
    seen = []
    encode_pair = Renderer.encode_pair
    monkeypatch.setattr(Renderer, "encode_pair", lambda *given: seen.append(given[1:]) or encode_pair(*given))
    folder, *_ = trained(method="ga", epochs=1, validate=False, tofu_evaluator=evaluator)
    task = QuestionTask({"task": "tofu_forget", "metadata": {"pretrained": str(folder)}})
    assert task.settings.evaluator == evaluator
    asked = {
        (
            task.renderer.prompt(doc["question"], system=task.benchmark.system_text(doc, task.settings) or None),
            task.renderer.answer(doc["answer"]),
        )
        for doc in task.docs
    }
    assert asked == set(seen) and len(asked) == 6


def test_the_retained_model_never_reads_what_is_to_be_forgotten(trained):
    folder, lines, messages = trained(method="finetune", learn="retain", epochs=3)
    assert set(read_manifest(folder).data_fingerprints) == {"retain-train", "retain-validation"}
    assert sum("step" in line for line in lines) == 3 * 3
    assert lines[-1]["validation"]["retain_probability"] > lines[0]["validation"]["retain_probability"]
    assert not any("the model knows" in line for line in messages)


def test_a_run_is_scored_by_the_tofu_tasks_resumed_and_replaced(model_folder, tmp_path, tofu_data):
    def command(*extra):
        return optout(
            "--model", model_folder, "--dataset", tofu_data, "--forget-split", "forget05", "--output-dir",
            tmp_path / "o", "--epochs", "1", "--batch-size", "10", "--learning-rate", "1e-3",
            "--tofu-evaluator", "open-unlearning", *extra,
        )  # fmt: skip

    code, out, err = command("--forget-split", "forget10")
    assert (code, out) == (2, "") and "have no forget10.json" in err and len(err.splitlines()) == 1
    code, out, err = command("--method", "npo+rt", "--no-validate")
    assert code == 0, err
    title, columns, before, after = out.split("\n\n")[0].replace("log R", "log-R").splitlines()
    assert "model utility" in title and columns.split()[:2] == ["%", "FQ"] and before.split()[1] == "-"
    assert "--tasks tofu" in out
    run = Run(tmp_path / "o" / "scores" / "after")
    for scored in (run, Run(tmp_path / "o" / "scores" / "before")):
        used = scored.settings("tofu_forget")
        assert (used["split"], used["evaluator"]) == ("forget05", "open-unlearning")
    utility = after.split()[1 + columns.split().index("utility")]  # the row's name has two words
    assert utility == f"{100 * run.reported('tofu')['model_utility']:.1f}"
    card = (tmp_path / "o" / "README.md").read_text()
    assert "made to forget TOFU's forget05" in card and "MIT" in card and "Alpaca" not in card
    assert "is finished: nothing to do" in command("--method", "npo+rt", "--no-validate", "--resume")[2]
    code, _, err = command("--no-score")
    assert code == 2 and "is a finished run; give --overwrite" in err
    path = tofu_data / "retain95.json"
    text = path.read_text()
    path.write_text(text.replace("habit number 3", "habit number 33"))
    code, _, err = command("--method", "npo+rt", "--no-validate", "--resume")
    path.write_text(text)
    assert code == 2 and "the data of retain-train has changed since" in err
    assert command("--method", "ga", "--overwrite", "--no-score", "--no-validate")[0] == 0
    assert read_manifest(tmp_path / "o").method == "ga"
