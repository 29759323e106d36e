"""A random part of a submission scored again: whether a model gives these log-probabilities and texts.

Which documents are asked again is drawn from the hash of the submission, so that nobody chooses them after the fact.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
from pathlib import Path
from typing import NamedTuple

from lm_eval_elude import task_folder
from lm_eval_elude.board.submission import ATTACKS, Packed
from lm_eval_elude.board.verify import LEVELS, Verdict

SAME_TEXTS = 0.9  # share of generated texts that must be the same to the letter; batches and devices flip near ties


class Rescored(NamedTuple):
    """What came of asking again."""

    records: int  # documents asked again
    total: int  # documents of the run
    gap: float  # largest difference of an answer's mean log-probability (nats a token)
    same_texts: float  # share of generated texts that are the same, 1 where none was generated


def rescore(
    folder: Path, verdict: Verdict, model: str, *, backend: str = "elude", records: int = 50, tolerance: float = 0.02,
    data: str = "",
) -> Rescored:  # fmt: skip
    """Score a part of a verified submission again: raise the level of its verdict, or add a finding.

    Args:
        verdict: of :func:`~lm_eval_elude.board.verify.verify`, without findings.
        model: folder or Hub id, as ``pretrained``; nothing is loaded that the submission names.
        backend: lm-eval's name of the model class.
        records: how many documents, 0 for all.
        tolerance: of an answer's mean log-probability (nats a token).
        data: the data set, where the submission's is a path elsewhere.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    assert verdict.submission
    run, scored = Packed(folder), verdict.submission.scored
    documents = [(task, sample.doc_id) for task, samples in verdict.samples.items() for sample in samples]
    drawn = documents if not 0 < records < len(documents) else random.Random(verdict.digest).sample(documents, records)
    by_task = {task: sorted(number for name, number in drawn if name == task) for task, _ in sorted(drawn)}
    metadata = {
        "pretrained": model, "target": scored["targets"], "dataset": data or scored["dataset"],
        "truth_ratio": scored["truth_ratio"], "guardrail": scored["guardrail"], "attack_seed": scored["seed"],
        "attack_prompts": scored["attack_prompts"],
        "attack_file": str(folder / ATTACKS) if scored["attack_file"] else "",
    }  # fmt: skip
    with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
        results = simple_evaluate(
            model=backend, model_args={"pretrained": model}, tasks=list(by_task), samples=by_task, metadata=metadata,
            task_manager=TaskManager(include_path=task_folder(), include_defaults=False, metadata=metadata),
            log_samples=True, bootstrap_iters=0,
        )  # fmt: skip
    assert results is not None
    gaps: dict[str, float] = {}
    same = texts = 0
    for task, rows in results["samples"].items():
        submitted = {row["doc"]["id"]: row["doc"] for row in run.rows(task)}
        for row in rows:
            doc, before = row["doc"], submitted[row["doc"]["id"]]
            pairs = zip(doc["answer_scores"], before["answer_scores"], strict=True)
            gaps[f"{task}, row {doc['id'] + 1}"] = max(abs(a[0] / a[1] - b[0] / b[1]) for a, b in pairs)
            if "generated" in doc:
                texts += 1
                same += doc["generated"] == before["generated"]
    rescored = Rescored(len(gaps), len(documents), max(gaps.values()), same / texts if texts else 1.0)
    if len(gaps) != len(drawn):
        verdict.findings.append(f"rescored: {len(gaps)} of {len(drawn)} documents came back")
    if far := [(gap, where) for where, gap in gaps.items() if not gap <= tolerance]:
        gap, where = max(far)
        verdict.findings.append(
            f"rescored: {len(far)} of {len(gaps)} documents differ by more than {tolerance} nats a token, "
            f"most {where} ({gap:.3g})"
        )
    if rescored.same_texts < SAME_TEXTS:
        verdict.findings.append(
            f"rescored: {same} of {texts} generated texts are the same, {SAME_TEXTS:.0%} are needed"
        )
    if verdict.findings:
        verdict.level = ""
    elif verdict.level == LEVELS[0]:
        verdict.level = "reproduced" if len(drawn) == len(documents) else "rescored"
    return rescored
