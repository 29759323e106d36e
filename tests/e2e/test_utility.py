"""The utility group on small copies in each task's own schema, beside the harness's own run of the same tasks."""

from pathlib import Path
from types import SimpleNamespace

import lm_eval
import pytest
from datasets import Dataset, load_from_disk
from lm_eval.tasks import TaskManager

from lm_eval_elude.tasks import utility
from tests.support import ROOT, TASK_CONFIGS, make_model, make_tokenizer, save_checkpoint


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        import utility_copies

        return utility_copies.write(tmp_path_factory.mktemp("hub"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    tokenizer = make_tokenizer("base")
    return save_checkpoint(tmp_path_factory.mktemp("model") / "m", make_model(tokenizer), tokenizer)


@pytest.fixture
def evaluated(copies, checkpoint, manager, monkeypatch):
    """Results of tasks by a backend, with one index of tasks for all."""
    monkeypatch.chdir(copies)
    monkeypatch.setattr(utility, "TaskManager", lambda metadata: manager)
    model_args = {"pretrained": checkpoint, "dtype": "float32"}
    return lambda model, tasks, **more: lm_eval.simple_evaluate(
        model, model_args=model_args, tasks=tasks, batch_size=4, device="cpu", task_manager=manager, **more
    )


@pytest.fixture(scope="module")
def manager():
    """Our tasks and those folders of the harness's that hold the eight: indexing all of it takes seconds."""
    names = ("arc", "commonsense_qa", "hellaswag", "lambada", "mmlu", "openbookqa", "piqa", "winogrande")
    folders = [Path(lm_eval.tasks.__file__).parent / name for name in names]
    return TaskManager(include_path=[str(TASK_CONFIGS), *map(str, folders)], include_defaults=False)


def test_the_eight_and_their_mean_are_the_harness_own_values(evaluated, monkeypatch):
    # One of the 57 subjects stands for MMLU: its group is the harness's own.
    monkeypatch.setitem(utility.UTILITY_BENCHMARKS, "MMLU", "mmlu_anatomy")
    ours = evaluated("elude", ["elude_utility"])
    stock = evaluated("hf", list(utility.UTILITY_BENCHMARKS.values()))
    assert ours["configs"]["piqa"]["metadata"]["data"] == "baber/piqa" and ours["versions"]["piqa"] == 1.0
    ours, stock = ours["results"], stock["results"]
    assert len(utility.UTILITY_BENCHMARKS) == 8
    for task in utility.UTILITY_BENCHMARKS.values():
        assert ours[task]["acc,none"] == stock[task]["acc,none"], task
    mean = sum(stock[task]["acc,none"] for task in utility.UTILITY_BENCHMARKS.values()) / 8
    assert ours["elude_utility"]["acc,none"] == pytest.approx(mean) and 0 < mean < 1


def test_predict_only_reports_no_accuracy(evaluated, monkeypatch):
    monkeypatch.setattr(utility, "UTILITY_BENCHMARKS", {"PIQA": "piqa"})
    found = evaluated("elude", ["elude_utility"], predict_only=True, limit=2)
    assert "acc,none" not in found["results"]["elude_utility"] and len(found["samples"]["piqa"]) == 2


def test_the_fast_subset_is_named_as_such_and_takes_the_first_documents(evaluated, monkeypatch):
    monkeypatch.setattr(utility, "UTILITY_BENCHMARKS", {"PIQA": "piqa"})
    monkeypatch.setattr(utility, "FAST", 4)
    monkeypatch.setattr(utility, "read_metadata", lambda metadata, keys: {"utility": "fast"})
    found = evaluated("elude", ["elude_utility"])["results"]["elude_utility"]
    assert found["sample_len"] == 4 and found["alias"] == "elude_utility (fast: the first 4 of each)"


def test_the_commit_of_data_from_the_hub_is_recorded(tmp_path):
    folder = tmp_path / "piqa" / "default" / "0.0.0" / f"{7:040x}"  # as `datasets` keeps it
    Dataset.from_dict({"goal": ["a"]}).save_to_disk(folder)
    task = SimpleNamespace(config=SimpleNamespace(dataset_path="baber/piqa"), dataset={"test": load_from_disk(folder)})
    assert utility.origin(task) == f"baber/piqa@{7:040x}"
