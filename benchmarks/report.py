"""How large a report of the whole published benchmark is, and how long it takes: `python benchmarks/report.py [PAGE]`.

Two made-up runs of as many questions as the published data have, with all attacks. Texts are drawn word by word from
what follows two words in ELUDe-mini, so that they are as long, and repeat themselves as much, as its own.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lm_eval_elude.attacks.builders import ATTACKS
from lm_eval_elude.data.bundled import DATA as MINI
from lm_eval_elude.report.comparison import named_runs
from lm_eval_elude.report.page.page import write_report

TARGETS, FORGET, RETAIN, WORLD, PROMPTS = 20, 15_651, 9_095, 5_000, 100  # as published, in the scored splits
FIELDS = ("question", "answer", "paraphrased_question", "paraphrased_answer")


class Writer:
    """Texts like those of ELUDe-mini."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.after: dict[str, dict[tuple[str, ...], list[str]]] = {}
        for file in sorted(MINI.glob("*.jsonl")):
            for line in file.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                for field in FIELDS:
                    words = ["", "", *row[field].split(), ""]
                    table = self.after.setdefault(field, defaultdict(list))
                    for i in range(2, len(words)):
                        table[tuple(words[i - 2 : i])].append(words[i])

    def text(self, field: str) -> str:
        """A text as a field has them, 40 words at most."""
        words = ["", ""]
        while len(words) < 42 and (word := self.draw.choice(self.after[field][tuple(words[-2:])])):
            words.append(word)
        return " ".join(words[2:])


def tasks() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Task and documents without what was measured."""
    write, draw = Writer(0), random.Random(0)

    def record(number: int, target: str) -> dict[str, Any]:
        texts = {field: write.text(field) for field in FIELDS}
        return {"id": number, "entity": target, **texts, "perturbed_answer": [write.text("answer") for _ in range(5)]}

    forget = [record(i, f"Target {i % TARGETS}") for i in range(FORGET)]
    yield "elude_forget", forget
    yield "elude_retain", [record(i, f"Target {i % TARGETS}") for i in range(RETAIN)]
    yield "elude_world", [record(i, "") for i in range(WORLD)]
    for attack in (*ATTACKS, "none"):
        docs = [draw.choice(forget[i % TARGETS :: TARGETS]) for i in range(PROMPTS * TARGETS)]
        told = [f"{write.text('answer')} {doc['question']} {write.text('question')}" for doc in docs]
        asked = [doc["question"] for doc in docs] if attack == "none" else told
        yield (
            f"elude_attack_{attack}",
            [{**doc, "id": i, "plain_question": doc["question"], "question": asked[i]} for i, doc in enumerate(docs)],
        )


def main() -> None:
    """Write both runs and their report, print its size and time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path, help="where to keep the report  [default: it is not kept]")
    page: Path | None = parser.parse_args().page
    draw, writers = random.Random(1), [Writer(2), Writer(3)]
    settings = {
        "targets": [f"Target {i}" for i in range(TARGETS)], "dataset": "made up", "truth_ratio": "geometric",
        "guardrail": False, "attack_file": "", "seed": 0, "data": {}, "template": "", "versions": {}, "checkpoint": [],
        "fingerprint": "", "n": 0, "aggregates": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for task, docs in tasks():
            names.append(task)
            for run, write in zip(("before", "after"), writers, strict=True):
                Path(folder, run).mkdir(exist_ok=True)
                with Path(folder, run, f"samples_{task}_1.jsonl").open("w", encoding="utf-8") as file:
                    for doc in docs:
                        scores = [[10 * math.log(draw.uniform(0.01, 0.99)), 10] for _ in range(7)]
                        known = run == "before" and draw.random() < 0.7
                        said = doc["answer"] if known else write.text("answer")
                        file.write(json.dumps({"doc": {**doc, "answer_scores": scores, "generated": said}}) + "\n")
        for run in ("before", "after"):
            results = {
                "results": {task: {} for task in names},
                "configs": {task: {"metadata": {"elude": settings}} for task in names},
            }
            Path(folder, run, "results_1.json").write_text(json.dumps(results), encoding="utf-8")
        start, out = time.process_time(), page or Path(folder, "report.html")
        write_report(named_runs([f"{folder}/before", f"{folder}/after"]), out)
        print(f"{out.stat().st_size / 1e6:.1f} MB, {time.process_time() - start:.0f} s of processor time")


if __name__ == "__main__":
    main()
