"""What a model that never knew says of the same documents: from its results file, or by asking it.

``reference`` in ``--metadata`` names either. What it says is put into the documents, so that it is logged and every
distance can be formed again from the log. A ``task`` here is a :class:`lm_eval_elude.tasks.base.QuestionTask`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from lm_eval_elude import harness
from lm_eval_elude.core.records import DataError
from lm_eval_elude.results.logs import truth_ratios
from lm_eval_elude.results.runs import Run

log = logging.getLogger("lm_eval.elude")


class ReferenceRun:
    """A finished run of the reference on the same records."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def metrics(self, task: Any) -> dict[str, bool | None]:
        """The metrics that it allows, with their directions."""
        return {name: up for name, up in task.gaps.items() if name != "reference_divergence"}

    def tell(self, task: Any) -> None:
        """Put what it says into the documents of a task.

        Raises:
            DataError: it was scored on other records.
        """
        rows = {(row["doc"].get("entity"), row["doc"]["question"]): row["doc"] for row in self.run.rows(task.task_name)}
        asked = {request.doc["id"] for request in task.instances}  # a --limit, or other processes, take some away
        for doc in (doc for doc in task.docs if doc["id"] in asked):
            said = rows.get((doc.get("entity"), doc["question"]))
            if said is None or any(said.get(key) != doc[key] for key in ("answer", "paraphrased_answer")):
                raise DataError(
                    f"reference {str(self.run.path)!r} was scored on other records than {task.task_name}: "
                    f"it lacks {doc['question'][:80]!r}"
                )
            doc["reference"] = {key: said[key] for key in ("answer_scores", "generated") if key in said}


class ReferenceLog:
    """Truth ratios of a retained model, from a log of TOFU's evaluators."""

    def __init__(self, path: Path, ratios: list[float]) -> None:
        self.path, self.ratios = path, ratios

    def metrics(self, task: Any) -> dict[str, bool | None]:
        return {name: up for name, up in task.gaps.items() if name == "ks_p_value"}

    def tell(self, task: Any) -> None:
        """Put the truth ratios into the documents of a task.

        Raises:
            DataError: the log is of another number of questions.
        """
        if len(self.ratios) != len(task.docs):
            raise DataError(
                f"reference {str(self.path)!r} has {len(self.ratios)} questions, {task.task_name} {len(task.docs)}: "
                "it is of another split, or made with another tofu_evaluator"
            )
        for doc, ratio in zip(task.docs, self.ratios, strict=True):
            doc["reference"] = {"truth_ratio_raw": ratio}


class ReferenceModel:
    """A model that is asked what the evaluated one was asked; it is loaded beside it, and kept for the run."""

    def __init__(self, name: str, metadata: Mapping[str, Any]) -> None:
        self.name = name
        self.arguments = {key: metadata[key] for key in ("dtype", "trust_remote_code") if key in metadata}

    def metrics(self, task: Any) -> dict[str, bool | None]:
        return dict(task.gaps)

    def tell(self, task: Any) -> None:
        """Ask it everything that the documents of this run were asked, and score the two models' answers by both."""
        lm = _load(self.name, tuple(sorted(self.arguments.items())))
        asked: dict[str, list[Instance]] = {}
        for request in task.instances:
            if len(request.args) == 2:  # what goes to a membership reference has a third argument
                asked.setdefault(request.request_type, []).append(replace(request, resps=[], filtered_resps={}))
        replies: dict[int, list[Any]] = {}
        for kind in asked:  # log-likelihoods stand before generations, as in the documents' own requests
            for request, reply in zip(asked[kind], getattr(lm, kind)(asked[kind]), strict=True):
                replies.setdefault(request.doc["id"], []).append(reply)
        docs = {doc["id"]: doc for doc in task.docs}
        for number, said in replies.items():
            scores = task.answer_scores(docs[number], said)
            docs[number]["reference"] = {"answer_scores": [list(score) for score in scores]}
            if task.generates:
                docs[number]["reference"]["generated"] = said[-1]
        own = harness.evaluated_model()
        if "reference_divergence" in task.gaps and own is not None:
            texts = {
                request.doc["id"]: [request.resps[0], docs[request.doc["id"]]["reference"]["generated"]]
                for request in task.instances
                if request.request_type == "generate_until"
            }
            scored = [_scores(task, texts, model) for model in (own, lm)]
            for number in texts:
                docs[number]["reference"]["divergence_scores"] = [s for side in scored for s in side[number]]


Reference = ReferenceRun | ReferenceLog | ReferenceModel


def find_reference(task: Any, metadata: Mapping[str, Any]) -> Reference | None:
    """The reference that the settings name, None where there is none or it says nothing of this task."""
    name = task.settings.reference
    if not name:
        return None
    path = Path(name).expanduser()
    if path.is_file() and not path.name.startswith("results_"):
        return ReferenceLog(path, truth_ratios(path))
    if path.is_file() or (path.is_dir() and not (path / "config.json").is_file()):
        run = Run(path)
        if task.task_name in run.tasks:
            return ReferenceRun(run)
        log.warning("ELUDe: the reference %s has no %s: no distance to it there", name, task.task_name)
        return None
    return ReferenceModel(name, metadata)


@lru_cache(maxsize=1)
def _load(name: str, arguments: tuple[tuple[str, Any], ...]) -> Any:
    log.info("ELUDe: loading the reference %s", name)
    return get_model("elude").create_from_arg_obj({"pretrained": name, **dict(arguments)}, {"batch_size": 1})


def _scores(task: Any, texts: Mapping[int, Sequence[str]], model: Any) -> dict[int, list[list[float]]]:
    """By document: sum of log-probabilities and number of tokens of each text as its answer, under one model."""
    requests, counts = [], []
    template = next(r for r in task.instances if r.request_type == "loglikelihood")
    for request in task.instances:
        if request.request_type == "generate_until":
            context, space = harness.split_context(request.args[0])
            written = [space + task.renderer.answer(text) for text in texts[request.doc["id"]]]
            for continuation in [*written, space] if space else written:
                requests.append(replace(template, arguments=(context, continuation), doc=request.doc))
                counts.append(len(task.renderer.encode(context + continuation)) - len(task.renderer.encode(context)))
    replies: dict[int, list[list[float]]] = {number: [] for number in texts}
    for request, (total, _), count in zip(requests, model.loglikelihood(requests), counts, strict=True):
        replies[request.doc["id"]].append([float(total), count])
    for number, answers in texts.items():
        space_total, space_count = replies[number].pop() if len(replies[number]) > len(answers) else (0.0, 0)
        replies[number] = [[total - space_total, n - space_count] for total, n in replies[number]]
    return replies
