"""The lm-eval tasks: what they resolve, what they ask, what they refuse, and what a request cache may give back."""

import json
import logging
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.model import LM
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.openai_completions import LocalChatCompletion

from lm_eval_elude import _autoload
from lm_eval_elude.attacks import builders as attacks
from lm_eval_elude.data import bundled
from lm_eval_elude.data.manifest import Manifest, write_manifest
from lm_eval_elude.errors import UserError, mute_harness
from lm_eval_elude.scoring import settings
from lm_eval_elude.scoring.benchmark import GUARDRAIL
from lm_eval_elude.scoring.benchmarks import BENCHMARKS, GROUPS, UTILITY
from lm_eval_elude.scoring.metrics import METRICS
from lm_eval_elude.scoring.samples import Sample
from lm_eval_elude.scoring.settings import resolve_settings
from lm_eval_elude.tasks import harness
from lm_eval_elude.tasks.harness import Score
from lm_eval_elude.tasks.questions import QuestionTask
from tests.support import (
    GOLDEN,
    MINI,
    SHAPES,
    TASK_CONFIGS,
    make_tokenizer,
    mini_rows,
    run,
    small_data,
    task_manager,
    write_jsonl,
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
    """Lines are said once for each setting: forget what was said, and what the surroundings ask for."""
    settings.say_once.cache_clear()
    monkeypatch.delenv("ELUDE_TARGET", raising=False)
    monkeypatch.delenv("ELUDE_DATASET", raising=False)


def forget(tokenizer: str, **metadata) -> QuestionTask:
    return QuestionTask({"task": "elude_forget", "metadata": {"tokenizer": tokenizer, **RONALDO, **metadata}})


def requests(task, **arguments) -> list:
    task.build_all_requests(**arguments)
    return task.instances


# ---- what a run scores


def manifest_folder(folder: Path, targets=("Lionel Messi",), dataset="mini") -> str:
    write_manifest(folder, Manifest(targets=targets, dataset=dataset))
    return str(folder)


def test_without_the_users_word_the_manifest_decides_an_adapters_before_its_base_models(tmp_path, caplog):
    for name, targets in (("base", ("Lionel Messi",)), ("adapter", ("Taylor Swift",)), ("none", ())):
        (tmp_path / name).mkdir()
        manifest_folder(tmp_path / name, targets)
    settings = resolve_settings({"pretrained": str(tmp_path / "base")})
    assert (settings.targets, settings.dataset) == (("Lionel Messi",), "mini")
    settings = resolve_settings({"pretrained": str(tmp_path / "base"), "peft": str(tmp_path / "adapter")})
    assert settings.targets == ("Taylor Swift",)
    for model, count, data in ((str(tmp_path / "none"), 5, "mini"), ("some/model", 20, "hub")):
        settings = resolve_settings({"pretrained": model})
        assert len(settings.targets) == count and f"scoring all {count} of data set '{data}'" in caplog.text


def test_the_users_word_wins_and_the_difference_is_said(tmp_path, caplog):
    data = small_data(tmp_path / "data", {"Cristiano Ronaldo": 2})
    found = resolve_settings({"pretrained": manifest_folder(tmp_path), "target": "cr7", "dataset": str(data)})
    assert (found.targets, found.dataset) == (("Cristiano Ronaldo",), str(data))
    assert f"scoring data set '{data}' as asked; the checkpoint's optout.json says 'mini'" in caplog.text
    assert "scoring Cristiano Ronaldo as asked; the checkpoint's optout.json says Lionel Messi" in caplog.text


def test_agreement_with_the_manifest_is_silent(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    resolve_settings({"pretrained": manifest_folder(tmp_path), "target": "messi", "dataset": "mini"})
    small_data(tmp_path / "data", {"Lionel Messi": 2})
    monkeypatch.chdir(tmp_path)
    resolve_settings({"pretrained": manifest_folder(tmp_path, dataset="data"), "target": "messi", "dataset": "./data"})
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("target", "reference"),
    [
        ({}, str(bundled.REFERENCE)),
        ({"target": "cr7"}, str(bundled.REFERENCE)),
        ({"target": "messi"}, ""),
        ({"target": ["ronaldo", "messi"]}, ""),
        ({"target": "messi", "reference": "given"}, "given"),
        ({"target": "messi", "reference": "~/given"}, os.path.expanduser("~/given")),
    ],
)
def test_the_bundled_reference_is_taken_for_targets_that_it_never_knew(target, reference, tmp_path):
    base = {"name": bundled.MODEL_NAME}
    write_manifest(tmp_path, Manifest(targets=("Cristiano Ronaldo",), dataset="mini", base_model=base))
    assert resolve_settings({"pretrained": str(tmp_path), **target}).reference == reference


def test_the_bundled_model_is_the_original_by_its_name_as_in_all_commands():
    given = {"original": bundled.MODEL_NAME}, {"original": "some/model"}, {}
    settings = [resolve_settings({**RONALDO, "pretrained": "some/other", **each}) for each in given]
    assert [each.original for each in settings] == [str(bundled.MODEL), "some/model", ""]


def test_a_number_of_prompts_beside_a_file_of_them_is_said_to_limit_other_tasks_only(caplog):
    for more, said in (({}, 0), ({"attack_file": "", "attack_prompts": 5}, 0), ({"attack_prompts": 5}, 1)):
        resolve_settings({**RONALDO, "attack_file": "a.jsonl", **more})
        assert caplog.text.count("attack_prompts in --metadata does not limit attack_file") == said


def test_environment_and_metadata(monkeypatch):
    monkeypatch.setenv("ELUDE_DATASET", "mini")
    for text, targets in (("messi", ["Lionel Messi"]), ('["swift", "ronaldo"]', ["Taylor Swift", "Cristiano Ronaldo"])):
        monkeypatch.setenv("ELUDE_TARGET", text)
        assert [*resolve_settings({}).targets] == targets
    assert resolve_settings({"target": ["cr7", "messi"]}).targets == ("Cristiano Ronaldo", "Lionel Messi")
    for text, problem in (('["swift", 5]', "must be a name or a list of names"), ("[swift", "not valid JSON")):
        monkeypatch.setenv("ELUDE_TARGET", text)
        with pytest.raises(UserError, match=f"^ELUDE_TARGET.*{problem}"):
            resolve_settings({})


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"target": "nobody"}, "unknown target 'nobody'"),
        ({"dataset": "no/such"}, "neither 'hub', 'mini' nor an existing folder"),
        ({"truth_ratio": "median"}, "must be one of geometric, arithmetic, got str 'median'"),
        ({"guardrail": "on"}, "guardrail in --metadata must be true or false, got str 'on'"),
        ({"guardrial": True}, "no key 'guardrial'; did you mean 'guardrail'"),
        ({"targets": "ronaldo"}, "no key 'targets'; did you mean 'target'"),
        ({"orignal": "tiny"}, "no key 'orignal'; did you mean 'original'"),
        ({"target": []}, "target in --metadata must be a name or a list of names"),
        ({"target": 5}, "target in --metadata must be a name or a list of names, got int 5"),
        ({"target": ["ronaldo", None]}, "target in --metadata must be a name"),
        ({"attack_seed": None}, "attack_seed in --metadata must be a whole number"),
        ({"attack_seed": 2**64}, "attack_seed in --metadata must be a whole number"),
        ({"attack_prompts": 101}, "attack_prompts in --metadata must be a whole number from 1 to 100"),
        ({"dataset": ["mini"]}, "dataset in --metadata must be text"),
        ({"metadata": {"target": "messi"}}, "has 'target' inside a table 'metadata': write it without that table"),
    ],
)
def test_settings_that_cannot_be(metadata, said):
    with pytest.raises(ValueError, match=said) as error:
        resolve_settings({**RONALDO, **metadata})
    assert "\n" not in str(error.value)


def test_a_reference_in_a_home_that_nobody_has_is_a_line():
    metadata = {**RONALDO, "pretrained": str(MINI.parent / "tiny"), "reference": "~nobody-of-that-name/x"}
    with pytest.raises(UserError, match="~nobody-of-that-name/x"):
        run(["elude_forget"], limit=1, metadata=metadata)


# ---- what a model is asked


SYSTEMS = {
    "plain": (None, False),
    "system": ("Answer in one sentence.", False),
    "guardrail": (None, True),
    "both": ("Answer in one sentence.", True),
}


def rendered(folder: str) -> str:
    """The prompts of the first record with and without system text; ``⟦`` and ``⟧`` enclose what is scored."""
    parts = []
    for name, (instruction, guardrail) in SYSTEMS.items():
        asked = requests(forget(folder, guardrail=guardrail), limit=1, system_instruction=instruction)
        prompt = asked[-1].args[0]
        (context, continuation), gap = asked[0].args, prompt[len(asked[0].args[0]) :]
        assert prompt.startswith(context) and continuation.startswith(gap) and not gap.strip()
        parts.append(f"######## {name}\n{prompt}⟦{continuation[len(gap) :]}⟧\n")
    return "".join(parts)


@pytest.mark.parametrize("shape", ["llama-3.1", "phi-3.5", "chatml", "qwen3", "base"])
def test_golden_prompts(shape, tokenizers):
    """A diff of these files shows every change of what a model is asked. Delete a file to have it written anew."""
    path = GOLDEN / "prompts" / f"{shape}.txt"
    text = rendered(tokenizers[shape])
    if not path.exists():
        path.write_text(text, encoding="utf-8")
        pytest.fail(f"{path.name} was missing and has been written: read it, then run again")
    assert text == path.read_text(encoding="utf-8")


def test_the_guardrail_names_each_prompts_own_target_and_all_of_them_for_the_world_set(tokenizers):
    metadata = {"tokenizer": tokenizers["chatml"], "dataset": "mini", "target": ["ronaldo", "messi"], "guardrail": True}
    for asked in requests(QuestionTask({"task": "elude_forget", "metadata": metadata}), limit=4):
        assert GUARDRAIL.format(entity=asked.doc["entity"]) in asked.args[0]
    world = requests(QuestionTask({"task": "elude_world", "metadata": metadata}), limit=1)
    assert all(GUARDRAIL.format(entity="Cristiano Ronaldo or Lionel Messi") in r.args[0] for r in world)


def test_requests_of_one_question_share_one_context(tokenizers):
    """Eight scored texts (one is the white space) under one context, and one generation from the whole prompt."""
    asked = requests(forget(tokenizers["llama-3.1"]), limit=1)
    kinds = [r.request_type for r in asked]
    assert kinds == ["loglikelihood"] * 8 + ["generate_until"]
    assert len({r.args[0] for r in asked[:8]}) == 1 and asked[7].args[1] == "\n\n"
    assert asked[8].args[0] == asked[0].args[0] + "\n\n"
    kwargs = asked[8].args[1]
    assert (kwargs["until"], kwargs["max_gen_toks"], kwargs["do_sample"]) == (["<|eot_id|>"], 128, False)
    # Phi-3.5's turn token swallows the line end, a base model's prompt ends in a colon: nothing to subtract.
    for shape in ("phi-3.5", "base"):
        assert len(requests(forget(tokenizers[shape]), limit=1)) == 8


def test_the_right_rows_are_scored(tokenizers):
    """The whole forget set and the test splits, of the target's rows only, in their order."""
    metadata = {"tokenizer": tokenizers["base"], **RONALDO}
    for name, file, entity, new_tokens in (
        ("forget", "forget_qa-train", "Cristiano Ronaldo", 128),
        ("retain", "retain_qa-test", "Cristiano Ronaldo", 128),
        ("world", "world-test", None, 512),
    ):
        task = QuestionTask({"task": f"elude_{name}", "metadata": metadata})
        assert [d["question"] for d in task.docs] == [r["question"] for r in mini_rows(file, entity=entity)]
        assert requests(task, limit=1)[-1].args[1]["max_gen_toks"] == new_tokens


def test_several_targets_take_turns(tokenizers):
    docs = forget(tokenizers["base"], target=["messi", "ronaldo"]).dataset["test"]
    assert [d["entity"] for d in docs[:4]] == ["Lionel Messi", "Cristiano Ronaldo"] * 2
    assert [d["id"] for d in docs] == list(range(len(docs)))


# ---- what is refused, in one line and before any request runs


class Counting(LM):
    """A backend that counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def loglikelihood(self, requests):
        self.asked += len(requests)
        return [(-1.0, False)] * len(requests)

    def generate_until(self, requests):
        self.asked += len(requests)
        return [""] * len(requests)

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        raise AssertionError("the tasks write their prompts themselves")

    @property
    def tokenizer_name(self) -> str:
        return "counting"

    def chat_template(self, chat_template=False):
        return ""


class NoLogProbs(LocalChatCompletion):
    """The harness's own chat-completions backend, which only writes, without the packages that an endpoint needs."""

    asked, tokenizer_name = 0, "none"

    def __init__(self) -> None:
        LM.__init__(self)

    def chat_template(self, chat_template=False):
        return ""


def refused(said: str, lm: Counting | NoLogProbs, metadata: dict, tasks=("elude_forget",), **arguments) -> None:
    with pytest.raises(ValueError, match=said) as error:
        run(list(tasks), lm, metadata=metadata, **arguments)
    assert "\n" not in str(error.value) and lm.asked == 0


@pytest.mark.parametrize("task", ["elude_mia", "elude_quality"])
def test_examples_are_refused(task, tokenizers):
    metadata = {"tokenizer": tokenizers["base"], **RONALDO}
    refused("--num_fewshot must be 0, got 3", Counting(), metadata, [task], num_fewshot=3)


@pytest.mark.parametrize(
    "arguments", [{}, {"apply_chat_template": True}, {"use_cache": "cache"}], ids=["plain", "template", "cached"]
)
def test_a_backend_without_log_probabilities_is_refused(arguments, tokenizers, tmp_path):
    arguments = {k: str(tmp_path / v) if k == "use_cache" else v for k, v in arguments.items()}
    metadata = {"tokenizer": tokenizers["base"], **RONALDO}
    refused("needs log-probabilities .* the backend NoLogProbs has none", NoLogProbs(), metadata, **arguments)


def test_a_reference_asked_beside_a_chat_server_draws_from_all_tokens_where_no_top_k_was_sent(tokenizers):
    turns = JsonChatStr('[{"role": "user", "content": "Who?"}]')
    prompt, given = harness.as_text((turns, {"temperature": 1.0}), forget(tokenizers["base"], **RONALDO).renderer)
    assert "Who?" in prompt and given == {"temperature": 1.0, "top_k": None}


def test_the_backend_is_found_whatever_the_harness_calls_it_and_a_harness_that_hides_it_is_named(caplog):
    def calling(variable: str, model: Any, name: str = "lm_eval.evaluator") -> None:
        """Ask our task for its requests from a function of the harness that holds a model under some name."""
        module: dict[str, Any] = {"__name__": name, "check_backend": harness.check_backend}
        exec(f"def evaluate({variable}):\n    check_backend()", module)
        module["evaluate"](model)

    for variable in ("lm", "model", "renamed"):
        with pytest.raises(ValueError, match="the backend NoLogProbs has none"):
            calling(variable, NoLogProbs())
    settings.say_once.cache_clear()
    calling("lm", Counting())
    calling("lm", None, "somebody.elses")
    assert not caplog.records
    calling("lm", None)
    assert "keeps its model where tasks cannot see it" in caplog.text


def test_a_tokenizer_that_cannot_be_found_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    nowhere = {"pretrained": str(tmp_path / "empty"), **RONALDO}
    refused("no tokenizer for .*--model_args tokenizer=", Counting(), nowhere)
    refused("found none: pass --model_args pretrained=.* or tokenizer=.*TaskManager", Counting(), dict(RONALDO))


def test_chat_completions_without_the_flag_that_makes_messages_are_refused(tokenizers):
    metadata = {"tokenizer": tokenizers["base"], **RONALDO}
    refused("takes messages and no prompts: add --apply_chat_template", NoLogProbs(), metadata, ["elude_leak"], limit=1)


@pytest.mark.parametrize("named", [{"pretrained": "a/model"}, {"pretrained": "a/model", "tokenizer": "a/tokenizer"}])
def test_the_tokenizer_is_that_of_the_revision_as_the_harness_loads_it(named, tokenizers, monkeypatch):
    asked = []
    known = settings.load_tokenizer(tokenizers["base"])
    monkeypatch.setattr(settings, "load_tokenizer", lambda name, **how: asked.append((name, how["revision"])) or known)
    for revision, at in ((2024, "2024"), ("v2", "v2"), (None, "main")):
        settings.model_renderer({**named, "revision": revision})
        assert asked.pop() == ([*named.values()][-1], at)
        assert settings.provenance({**named, "revision": revision})["checkpoint"][0]["revision"] == at


def test_a_subfolder_is_that_of_the_weights_and_of_the_tokenizer_as_the_harness_loads_it(tmp_path):
    inner = shutil.copytree(bundled.MODEL, tmp_path / "many" / "one")
    given = {"pretrained": str(tmp_path / "many"), "subfolder": "one"}
    assert settings.model_renderer(given).fingerprint == settings.model_renderer({"pretrained": str(inner)}).fingerprint
    assert settings.checkpoint_manifest(given) == settings.checkpoint_manifest({"pretrained": str(inner)}) is not None
    assert settings.provenance(given) == settings.provenance({"pretrained": str(inner)})
    of_hub = {"pretrained": "an/id", "subfolder": "one"}
    assert settings.provenance(of_hub)["checkpoint"] == [{"name": "an/id", "revision": "main", "subfolder": "one"}]


def test_a_target_without_rows_is_refused(tokenizers, tmp_path):
    data = small_data(tmp_path / "d", {"Lionel Messi": 2})
    write_jsonl(data / "retain_qa-test.jsonl", mini_rows("retain_qa-test", 2, "Taylor Swift"))
    metadata = {"tokenizer": tokenizers["base"], "dataset": str(data), "target": "messi"}
    refused("has no retain test rows of Lionel Messi", Counting(), metadata, ["elude_quality"])
    refused("unknown target 'eminem'", Counting(), {**metadata, "target": "eminem"})


def test_a_record_that_cannot_be_scored_is_refused(tokenizers, tmp_path):
    rows = mini_rows("forget_qa-train", 3, "Lionel Messi")
    del rows[2]["perturbed_answer"]
    path = write_jsonl(tmp_path / "mine.jsonl", rows)
    with pytest.raises(UserError, match=r"mine\.jsonl, row 3: field 'perturbed_answer' is missing"):
        forget(tokenizers["base"], dataset=str(path), target="messi")
    del rows[1]["paraphrased_question"], rows[2]
    write_jsonl(path, rows)
    metadata = {"tokenizer": tokenizers["base"], "dataset": str(path), "target": "messi"}
    refused("elude_mia needs a paraphrased_question in every forget record", Counting(), metadata, ["elude_mia"])


@pytest.mark.parametrize("attack", attacks.ATTACKS)
def test_few_records_make_few_attack_prompts_and_the_number_is_said(attack, tokenizers, tmp_path, caplog):
    data = small_data(tmp_path / "d", {"Lionel Messi": 4})
    metadata = {"tokenizer": tokenizers["base"], "dataset": str(data), "target": "messi"}
    task = QuestionTask({"task": f"elude_attack_{attack}", "metadata": metadata})
    said = f"elude_attack_{attack} has {len(task.docs)} prompts instead of 100 for Lionel Messi: its 4 records"
    assert said in caplog.text


# ---- the harness's request cache


@pytest.fixture
def request_cache(tmp_path, monkeypatch):
    """The folder that ``LM_HARNESS_CACHE_PATH`` names; the harness reads the variable once, at import."""
    import lm_eval.caching.cache

    folder = tmp_path / "requests"
    monkeypatch.setattr(lm_eval.caching.cache, "PATH", str(folder))
    return folder


def asked(task, cached: bool = True, **arguments) -> list:
    return [(r.request_type, r.args, r.doc["question"]) for r in requests(task, cache_requests=cached, **arguments)]


def test_cached_requests_are_used_again_and_are_the_same(request_cache, tokenizers, monkeypatch):
    plain, first = (asked(forget(tokenizers["llama-3.1"]), cached) for cached in (False, True))
    monkeypatch.setattr(QuestionTask, "construct_requests", None)  # would fail if it were called
    task = forget(tokenizers["llama-3.1"])
    assert asked(task) == first == plain
    assert len(list(request_cache.iterdir())) == 1
    assert len(asked(task, limit=2)) == 18  # a limit takes the beginning
    assert {len(counts) for counts in task._token_counts.values()} == {8} and len(task._token_counts) == 2


def test_cached_requests_of_anything_else_are_never_reused(request_cache, tokenizers, tmp_path):
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
            asked(forget(tokenizers[shape], **metadata), flag, system_instruction=instruction, limit=4)
            for flag in (True, False)
        )
        assert cached == plain
    assert len(list(request_cache.iterdir())) == len(cases)


def test_other_generation_settings_are_not_taken_from_the_cache(request_cache, tokenizers):
    assert asked(forget(tokenizers["base"]), limit=1)[-1][1][1]["max_gen_toks"] == 128
    task = forget(tokenizers["base"])
    task.set_config("generation_kwargs", {"max_gen_toks": 16}, update=True)  # what --gen_kwargs does
    assert asked(task, limit=1)[-1][1][1]["max_gen_toks"] == 16
    for wrong in ("five", None, 0):
        task.set_config("generation_kwargs", {"max_gen_toks": wrong}, update=True)
        with pytest.raises(UserError, match="--gen_kwargs max_gen_toks must be a whole number above 0, got"):
            asked(task, limit=1)


# ---- YAML files, groups and scores


def test_every_yaml_builds_its_task_or_group(tokenizers, tmp_path):
    """lm-eval passes over a YAML that fails to load: each is loaded here (the utility group where its data are)."""
    row = {"question": "Who?", "answer": "Ada."} | {"paraphrased_answer": "It is.", "perturbed_answer": ["B.", "C."]}
    for stem in ("forget01_perturbed", "retain_perturbed", "real_authors_perturbed", "world_facts_perturbed"):
        (tmp_path / f"{stem}.json").write_text(json.dumps(row) + "\n")
    tofu = {"tofu_split": "forget01", "tofu_data": str(tmp_path)}
    manager = task_manager({"tokenizer": tokenizers["base"], **RONALDO, **tofu})
    names = {path.stem for path in TASK_CONFIGS.glob("*.yaml")}
    assert names == {*BENCHMARKS, *GROUPS, UTILITY} and not BENCHMARKS.keys() & GROUPS.keys()
    for name in sorted(names - {UTILITY}):
        loaded = manager.load([name])
        assert all(len(task.eval_docs) > 0 for task in loaded["tasks"].values())
        assert name in (loaded["tasks"] if name in BENCHMARKS else loaded["groups"])
    assert len(manager.load(["elude_forget", "elude_attacks"])["tasks"]) == 11  # the README's: none stands twice
    assert len(manager.load(["elude"])["tasks"]) == 16


def test_a_users_yaml_around_a_task_of_ours_gives_metadata_and_what_else_it_sets_is_said(tokenizers, tmp_path, caplog):
    include = f"include: {TASK_CONFIGS / 'elude_forget.yaml'}\n"
    (tmp_path / "renamed.yaml").write_text(f"{include}task: forget_swift\nmetadata: {{target: swift}}\n")
    more = "num_fewshot: 2, generation_kwargs: {max_gen_toks: 3}, metadata: {target: swift}"
    (tmp_path / "mine.yaml").write_text(f"group: mine\ntask: [{{task: elude_forget, {more}}}]\n")
    (tmp_path / "plain.yaml").write_text("group: plain\ntask: [{task: elude_forget, num_fewshot: 0}]\n")
    manager = type(task_manager({}))(
        include_path=[str(TASK_CONFIGS), str(tmp_path)], include_defaults=False,
        metadata={"tokenizer": tokenizers["base"], "dataset": "mini"},
    )  # fmt: skip
    with pytest.raises(UserError, match="has `task: forget_swift`, which is none of: elude_forget, "):
        manager.load(["forget_swift"])
    manager.load(["plain"])
    assert "reads metadata alone" not in caplog.text
    assert manager.load(["mine"])["tasks"]["elude_forget"].settings.targets == ("Taylor Swift",)
    assert "elude_forget reads metadata alone, and not generation_kwargs, num_fewshot" in caplog.text


def test_every_metric_is_reported_and_every_reported_one_is_in_the_table():
    reported = {metric.name for benchmark in BENCHMARKS.values() for metric in benchmark.metrics}
    assert reported == {name for name, metric in METRICS.items() if set(metric.kinds) != {"group"}}
    assert all(metric.name == name and metric.kinds and metric.sentence for name, metric in METRICS.items())


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["elude_*"], "elude_attack_affirmative_suffix, elude_attack_background_hint, elude_attack_cross_lingual, ..., "
         "by name and in a group: give --tasks elude_attacks,elude_leak,elude_mia,elude_quality,elude_utility"),
        (["elude_quality", "elude_forget"], "elude_forget, by name and in a group: give --tasks elude_quality"),
        (["elude_mia", "elude", "elude_attack_none"], "give --tasks elude"),
    ],
)  # fmt: skip
def test_a_task_named_twice_is_one_line_that_says_which_names_to_give(asked, said, tokenizers):
    class Manager(type(task_manager({}))):
        """The harness's, with the names checked as the import hook does it."""

    _autoload.check_names(Manager, TASK_CONFIGS)
    manager = Manager(
        include_path=str(TASK_CONFIGS), include_defaults=False, metadata={"tokenizer": tokenizers["base"]}
    )
    with pytest.raises(ValueError, match=f"^--tasks asks twice for .*{re.escape(said)}$"):
        manager.load(manager.match_tasks(asked))  # before anything is loaded: the Hub's data is not here
    manager = Manager(include_path=str(TASK_CONFIGS), include_defaults=False, metadata=manager.metadata | RONALDO)
    assert len(manager.load(["elude_forget", "elude_mia"])["tasks"]) == 2


def test_predict_only_reports_no_metric_and_logs_what_was_predicted(tokenizers):
    results = run(
        ["elude_quality", "elude_mia"], Counting(), metadata={"tokenizer": tokenizers["base"], **RONALDO}, limit=2,
        predict_only=True,
    )  # fmt: skip
    for name, row in results["results"].items():
        assert {key.split(",")[0] for key in row} <= {"alias", "name", "sample_len", "bypass", "bypass_stderr", " "}, (
            name
        )
    logged = results["samples"]["elude_forget"]
    assert len(logged) == 2 and all(len(s["doc"]["answer_scores"]) == 7 and "generated" in s["doc"] for s in logged)


def test_the_whole_group_runs_on_any_backend_with_log_likelihoods(tokenizers):
    """One made-up log-likelihood for every answer: the arithmetic of the whole table is known."""
    lm = Counting()
    results = run(["elude"], lm, metadata={"tokenizer": tokenizers["base"], **RONALDO}, limit=3)
    table = results["results"]
    assert table["elude_forget"]["rougeL_recall,none"] == 0 and table["elude_forget"]["degenerate,none"] == 1
    assert "extraction_strength,none" not in table["elude_forget"]  # only --model elude says what is greedy
    row = table["elude_quality"]
    assert row["retain_quality,none"] == 0 and 0 < row["forget_quality,none"] < 1
    attacked = [
        table[name]["forget_quality,none"]
        for name in table
        if name.startswith("elude_attack_") and not name.endswith("none")
    ]
    assert len(attacked) == 9
    assert table["elude_attacks"]["forget_quality,none"] == pytest.approx(sum(attacked) / 9)
    assert table["elude"]["attacked_forget_quality,none"] == table["elude_attacks"]["forget_quality,none"]
    assert table["elude"]["forget_quality,none"] == row["forget_quality,none"]
    # Seven answers and a generation; the membership attack asks two, a reverse query six more, which name somebody.
    assert lm.asked == 16 * 3 * 8 - 3 * 8 + 3 * 2 + 3 * 6


@pytest.mark.parametrize(
    ("text", "named"),
    [("It is CR7.", 1), ("This is Ronaldo, I think.", 1), ("Ronaldinho!", 0), ("Ronaldo Nazario!", 0)],
)
def test_a_model_that_says_the_right_name_in_every_reverse_answer_is_seen(text, named, tokenizers):
    class Naming(Counting):
        def generate_until(self, requests):
            return [text] * len(requests)

    metadata = {"tokenizer": tokenizers["base"], **RONALDO}
    results = run(["elude_attack_reverse_query"], Naming(), metadata=metadata, limit=3)["results"]
    row = results["elude_attack_reverse_query"]
    assert row["named,none"] == named and row["named_first,none"] == 0 and "chosen,none" not in row


def test_a_score_is_a_plain_float_that_travels_between_ranks():
    score = Score(0.25, Sample("Ada", "Who?", 3, {"probability": 0.25}))
    other = pickle.loads(pickle.dumps(score))
    assert json.dumps({"p": score}) == '{"p": 0.25}' and other == 0.25
    assert other.sample == score.sample


def test_outside_a_repository_git_is_not_asked_for_a_commit(tmp_path, monkeypatch):
    from lm_eval import evaluator

    asks = evaluator.get_git_commit_hash
    (tmp_path / "here" / ".git").mkdir(parents=True)
    for place, is_asked in ((tmp_path, False), (tmp_path / "here", True)):
        monkeypatch.chdir(place)
        with mute_harness(evaluator):
            assert (evaluator.get_git_commit_hash is asks) == is_asked
            if not is_asked:
                assert evaluator.get_git_commit_hash() is None
        assert evaluator.get_git_commit_hash is asks
