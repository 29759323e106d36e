"""A random part of a submission scored again: whether a model gives these log-probabilities and texts.

Which documents are asked again is drawn from the hash of the submission, so that nobody chooses them after the fact.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_elude import task_folder
from lm_eval_elude.board.submission import Packed
from lm_eval_elude.board.verify import Verdict

SAME_TEXTS = 0.9  # share of generated texts that must be the same to the letter; batches and devices flip near ties


class Rescored(NamedTuple):
    """What came of asking again.

    Attributes:
        records: documents asked again, of ``total``.
        gap: largest difference of an answer's mean log-probability (nats a token).
        same_texts: share of generated texts that are the same, 1 where none was generated or all are withheld.
    """

    records: int
    total: int
    gap: float
    same_texts: float


def rescore(
    folder: Path, verdict: Verdict, model: str, *, backend: str = "elude", records: int = 50, tolerance: float = 0.02,
    data: str = "", device: str = "",
) -> Rescored:  # fmt: skip
    """Score a part of a verified submission again and add what comes of it to its verdict.

    Args:
        folder: of the submission.
        verdict: of :func:`~lm_eval_elude.board.verify.verify`, without findings; its level is raised, or it gets one.
        model: folder or Hub id, as ``pretrained``; only what the verifier names is loaded.
        backend: lm-eval's name of the model class.
        records: how many documents, 0 for all.
        tolerance: of an answer's mean log-probability (nats a token).
        data: the data set, where the submission's is a path elsewhere.
        device: as lm-eval takes it, its own choice where it is not given.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    run, scored = Packed(folder), (verdict.submission and verdict.submission.scored) or {}
    every = [(task, sample.doc_id) for task, samples in verdict.samples.items() for sample in samples]
    chosen = every if not 0 < records < len(every) else random.Random(verdict.digest).sample(every, records)
    asked: dict[str, list[int]] = {}
    for task, number in sorted(chosen):
        asked.setdefault(task, []).append(number)
    metadata = {
        "pretrained": model, "target": scored["targets"], "dataset": data or scored["dataset"],
        "truth_ratio": scored["truth_ratio"], "guardrail": scored["guardrail"], "attack_seed": scored["seed"],
        "attack_prompts": scored["attack_prompts"],
        "attack_file": str(folder / "attacks.jsonl") if scored["attack_file"] else "",
    }  # fmt: skip
    with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
        results = simple_evaluate(
            model=backend, model_args={"pretrained": model}, tasks=list(asked), samples=asked, metadata=metadata,
            task_manager=TaskManager(include_path=task_folder(), include_defaults=False, metadata=metadata),
            log_samples=True, device=device or None, bootstrap_iters=0,
        )  # fmt: skip
    assert results is not None
    gaps: dict[str, float] = {}
    same = texts = 0
    for task, rows in results["samples"].items():
        before = {row["doc"]["id"]: row["doc"] for row in run.rows(task)}
        for row in rows:
            now, old = row["doc"], before[row["doc"]["id"]]
            gaps[f"{task}, row {now['id'] + 1}"] = _gap(now, old)
            if "generated" in now and not run.redacted:
                texts += 1
                same += now["generated"] == old["generated"]
    found = Rescored(len(gaps), len(every), max(gaps.values()), same / texts if texts else 1.0)
    if len(gaps) != len(chosen):
        verdict.findings.append(f"rescored: {len(gaps)} of {len(chosen)} documents came back")
    if off := [(gap, where) for where, gap in gaps.items() if not gap <= tolerance]:
        gap, where = max(off)
        verdict.findings.append(
            f"rescored: {len(off)} of {len(gaps)} documents differ by more than {tolerance} nats a token, "
            f"most {where} ({gap:.3g})"
        )
    if found.same_texts < SAME_TEXTS:
        verdict.findings.append(
            f"rescored: {same} of {texts} generated texts are the same, {SAME_TEXTS:.0%} are needed"
        )
    if verdict.findings:
        verdict.level = ""
    elif verdict.level == "recomputed":
        verdict.level = "reproduced" if len(chosen) == len(every) else "rescored"
    return found


def _gap(now: Mapping[str, Any], old: Mapping[str, Any]) -> float:
    """Largest difference of an answer's mean log-probability (nats a token)."""
    pairs = zip(now["answer_scores"], old["answer_scores"], strict=True)
    return max(abs(a[0] / a[1] - b[0] / b[1]) for a, b in pairs)
