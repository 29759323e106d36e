"""The utility group on small copies in each task's own schema, beside the harness's own run of the same tasks."""

import json

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from lm_eval_elude.tasks import utility
from tests.support import make_model, make_tokenizer, save_checkpoint

CHOICES = {"label": ["A", "B", "C", "D"], "text": ["blue", "green", "red", "black"]}
FIVE = {"label": ["A", "B", "C", "D", "E"], "text": ["blue", "green", "red", "black", "white"]}
# Repository, configuration, split, one row: question i has answer i % 2.
ROWS = {
    ("allenai/ai2_arc", "ARC-Challenge", "test"): lambda i: {
        "id": str(i), "question": f"Which colour is number {i}?", "choices": CHOICES, "answerKey": "AB"[i % 2],
    },
    ("tau/commonsense_qa", "default", "validation"): lambda i: {
        "id": str(i), "question": f"Where is {i}?", "question_concept": "colour", "choices": FIVE,
        "answerKey": "AB"[i % 2],
    },
    ("Rowan/hellaswag", "default", "validation"): lambda i: {
        "ind": i, "activity_label": "Art", "ctx_a": f"A man paints wall {i}.", "ctx_b": "he", "ctx": "A man paints",
        "endings": ["stops.", "goes on.", "sings.", "falls."], "source_id": "a", "split": "val", "split_type": "x",
        "label": str(i % 2),
    },
    ("EleutherAI/lambada_openai", "default", "test"): lambda i: {"text": f"She painted wall {i} and then the door"},
    ("cais/mmlu", "anatomy", "test"): lambda i: {
        "question": f"Which bone is {i}?", "subject": "anatomy", "choices": ["a", "b", "c", "d"], "answer": i % 2,
    },
    ("allenai/openbookqa", "main", "test"): lambda i: {
        "id": str(i), "question_stem": f"The colour {i} is", "choices": CHOICES, "answerKey": "AB"[i % 2],
    },
    ("baber/piqa", "default", "validation"): lambda i: {
        "goal": f"Paint wall {i}", "sol1": "Use a brush.", "sol2": "Use a spoon.", "label": i % 2,
    },
    ("allenai/winogrande", "winogrande_xl", "validation"): lambda i: {
        "sentence": f"The brush {i} was dry so _ was washed.", "option1": "the brush", "option2": "the wall",
        "answer": "12"[i % 2],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """Small data sets in folders of the repositories' names: where one stands, the Hub is not asked."""
    folder = tmp_path_factory.mktemp("hub")
    for (repository, config, split), row in ROWS.items():
        place = folder / repository
        place.mkdir(parents=True, exist_ok=True)
        splits = dict.fromkeys((split, "train", "dev"))
        for name in splits:
            (place / f"{name}.jsonl").write_text("".join(json.dumps(row(i)) + "\n" for i in range(6)))
        files = "".join(f"  - split: {name}\n    path: {name}.jsonl\n" for name in splits)
        (place / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    tokenizer = make_tokenizer("base")
    return save_checkpoint(tmp_path_factory.mktemp("model") / "m", make_model(tokenizer), tokenizer)


@pytest.fixture
def evaluated(copies, checkpoint, manager, monkeypatch):
    """Results of tasks by a backend, with one index of the harness's tasks for all (it takes seconds to make)."""
    monkeypatch.chdir(copies)
    monkeypatch.setattr(utility, "TaskManager", lambda metadata: manager)
    model_args = {"pretrained": checkpoint, "dtype": "float32"}
    return lambda model, tasks: lm_eval.simple_evaluate(
        model, model_args=model_args, tasks=tasks, batch_size=4, device="cpu", task_manager=manager
    )["results"]


@pytest.fixture(scope="module")
def manager():
    return TaskManager()


def test_the_eight_and_their_mean_are_the_harness_own_values(evaluated, monkeypatch):
    # One of the 57 subjects stands for MMLU: its group is the harness's own.
    monkeypatch.setitem(utility.BENCHMARKS, "MMLU", "mmlu_anatomy")
    ours = evaluated("elude", ["elude_utility"])
    stock = evaluated("hf", list(utility.BENCHMARKS.values()))
    assert len(utility.BENCHMARKS) == 8
    for task in utility.BENCHMARKS.values():
        assert ours[task]["acc,none"] == stock[task]["acc,none"], task
    mean = sum(stock[task]["acc,none"] for task in utility.BENCHMARKS.values()) / 8
    assert ours["elude_utility"]["acc,none"] == pytest.approx(mean) and 0 < mean < 1


def test_the_fast_subset_is_named_as_such_and_takes_the_first_documents(evaluated, monkeypatch):
    monkeypatch.setattr(utility, "BENCHMARKS", {"PIQA": "piqa"})
    monkeypatch.setattr(utility, "FAST", 4)
    monkeypatch.setattr(utility, "read_metadata", lambda metadata, keys: {"utility": "fast"})
    found = evaluated("elude", ["elude_utility"])["elude_utility"]
    assert found["sample_len"] == 4 and found["alias"] == "elude_utility (fast: the first 4 of each)"
