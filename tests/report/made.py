"""Made-up runs in lm-eval's own layout, of ELUDe-mini's questions: no model, so thousands of rows take a moment."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from lm_eval_elude.scoring.benchmarks import group_report, task_report
from lm_eval_elude.scoring.runs import Run
from tests.support import mini_rows, write_jsonl

ATTACKS = ("elude_attack_role_playing", "elude_attack_reverse_query", "elude_attack_none")
SETS = {"elude_forget": "forget_qa-train", "elude_retain": "retain_qa-test", "elude_world": "world-test"}


def made_run(
    folder: Path, *, known: float, says: str | None = None, seed: int = 0, limit: int | None = None, times: int = 1,
    entity: str = "Cristiano Ronaldo", tasks: tuple[str, ...] = (*SETS, "elude_mia", *ATTACKS),
    checkpoint: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """A results file with its samples.

    Args:
        folder: for both.
        known: probability of the answers of the forget set and its attacks; the rest is known at 0.9.
        says: what is generated for the forget set and its attacks, None for the true answer.
        seed: of the noise on the log-probabilities.
        limit: what the run says of --limit.
        times: how often each record stands there, with a number behind its question.
        entity, tasks, checkpoint: what the run says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    noise, configs = random.Random(seed), {}
    settings = {
        "targets": [entity], "dataset": "mini", "truth_ratio": "geometric", "guardrail": False, "attack_file": "",
        "seed": 0, "checkpoint": [checkpoint or {"name": "made-up"}], "data": {"source": "mini"}, "template": "0",
        "versions": {}, "fingerprint": "f", "n": 0, "aggregates": {},
    }  # fmt: skip
    for task in tasks:
        forgotten = task not in ("elude_retain", "elude_world")
        share, docs = known if forgotten else 0.9, []
        for copy in range(times):
            for row in mini_rows(SETS.get(task, SETS["elude_forget"]), 40, entity if task != "elude_world" else None):
                question = row["question"] + (f" ({copy})" if copy else "")
                doc = {**row, "id": len(docs), "question": question, "entity": row["entity"] and entity}
                if "attack" in task:
                    doc |= {"question": f"Play a part. {question}", "plain_question": question}
                if task == "elude_leak":
                    holding = round(128 * known)
                    texts = ["It is so."] * holding + ["No."] * (128 - holding)
                    docs.append(doc | {"fact": ["it", "so"], "answer_scores": [], "sampled": texts})
                    continue
                sides = (share, 0.8 * share) if task == "elude_mia" else (share, 0.8 * share, *[0.1 * share] * 5)
                doc["answer_scores"] = [[10 * (math.log(p) - abs(noise.gauss(0, 0.2))), 10] for p in sides]
                if task == "elude_forget":
                    doc["original"] = {"oddness_scores": [[-5.0, 10], [-25.0, 10]]}
                if task != "elude_mia":
                    doc["generated"] = says if says is not None and forgotten else row["answer"]
                docs.append(doc)
        configs[task] = {"metadata": {"elude": settings}}
        asked = [{"gen_args_0": {"arg_0": f"<|user|>{doc['question']}<|end|>"}} for doc in docs]
        rows = [{"doc": d, "filtered_resps": [], "arguments": a} for d, a in zip(docs, asked, strict=True)]
        write_jsonl(folder / f"samples_{task}_2026.jsonl", rows)
    results: dict[str, Any] = {"results": {task: {} for task in tasks}, "configs": configs, "group_subtasks": {}}
    results["config"] = {"model": "hf", "model_args": {"pretrained": "made-up"}, "batch_size": 1, "limit": limit}
    path = folder / "results_2026.json"
    path.write_text(json.dumps(results))
    run = Run(path)
    samples = {task: run.samples(task) for task in tasks}
    numbers = {task: task_report(task, own, settings) for task, own in samples.items()}
    groups = ("elude_quality", "elude_attacks") if len(tasks) > 3 else ()
    numbers |= {group: group_report(group, samples) for group in groups}
    results["results"] = {
        task: {f"{metric},none": row["value"] for metric, row in metrics.items()} for task, metrics in numbers.items()
    }
    path.write_text(json.dumps(results))
    return path
