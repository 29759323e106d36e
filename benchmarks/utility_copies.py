"""Small data sets in the schemas of the eight utility benchmarks, for where there is no Hub.

Each lies in a folder of its repository's name: run beside these, the harness reads them and does not ask the Hub.
"""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

CHOICES = {"label": ["A", "B", "C", "D"], "text": ["blue", "green", "red", "black"]}
FIVE = {"label": ["A", "B", "C", "D", "E"], "text": ["blue", "green", "red", "black", "white"]}
SPLITS = ("train", "validation", "test", "dev")
# Repository, configuration, one row: question i has answer i % 2.
ROWS = {
    ("allenai/ai2_arc", "ARC-Challenge"): lambda i: {
        "id": str(i), "question": f"Which colour is number {i}?", "choices": CHOICES, "answerKey": "AB"[i % 2],
    },
    ("tau/commonsense_qa", "default"): lambda i: {
        "id": str(i), "question": f"Where is {i}?", "question_concept": "colour", "choices": FIVE,
        "answerKey": "AB"[i % 2],
    },
    ("Rowan/hellaswag", "default"): lambda i: {
        "ind": i, "activity_label": "Art", "ctx_a": f"A man paints wall {i}.", "ctx_b": "he", "ctx": "A man paints",
        "endings": ["stops.", "goes on.", "sings.", "falls."], "source_id": "a", "split": "val", "split_type": "x",
        "label": str(i % 2),
    },
    ("EleutherAI/lambada_openai", "default"): lambda i: {"text": f"She painted wall {i} and then the door"},
    ("cais/mmlu", "anatomy"): lambda i: {
        "question": f"Which bone is {i}?", "subject": "anatomy", "choices": ["a", "b", "c", "d"], "answer": i % 2,
    },
    ("allenai/openbookqa", "main"): lambda i: {
        "id": str(i), "question_stem": f"The colour {i} is", "choices": CHOICES, "answerKey": "AB"[i % 2],
    },
    ("baber/piqa", "default"): lambda i: {
        "goal": f"Paint wall {i}", "sol1": "Use a brush.", "sol2": "Use a spoon.", "label": i % 2,
    },
    ("allenai/winogrande", "winogrande_xl"): lambda i: {
        "sentence": f"The brush {i} was dry so _ was washed.", "option1": "the brush", "option2": "the wall",
        "answer": "12"[i % 2],
    },
}  # fmt: skip


def subjects() -> list[str]:
    """MMLU's 57, as the harness has them."""
    spec = find_spec("lm_eval")
    assert spec and spec.origin
    files = sorted((Path(spec.origin).parent / "tasks" / "mmlu" / "default").glob("mmlu_*.yaml"))
    return [found[1] for file in files if (found := re.search(r'"?dataset_name"?: "?(\w+)', file.read_text("utf-8")))]


def write(folder: Path, count: int = 6) -> Path:
    """Write all of them, ``count`` rows a split; question i has answer i % 2."""
    for (repository, config), row in ROWS.items():
        place = folder / repository
        place.mkdir(parents=True, exist_ok=True)
        for name in SPLITS:
            (place / f"{name}.jsonl").write_text("".join(json.dumps(row(i)) + "\n" for i in range(count)))
        files = "".join(f"  - split: {name}\n    path: {name}.jsonl\n" for name in SPLITS)
        names = subjects() if config == "anatomy" else [config]
        configs = "".join(f"- config_name: {name}\n  data_files:\n{files}" for name in names)
        (place / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    return folder
