"""Logs of TOFU's evaluators: the truth ratios of a retained model, and a released log read as a run."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from lm_eval_elude.data import jsonio
from lm_eval_elude.errors import UserError
from lm_eval_elude.scoring.likelihood import AnswerScore, truth_ratio
from lm_eval_elude.scoring.runs import Run

# The set's log within eval_log_aggregated.json, by the task that asks the same questions.
RELEASED = {
    "tofu_forget": "eval_log_forget.json",
    "tofu_retain": "eval_log.json",
    "tofu_real_authors": "eval_real_author_wo_options.json",
    "tofu_world_facts": "eval_real_world_wo_options.json",
}
# A question as the released evaluator logs it, within its prompt.
_PROMPT = re.compile(r"(?:Question: |\[INST\] )(.*?)(?:\s*Answer:| \[/INST\]|\n)\s*", re.DOTALL)


class ReleasedRun(Run):
    """A log of the released evaluator (``eval_log_aggregated.json``) read as a run of TOFU's tasks.

    It has the losses and the greedy answers, but neither the paraphrases nor the texts of the wrong answers. UserError
    where it is no such log, or a set in it lacks values.
    """

    def __init__(self, path: Path, log: Mapping[str, Any]) -> None:
        self.path, self.log = path, log
        self.tasks = [task for task, name in RELEASED.items() if isinstance(self.log.get(name), dict)]
        if not self.tasks:
            raise UserError(f"{path}: no log of TOFU's released evaluator ({', '.join(RELEASED.values())})")
        groups = ("tofu",) if len(self.tasks) == len(RELEASED) else ()
        self.results = {"results": {name: {} for name in (*self.tasks, *groups)}, "configs": {}}
        self._samples, self._asked = {}, dict[str, str]()

    def settings(self, task: str) -> dict[str, Any]:
        """What is known of any such log."""
        if task not in self._asked:
            questions = json.dumps(sorted(row["doc"]["question"] for row in self.rows(task)))
            self._asked[task] = hashlib.sha256(questions.encode()).hexdigest()[:16]
        known = {"targets": [], "truth_ratio": "geometric", "evaluator": "released", "seed": 0}
        return known | {"questions": self._asked[task]}

    def sample_file(self, task: str) -> Path:
        return self.path

    def rows(self, task: str) -> list[dict[str, Any]]:
        """The questions of a set as rows of ours."""
        log, where = self.log[RELEASED[task]], f"{self.path}: {RELEASED[task]}"
        columns = {key: jsonio.check(log.get(key), kind, f"{where}, {key}") for key, kind in _COLUMNS.items()}
        first = columns["generated_text"]
        if odd := [key for key, column in columns.items() if column.keys() != first.keys()]:
            raise UserError(f"{where}: generated_text and {odd[0]} are of different questions")
        if not first or not all(index.isdecimal() for index in first):
            raise UserError(f"{where}: generated_text is not a table by question number")
        rows = []
        for index in sorted(first, key=int):
            asked, generated, answer = columns["generated_text"][index]
            losses = [columns["gt_loss"][index], columns["paraphrased_loss"][index], *columns["perturb_loss"][index]]
            counts = [
                columns["num_token_gt"][index], columns["num_token_paraphrased"][index],
                *columns["num_token_perturb"][index],
            ]  # fmt: skip
            if len(losses) != len(counts) or len(losses) < 3 or not all(map(math.isfinite, losses)) or min(counts) < 1:
                raise UserError(f"{where}: question {index} lacks a loss or a number of tokens")
            prompt = _PROMPT.fullmatch(asked)
            doc = {"id": int(index), "question": prompt[1] if prompt else asked, "answer": answer}
            doc |= {"generated": generated, "perturbed_answer": [""] * (len(losses) - 2)}
            doc["answer_scores"] = [[-loss, count] for loss, count in zip(losses, counts, strict=True)]
            rows.append({"doc": doc, "filtered_resps": [], "arguments": {"gen_args_0": {"arg_0": asked}}})
        return rows


# What is read of a set's log, by question number: losses are sums over the tokens of an answer, in nats.
_COLUMNS: dict[str, Any] = {
    "generated_text": dict[str, tuple[str, str, str]],  # prompt, greedy answer, true answer
    "gt_loss": dict[str, float], "paraphrased_loss": dict[str, float], "perturb_loss": dict[str, list[float]],
    "num_token_gt": dict[str, int], "num_token_paraphrased": dict[str, int], "num_token_perturb": dict[str, list[int]],
}  # fmt: skip


def is_results(path: Path) -> bool:
    """Whether a file is one of lm-eval's results, whatever its name is (``--output_path FILE.json``)."""
    if path.name.startswith("results_"):
        return True
    log = jsonio.load(path)
    return isinstance(log, dict) and {"results", "configs"} <= log.keys()


def open_run(path: Path, *, utility: bool = False) -> Run:
    """A run of ours, or a released log, whichever the file is."""
    log = {} if path.name.startswith("results_") else jsonio.load(path)
    if isinstance(log, dict) and not log.keys().isdisjoint(RELEASED.values()):
        return ReleasedRun(path, log)
    return Run(path, utility=utility)


# ---- a retained model


def truth_ratios(path: Path) -> tuple[str, list[float]]:
    """Whose log it is (``released`` or ``open-unlearning``), and R of each forget question in the order of the data.

    R is that of the wrong answers over the paraphrase. The file is ``eval_log_aggregated.json`` of the released
    evaluator, or open-unlearning's ``TOFU_EVAL.json``. UserError where it is neither, or a value is missing or no
    number.
    """
    log = jsonio.load(path)
    tables = log if isinstance(log, dict) else {}
    evaluator = "released"
    if isinstance(released := tables.get("eval_log_forget.json"), dict):
        right, wrong = (jsonio.check(released.get(key), kind, f"{path}: {key}") for key, kind in _LOSSES.items())
        if right.keys() != wrong.keys():
            raise UserError(f"{path}: {' and '.join(_LOSSES)} are of different questions")
        scores = {i: [AnswerScore(-loss, 1) for loss in (right[i], *(wrong[i] or [math.nan]))] for i in right}
        ratios = {i: truth_ratio(paraphrase, others) for i, (paraphrase, *others) in scores.items()}
    elif isinstance(other := tables.get("forget_truth_ratio"), dict):
        evaluator = "open-unlearning"
        table = jsonio.check(other.get("value_by_index"), dict[str, _Scored | float], f"{path}: value_by_index")
        ratios = {i: value["score"] if isinstance(value, dict) else value for i, value in table.items()}
    else:
        raise UserError(f"{path}: no log of TOFU's evaluators (eval_log_forget.json or forget_truth_ratio)")
    if odd := [f"{i} has {ratio!r}" for i, ratio in ratios.items() if not math.isfinite(ratio)]:
        raise UserError(f"{path}: question {odd[0]} where a number is needed")
    if {*ratios} != {*map(str, range(len(ratios)))}:
        raise UserError(f"{path}: the questions are not numbered from 0 to {len(ratios) - 1}")
    return evaluator, [ratios[str(i)] for i in range(len(ratios))]


_LOSSES: dict[str, Any] = {"avg_paraphrased_loss": dict[str, float], "average_perturb_loss": dict[str, list[float]]}


class _Scored(TypedDict):
    score: float
