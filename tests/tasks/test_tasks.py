"""The lm-eval tasks: what they resolve, what they ask, what they refuse, and what a request cache may give back."""

import gc
import json
import logging
import pickle
import weakref
from pathlib import Path

import pytest
from lm_eval.api.model import LM
from lm_eval.models.openai_completions import LocalChatCompletion

from lm_eval_elude.attacks.builders import ATTACKS
from lm_eval_elude.data.manifest import Manifest, write_manifest
from lm_eval_elude.errors import UserError
from lm_eval_elude.metrics.samples import Sample
from lm_eval_elude.metrics.table import METRICS
from lm_eval_elude.tasks import GROUPS, TASKS, tofu
from lm_eval_elude.tasks.elude import GUARDRAIL, resolve
from lm_eval_elude.tasks.harness import EludeTask, Score
from lm_eval_elude.tasks.running import new_run
from tests.support import (
    GOLDEN,
    SHAPES,
    TASK_CONFIGS,
    make_tokenizer,
    mini_rows,
    run,
    small_data,
    task_manager,
    write_jsonl,
    write_rwku_muse,
)

RONALDO = {"dataset": "mini", "target": "ronaldo"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, str]:
    """Folders with a tokenizer of each shape and nothing else."""
    root = tmp_path_factory.mktemp("tokenizers")
    for shape in SHAPES:
        make_tokenizer(shape).save_pretrained(root / shape)
    return {shape: str(root / shape) for shape in SHAPES}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Lines are said once in a run: forget what was said, and what the surroundings ask for."""
    new_run()
    monkeypatch.delenv("ELUDE_TARGET", raising=False)
    monkeypatch.delenv("ELUDE_DATASET", raising=False)


def task(name: str, tokenizer: str, **metadata) -> EludeTask:
    return EludeTask({"task": name, "metadata": {"tokenizer": tokenizer, **RONALDO, **metadata}})


def requests(asked: EludeTask, **arguments) -> list:
    asked.build_all_requests(**arguments)
    return asked.instances


# ---- what a run scores
def manifest_folder(folder: Path, *targets: str) -> str:
    folder.mkdir(exist_ok=True)
    write_manifest(folder, Manifest(targets=targets, dataset="mini"))
    return str(folder)


def test_without_the_users_word_the_manifest_decides_an_adapters_before_its_base_models(tmp_path, caplog):
    base, adapter, none = (
        manifest_folder(tmp_path / name, *targets)
        for name, targets in (("base", ["Lionel Messi"]), ("adapter", ["Taylor Swift"]), ("none", []))
    )
    found = resolve({"pretrained": base})
    assert (found.targets, found.dataset) == (("Lionel Messi",), "mini")
    assert resolve({"pretrained": base, "peft": adapter}).targets == ("Taylor Swift",)
    for model, count, data in ((none, 5, "mini"), ("some/model", 20, "hub")):
        assert len(resolve({"pretrained": model}).targets) == count
        assert f"scoring all {count} of data set '{data}'" in caplog.text


def test_the_users_word_wins_and_a_difference_is_said(tmp_path, caplog, monkeypatch):
    model = manifest_folder(tmp_path, "Lionel Messi")
    assert resolve({"pretrained": model, "target": "messi"}).targets == ("Lionel Messi",)
    assert caplog.text == ""
    assert resolve({"pretrained": model, "target": "cr7"}).targets == ("Cristiano Ronaldo",)
    assert "scoring Cristiano Ronaldo as asked; the checkpoint's optout.json says Lionel Messi" in caplog.text
    monkeypatch.setenv("ELUDE_DATASET", "mini")
    for text, targets in (("messi", ("Lionel Messi",)), ('["swift", "cr7"]', ("Taylor Swift", "Cristiano Ronaldo"))):
        monkeypatch.setenv("ELUDE_TARGET", text)
        assert resolve({}).targets == targets


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"target": "nobody"}, "unknown target 'nobody'"),
        ({"dataset": "no/such"}, "neither 'hub', 'mini' nor an existing folder"),
        ({"truth_ratio": "median"}, "must be one of geometric, arithmetic, got 'median'"),
        ({"guardrail": "on"}, "guardrail in --metadata must be true or false, got 'on'"),
        ({"guardrial": True}, "no key 'guardrial'; did you mean 'guardrail'"),
        ({"targets": "ronaldo"}, "no key 'targets'; did you mean 'target'"),
        ({"target": ["ronaldo", None]}, "target in --metadata must be a name or a list of names"),
        ({"attack_seed": None}, "attack_seed in --metadata must be a whole number"),
        ({"attack_prompts": 101}, "attack_prompts in --metadata must be a whole number from 1 to 100"),
    ],
)
def test_settings_that_cannot_be_are_one_line(metadata, said):
    with pytest.raises(UserError, match=said) as error:
        resolve({**RONALDO, **metadata})
    assert "\n" not in str(error.value)


def test_tofus_split_is_the_users_or_the_checkpoints_and_elude_checkpoints_leave_it_alone(tmp_path):
    with pytest.raises(UserError, match="need tofu_split in --metadata, what was forgotten: forget01, forget05"):
        tofu.resolve({"pretrained": "some/model"})
    settings = {"forget_split": "forget10", "tofu_evaluator": "open-unlearning"}
    write_manifest(tmp_path, Manifest((), "data", settings=settings))
    found = tofu.resolve({"pretrained": str(tmp_path)})
    assert (found.split, found.evaluator, found.dataset) == ("forget10", "open-unlearning", "data")
    write_manifest(tmp_path, Manifest(("Cristiano Ronaldo",), "mini", settings={"forget_split": ""}))
    found = tofu.resolve({"pretrained": str(tmp_path), "tofu_split": "forget05"})
    assert (found.split, found.evaluator, found.dataset) == ("forget05", "released", "tofu")


# ---- what a model is asked
SYSTEMS = {
    "plain": (None, False),
    "system": ("Answer in one sentence.", False),
    "guardrail": (None, True),
    "both": ("Answer in one sentence.", True),
}


@pytest.mark.parametrize("shape", ["llama-3.1", "phi-3.5", "chatml", "qwen3", "base"])
def test_golden_prompts(shape, tokenizers):
    """The prompts of the first record with and without system text; ``⟦`` and ``⟧`` enclose what is scored.

    A diff of these files shows every change of what a model is asked. Delete a file to have it written anew.
    """
    text = ""
    for name, (instruction, guardrail) in SYSTEMS.items():
        forget = task("elude_forget", tokenizers[shape], guardrail=guardrail)
        asked = requests(forget, limit=1, system_instruction=instruction)
        prompt, (context, continuation) = asked[-1].args[0], asked[0].args
        gap = prompt[len(context) :]
        assert prompt.startswith(context) and continuation.startswith(gap) and not gap.strip()
        text += f"######## {name}\n{prompt}⟦{continuation[len(gap) :]}⟧\n"
    path = GOLDEN / "prompts" / f"{shape}.txt"
    if not path.exists():
        path.write_text(text, encoding="utf-8")
        pytest.fail(f"{path.name} was missing and has been written: read it, then run again")
    assert text == path.read_text(encoding="utf-8")


def test_the_guardrail_names_each_prompts_own_target_and_all_of_them_for_the_world_set(tokenizers):
    both = {"target": ["ronaldo", "messi"], "guardrail": True}
    for asked in requests(task("elude_forget", tokenizers["chatml"], **both), limit=4):
        assert GUARDRAIL.format(entity=asked.doc["entity"]) in asked.args[0]
    for asked in requests(task("elude_world", tokenizers["chatml"], **both), limit=1):
        assert GUARDRAIL.format(entity="Cristiano Ronaldo or Lionel Messi") in asked.args[0]


def test_requests_of_one_question_share_one_context(tokenizers):
    """Eight scored texts (one is the white space) under one context, and one generation from the whole prompt."""
    asked = requests(task("elude_forget", tokenizers["llama-3.1"]), limit=1)
    assert [r.request_type for r in asked] == ["loglikelihood"] * 8 + ["generate_until"]
    assert len({r.args[0] for r in asked[:8]}) == 1 and asked[7].args[1] == "\n\n"
    assert asked[8].args[0] == asked[0].args[0] + "\n\n"
    kwargs = asked[8].args[1]
    assert (kwargs["until"], kwargs["max_gen_toks"], kwargs["do_sample"]) == (["<|eot_id|>"], 128, False)
    # Phi-3.5's turn token swallows the line end, a base model's prompt ends in a colon: nothing to subtract.
    for shape in ("phi-3.5", "base"):
        assert len(requests(task("elude_forget", tokenizers[shape]), limit=1)) == 8


def test_the_right_rows_are_scored_and_several_targets_take_turns(tokenizers):
    for name, file, entity, new_tokens in (
        ("forget", "forget_qa-train", "Cristiano Ronaldo", 128),
        ("retain", "retain_qa-test", "Cristiano Ronaldo", 128),
        ("world", "world-test", None, 512),
    ):
        asked = task(f"elude_{name}", tokenizers["base"])
        assert [d["question"] for d in asked.documents] == [r["question"] for r in mini_rows(file, entity=entity)]
        assert requests(asked, limit=1)[-1].args[1]["max_gen_toks"] == new_tokens
    docs = task("elude_forget", tokenizers["base"], target=["messi", "ronaldo"]).documents
    assert [d["entity"] for d in docs[:4]] == ["Cristiano Ronaldo", "Lionel Messi"] * 2
    assert [d["id"] for d in docs] == list(range(len(docs)))


def test_what_the_records_do_not_allow_is_said(tokenizers, tmp_path, caplog):
    data = small_data(tmp_path / "d", {"Lionel Messi": 4})
    rows = mini_rows("forget_qa-train", 4, "Lionel Messi")
    messi = {"dataset": str(data), "target": "messi"}
    for attack in ATTACKS:
        prompts = len(task(f"elude_attack_{attack}", tokenizers["base"], **messi).documents)
        assert prompts < 100
        assert f"elude_attack_{attack}: {prompts} prompts for Lionel Messi, its records allow no more" in caplog.text
    bare = [{k: v for k, v in row.items() if k not in ("perturbed_answer", "translated_question")} for row in rows]
    write_jsonl(data / "forget_qa-train.jsonl", [*rows[:2], *bare[2:]])
    assert len(task("elude_forget", tokenizers["base"], **messi).documents) == 4
    assert "2 of the 4 records of the forget set lack a paraphrase or wrong answers" in caplog.text
    write_jsonl(data / "forget_qa-train.jsonl", bare)
    manager = task_manager({"tokenizer": tokenizers["base"], **messi})
    assert "elude_attack_cross_lingual" not in manager.load(["elude_attacks"])["tasks"]
    assert "elude_attack_cross_lingual is left out: " in caplog.text


# ---- backends
class Counting(LM):
    """A backend that gives every answer one log-probability, writes nothing, and counts what it is asked."""

    tokenizer_name, said = "counting", ""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def loglikelihood(self, requests):
        self.asked += len(requests)
        return [(-1.0, False)] * len(requests)

    def generate_until(self, requests):
        self.asked += len(requests)
        return [self.said] * len(requests)

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        raise AssertionError("the tasks write their prompts themselves")

    def chat_template(self, chat_template=False):
        return ""


class Chat(LocalChatCompletion):
    """The harness's own chat-completions backend, without the packages that an endpoint needs; it says one thing."""

    tokenizer_name, tokenizer_backend = "none", None

    def __init__(self) -> None:
        LM.__init__(self)
        self.prompts = []

    def generate_until(self, requests, disable_tqdm=False):
        self.prompts += [request.args for request in requests]
        return ["Ronaldo was born in Funchal."] * len(requests)

    def chat_template(self, chat_template=False):
        return ""


def refused(said: str, lm: LM, metadata: dict, tasks=("elude_forget",), **arguments) -> None:
    """In one line, before any request runs."""
    with pytest.raises(UserError, match=said) as error:
        run(list(tasks), lm, metadata=metadata, **arguments)
    assert "\n" not in str(error.value) and not getattr(lm, "asked", 0)


def test_what_cannot_be_asked_is_refused(tokenizers, tmp_path):
    base = {"tokenizer": tokenizers["base"], **RONALDO}
    refused("elude_forget asks without examples: --num_fewshot must be 0", Counting(), base, num_fewshot=3)
    refused("elude_mia needs log-probabilities of given answers", Chat(), base, ["elude_mia"])
    refused("takes messages and no prompts: add --apply_chat_template", Chat(), base, limit=1)
    refused("no tokenizer for .*--model_args tokenizer=", Counting(), {"pretrained": str(tmp_path), **RONALDO})
    refused("found none: pass --model_args pretrained=.* or tokenizer=.*TaskManager", Counting(), dict(RONALDO))
    refused("unknown target 'eminem'", Counting(), base | {"target": "eminem"})
    data = small_data(tmp_path / "d", {"Cristiano Ronaldo": 2})
    (row, *_) = mini_rows("forget_qa-train", 1, "Cristiano Ronaldo")
    write_jsonl(data / "forget_qa-train.jsonl", [{**row, "paraphrased_answer": None}])
    refused(
        "elude_mia needs a paraphrased question and answer", Counting(), base | {"dataset": str(data)}, ["elude_mia"]
    )
    write_jsonl(data / "retain_qa-test.jsonl", mini_rows("retain_qa-test", 2, "Taylor Swift"))
    refused("no retain test rows of Cristiano", Counting(), base | {"dataset": str(data)}, ["elude_quality"])


def test_a_chat_api_has_what_is_generated_with_one_line_and_gets_messages(tokenizers, caplog):
    model = Chat()
    metadata = {"tokenizer": tokenizers["chatml"], **RONALDO, "guardrail": True}
    results = run(["elude_forget"], model, metadata=metadata, limit=2, apply_chat_template=True)["results"]
    row = {key.split(",")[0] for key in results["elude_forget"]}
    assert {"rougeL_recall", "repetition", "refusal"} <= row and not {"probability", "truth_ratio"} & row
    assert caplog.text.count("no log-probabilities of given answers: only what is generated is measured") == 1
    system, user = json.loads(model.prompts[0][0].prompt)
    assert system["content"] == GUARDRAIL.format(entity="Cristiano Ronaldo") and user["role"] == "user"


def test_nothing_keeps_a_model_and_a_notebooks_second_run_is_warned_again(tokenizers, caplog):
    caplog.set_level(logging.WARNING, logger="lm_eval.elude")
    for count in (1, 2):
        model = Chat()
        alive = weakref.ref(model)
        metadata = {"tokenizer": tokenizers["base"], "dataset": "mini"}
        run(["elude_forget"], model, metadata=metadata, limit=1, apply_chat_template=True)
        del model
        gc.collect()
        assert alive() is None
        assert caplog.text.count("only what is generated is measured") == count
        assert caplog.text.count("no target given and none in the checkpoint: scoring all 5") == count


# ---- the harness's request cache
@pytest.fixture
def request_cache(tmp_path, monkeypatch):
    """The folder that ``LM_HARNESS_CACHE_PATH`` names; the harness reads the variable once, at import."""
    import lm_eval.caching.cache

    folder = tmp_path / "requests"
    monkeypatch.setattr(lm_eval.caching.cache, "PATH", str(folder))
    return folder


def asked(forget, cached: bool = True, **arguments) -> list:
    return [(r.request_type, r.args, r.doc["question"]) for r in requests(forget, cache_requests=cached, **arguments)]


def test_cached_requests_are_used_again_and_those_of_anything_else_never(
    request_cache, tokenizers, tmp_path, monkeypatch
):
    """Whatever differs, what is asked with a cache is what is asked without one."""
    rows = mini_rows("forget_qa-train", 5, "Cristiano Ronaldo")
    one = write_jsonl(tmp_path / "one.jsonl", rows)
    changed = write_jsonl(tmp_path / "two.jsonl", [{**rows[0], "answer": "Something else."}, *rows[1:]])
    variants = [
        {"dataset": str(one)}, {"dataset": str(changed)}, {"target": "messi"}, {"target": ["ronaldo", "messi"]},
        {"guardrail": True}, {},
    ]  # fmt: skip
    cases = [("chatml", metadata, None) for metadata in variants]
    cases += [("base", {}, None), ("chatml", {}, "Be brief.")]
    for shape, metadata, instruction in cases:
        cached, plain = (
            asked(task("elude_forget", tokenizers[shape], **metadata), flag, system_instruction=instruction, limit=4)
            for flag in (True, False)
        )
        assert cached == plain
    assert len(list(request_cache.iterdir())) == len(cases)
    monkeypatch.setattr(EludeTask, "construct_requests", None)  # would fail if it were called
    again = task("elude_forget", tokenizers["chatml"])
    assert asked(again, limit=4)[:9] == asked(again, limit=1) and len(again._tokens) == 1


def test_the_users_number_of_new_tokens_wins_and_is_not_taken_from_the_cache(request_cache, tokenizers):
    assert asked(task("elude_forget", tokenizers["base"]), limit=1)[-1][1][1]["max_gen_toks"] == 128
    forget = task("elude_forget", tokenizers["base"])
    forget.set_config("generation_kwargs", {"max_gen_toks": 16}, update=True)  # what --gen_kwargs does
    assert asked(forget, limit=1)[-1][1][1]["max_gen_toks"] == 16


# ---- YAML files, groups and scores
def test_every_yaml_builds_its_task_or_group_and_another_name_around_it_is_refused(tokenizers, tmp_path):
    """lm-eval passes over a YAML that fails to load: each is loaded here (the utility group where its data are)."""
    row = {"question": "Who?", "answer": "Ada."} | {"paraphrased_answer": "It is.", "perturbed_answer": ["B.", "C."]}
    for stem in ("forget01_perturbed", "retain_perturbed", "real_authors_perturbed", "world_facts_perturbed"):
        (tmp_path / f"{stem}.json").write_text(json.dumps(row) + "\n")
    of_tofu = {"tofu_split": "forget01", "tofu_data": str(tmp_path)}
    others = write_rwku_muse(tmp_path, "Cristiano Ronaldo")
    manager = task_manager({"tokenizer": tokenizers["base"], **RONALDO, **of_tofu, **others})
    names = {path.stem for path in TASK_CONFIGS.glob("*.yaml")}
    assert names == {*TASKS, *GROUPS, "elude_utility"} and not TASKS.keys() & GROUPS.keys()
    for name in sorted(names - {"elude_utility"}):
        loaded = manager.load([name])
        assert all(len(leaf.eval_docs) > 0 for leaf in loaded["tasks"].values())
        assert name in (loaded["tasks"] if name in TASKS else loaded["groups"])
    assert len(manager.load(["elude_forget", "elude_attacks"])["tasks"]) == 11  # the README's: none stands twice
    renamed = f"include: {TASK_CONFIGS / 'elude_forget.yaml'}\ntask: forget_swift\nmetadata: {{target: swift}}\n"
    (tmp_path / "renamed.yaml").write_text(renamed)
    manager = type(manager)(include_path=[str(tmp_path)], include_defaults=False, metadata={"dataset": "mini"})
    with pytest.raises(UserError, match="has `task: forget_swift`, none of: elude_forget, "):
        manager.load(["forget_swift"])


def test_every_reported_metric_is_in_the_table_with_a_direction_of_its_own_set():
    of_groups = {"retain_quality", "named_retain_quality", "attacked_forget_quality", "attacked_mc_accuracy",
                 "model_utility"}  # fmt: skip
    reported = {metric for each in TASKS.values() for metric in each.metrics}
    without_run = {name for name, metric in METRICS.items() if metric.needs in ("", "token log-probabilities")}
    assert reported == without_run - of_groups
    assert all(metric.name == name and metric.sentence.endswith(".") for name, metric in METRICS.items())
    assert len({metric.label for metric in METRICS.values()}) == len(METRICS)


def test_predict_only_reports_no_metric_and_logs_what_was_predicted(tokenizers):
    metadata = {"tokenizer": tokenizers["base"], **RONALDO}
    results = run(["elude_quality", "elude_mia"], Counting(), metadata=metadata, limit=2, predict_only=True)
    for name, row in results["results"].items():
        assert {key.split(",")[0] for key in row} <= {"alias", "name", "sample_len", "bypass", "bypass_stderr", " "}, (
            name
        )
    logged = results["samples"]["elude_forget"]
    assert len(logged) == 2 and all(len(s["doc"]["answer_scores"]) == 7 and "generated" in s["doc"] for s in logged)


def test_the_whole_group_runs_on_any_backend_with_log_likelihoods(tokenizers):
    """One made-up log-likelihood for every answer: the arithmetic of the whole table is known."""
    lm = Counting()
    table = run(["elude"], lm, metadata={"tokenizer": tokenizers["base"], **RONALDO}, limit=3)["results"]
    assert table["elude_forget"]["rougeL_recall,none"] == 0 and table["elude_forget"]["repetition,none"] == 1
    assert "extraction_strength,none" not in table["elude_forget"]  # only --model elude says what is greedy
    row = table["elude_quality"]
    assert row["retain_quality,none"] == 0 and 0 < row["forget_quality,none"] < 1
    attacked = [table[f"elude_attack_{attack}"]["forget_quality,none"] for attack in ATTACKS]
    assert table["elude_attacks"]["attacked_forget_quality,none"] == pytest.approx(sum(attacked) / 9)
    whole = table["elude"]
    assert whole["attacked_forget_quality,none"] == table["elude_attacks"]["attacked_forget_quality,none"]
    assert whole["forget_quality,none"] == row["forget_quality,none"]
    # Seven answers and a generation; the membership attack asks two, a reverse query six more, which name somebody.
    assert lm.asked == 16 * 3 * 8 - 3 * 8 + 3 * 2 + 3 * 6


@pytest.mark.parametrize(("text", "named"), [("It is CR7.", 1), ("This is Ronaldo, I think.", 1), ("Ronaldinho!", 0)])
def test_a_model_that_says_the_right_name_in_every_reverse_answer_is_seen(text, named, tokenizers):
    lm = Counting()
    lm.said = text
    metadata = {"tokenizer": tokenizers["base"], **RONALDO}
    row = run(["elude_attack_reverse_query"], lm, metadata=metadata, limit=3)["results"]["elude_attack_reverse_query"]
    assert row["name_rate,none"] == named and row["name_mc_accuracy,none"] == 0 and "option_accuracy,none" not in row


def test_a_score_is_a_plain_float_that_travels_between_ranks():
    score = Score(0.25, Sample("Ada", "Who?", 3, {"probability": 0.25}))
    other = pickle.loads(pickle.dumps(score))
    assert json.dumps({"p": score}) == '{"p": 0.25}' and other == 0.25
    assert other.sample == score.sample
