"""What a model that never knew says of the same documents: from its results file, or by asking it.

``reference`` in ``--metadata`` names either. Its answers are put into the documents, so that they are logged and every
distance can be formed again from the log. A ``task`` here is a :class:`lm_eval_elude.tasks.questions.QuestionTask`.
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

from lm_eval_elude.errors import UserError, reason
from lm_eval_elude.scoring.benchmark import Request, split_context
from lm_eval_elude.scoring.logs import truth_ratios
from lm_eval_elude.scoring.metrics import Need
from lm_eval_elude.scoring.runs import Run
from lm_eval_elude.tasks import harness

log = logging.getLogger("lm_eval.elude")


class ReferenceRun:
    """A finished run of the reference on the same records."""

    gives: frozenset[Need] = frozenset({"truth ratios of a reference", "reference"})

    def __init__(self, run: Run) -> None:
        self.run = run

    def check(self, task: Any) -> None:
        """Find the answers to every document that is asked, before the first request runs.

        Raises:
            UserError: it was scored on other records.
        """
        rows = {(row["doc"].get("entity"), row["doc"]["question"]): row["doc"] for row in self.run.rows(task.task_name)}
        self.answers: dict[int, dict[str, Any]] = {}
        for doc in _asked(task):
            logged = rows.get((doc.get("entity"), doc["question"]))
            if logged is None or any(logged.get(key) != doc[key] for key in ("answer", "paraphrased_answer")):
                raise UserError(
                    f"reference {str(self.run.path)!r} was scored on other records than {task.task_name}: "
                    f"it lacks {doc['question'][:80]!r}"
                )
            self.answers[doc["id"]] = {key: logged[key] for key in ("answer_scores", "generated") if key in logged}

    def answer(self, task: Any) -> None:
        """Put its answers into the documents of a task."""
        for doc in _asked(task):
            doc["reference"] = self.answers[doc["id"]]


class ReferenceLog:
    """Truth ratios of a retained model, from a log of TOFU's evaluators."""

    gives: frozenset[Need] = frozenset({"truth ratios of a reference"})

    def __init__(self, path: Path, ratios: list[float]) -> None:
        self.path, self.ratios = path, ratios

    def check(self, task: Any) -> None:
        """Refuse a log of another number of questions.

        Raises:
            UserError: it is one.
        """
        if len(self.ratios) != len(task.docs):
            raise UserError(
                f"reference {str(self.path)!r} has {len(self.ratios)} questions, {task.task_name} {len(task.docs)}: "
                "it is of another split, or made with another tofu_evaluator"
            )

    def answer(self, task: Any) -> None:
        """Put the truth ratios into the documents of a task."""
        for doc, ratio in zip(task.docs, self.ratios, strict=True):
            doc["reference"] = {"truth_ratio_raw": ratio}


class ReferenceModel:
    """A model that is asked what the evaluated one was asked; it is loaded beside it, and kept for the run."""

    gives: frozenset[Need] = frozenset({"truth ratios of a reference", "reference", "reference model"})

    def __init__(self, name: str, metadata: Mapping[str, Any]) -> None:
        self.name = name
        self.dtype = str(metadata.get("dtype", ""))

    def check(self, task: Any) -> None:
        """Refuse a model that cannot be found, before the first request runs.

        Raises:
            UserError: it is none.
        """
        check_model("reference", self.name)

    def answer(self, task: Any) -> None:
        """Ask it everything that the documents of this run were asked, and score the two models' answers by both."""
        lm = _load(self.name, self.dtype)
        asked: dict[str, list[Instance]] = {}
        for request in task.instances:
            if len(request.args) == 2:  # what goes to a membership reference has a third argument
                asked.setdefault(request.request_type, []).append(replace(request, resps=[], filtered_resps={}))
        replies: dict[int, list[Any]] = {}
        for kind in asked:  # log-likelihoods stand before generations, as in the documents' own requests
            for request, reply in zip(asked[kind], getattr(lm, kind)(asked[kind]), strict=True):
                replies.setdefault(request.doc["id"], []).append(reply)
        docs = {doc["id"]: doc for doc in task.docs}
        for number, responses in replies.items():
            doc = docs[number]
            task.note_prompt_tokens(doc)
            doc["reference"] = {"answer_scores": [list(score) for score in task.answer_scores(doc, responses)]}
            if task.benchmark.generates:
                doc["reference"]["generated"] = responses[-1]
        evaluated = harness.evaluated_model()
        if evaluated is not None and any(metric.needs == "reference model" for metric in task.benchmark.metrics):
            texts = {
                request.doc["id"]: [request.resps[0], docs[request.doc["id"]]["reference"]["generated"]]
                for request in task.instances
                if request.request_type == "generate_until"
            }
            scored = [_scores(task, texts, model) for model in (evaluated, lm)]
            for number in texts:
                docs[number]["reference"]["divergence_scores"] = [score for side in scored for score in side[number]]


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


@lru_cache(maxsize=8)
def check_model(key: str, name: str) -> None:
    """Refuse a model of ``--metadata`` that cannot be loaded, at the price of its configuration.

    Raises:
        UserError: it cannot.
    """
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # a folder's files can be wrong in any way
        raise UserError(
            f"{key} {name!r} in --metadata is neither a results file nor a model that can be loaded ({reason(error)})"
        ) from None


def _asked(task: Any) -> list[dict[str, Any]]:
    """The documents of a task that are asked: a --limit, or other processes, take some away."""
    numbers = {request.doc["id"] for request in task.instances}
    return [doc for doc in task.docs if doc["id"] in numbers]


@lru_cache(maxsize=1)
def _load(name: str, dtype: str) -> Any:
    log.info("ELUDe: loading the reference %s", name)
    arguments = {"pretrained": name, **({"dtype": dtype} if dtype else {})}
    return get_model("elude").create_from_arg_obj(arguments, {"batch_size": 1})


def _scores(task: Any, texts: Mapping[int, Sequence[str]], model: Any) -> dict[int, list[list[float]]]:
    """By document: sum of log-probabilities and number of tokens of each text as its answer, under one model."""
    template = next(r for r in task.instances if r.request_type == "loglikelihood")
    requests: list[Instance] = []
    for request in (r for r in task.instances if r.request_type == "generate_until"):
        context, space = split_context(request.args[0])
        written = [space + task.renderer.answer(text) for text in texts[request.doc["id"]]]
        for continuation in [*written, space] if space else written:
            requests.append(replace(template, arguments=(context, continuation), doc=request.doc))
    counts = task.continuation_tokens([Request("loglikelihood", request.arguments) for request in requests])
    replies: dict[int, list[list[float]]] = {number: [] for number in texts}
    for request, (total, _), count in zip(requests, model.loglikelihood(requests), counts, strict=True):
        replies[request.doc["id"]].append([float(total), count])
    for number, answers in texts.items():
        space_total, space_count = replies[number].pop() if len(replies[number]) > len(answers) else (0.0, 0)
        replies[number] = [[total - space_total, n - space_count] for total, n in replies[number]]
    return replies
