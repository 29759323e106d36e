"""What other models say of the same documents: one that never knew (``reference``), and the ``original``.

``--metadata`` names them; a reference may also be a results file. What they say is put into the documents, so that it
is logged and every number can be formed again from the log. A ``task`` here is a
:class:`lm_eval_elude.tasks.questions.QuestionTask`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM

from lm_eval_elude.data import dataset
from lm_eval_elude.errors import UserError, reason
from lm_eval_elude.scoring.benchmark import ANSWERS, as_answers, less_end
from lm_eval_elude.scoring.likelihood import AnswerScore
from lm_eval_elude.scoring.logs import is_results, truth_ratios
from lm_eval_elude.scoring.metrics import Need
from lm_eval_elude.scoring.runs import Run
from lm_eval_elude.scoring.samples import same_answers
from lm_eval_elude.scoring.settings import model_renderer, provenance, weights_stamp
from lm_eval_elude.tasks import harness
from lm_eval_elude.text.chat import PLAIN
from lm_eval_elude.text.invented import invented_names, renamed
from lm_eval_elude.text.words import words

log = logging.getLogger("lm_eval.elude")


class ReferenceRun:
    """A finished run of the reference on the same records."""

    gives: frozenset[Need] = frozenset({"truth ratios of a reference", "reference"})

    def __init__(self, run: Run) -> None:
        self.run = run

    def check(self, task: Any) -> None:
        """Find the answers to every document that is asked, before the first request runs.

        UserError where it was scored on other records, or as another of TOFU's evaluators asks.
        """
        _same_evaluator(self.run.path, self.run.settings(task.task_name).get("evaluator"), task)
        asked = ("entity", "question", "answer")  # two records may share a question, and an answer
        rows: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in self.run.rows(task.task_name):
            rows.setdefault(tuple(row["doc"].get(key) for key in asked), []).append(row["doc"])
        self.answers: dict[int, dict[str, Any]] = {}
        for doc in _asked(task):
            alike = rows.get(tuple(doc.get(key) for key in asked), [])
            logged = next((other for other in alike if same_answers(other, doc)), None)
            if logged is None:
                raise UserError(
                    f"reference {str(self.run.path)!r} was scored on other records than {task.task_name}: "
                    f"it lacks {doc['question'][:80]!r}"
                )
            if task.benchmark.generates and task.benchmark.scores and logged.get("generated") is None:
                raise UserError(
                    f"reference {str(self.run.path)!r} has no generated answers to the questions of {task.task_name}; "
                    "name a run of lm-eval"
                )
            self.answers[doc["id"]] = {key: logged[key] for key in ANSWERS if key in logged}

    def answer(self, task: Any) -> None:
        """Put its answers into the documents of a task."""
        for doc in _asked(task):
            doc["reference"] = self.answers[doc["id"]]


class ReferenceLog:
    """Truth ratios of a retained model, from a log of TOFU's evaluators."""

    gives: frozenset[Need] = frozenset({"truth ratios of a reference"})

    def __init__(self, path: Path) -> None:
        self.path = path
        self.evaluator, self.ratios = truth_ratios(path)

    def check(self, task: Any) -> None:
        """Refuse a log of another evaluator or another number of questions with a ``UserError``."""
        asks = getattr(task.settings, "evaluator", None)
        # The released evaluator's log does not say in which of its two prompts it asked.
        same = self.evaluator == "released" and asks == "released-llama2"
        _same_evaluator(self.path, asks if same else self.evaluator, task)
        if len(self.ratios) != len(task.docs):
            raise UserError(
                f"reference {str(self.path)!r} has {len(self.ratios)} questions, {task.task_name} {len(task.docs)}: "
                "it is of another split"
            )

    def answer(self, task: Any) -> None:
        """Put the truth ratios into the documents of a task."""
        for doc, ratio in zip(task.docs, self.ratios, strict=True):
            doc["reference"] = {"truth_ratio_raw": ratio}


class _AskedModel:
    """A model that is loaded beside the evaluated one, and kept for the run; ``key`` of ``--metadata`` names it."""

    key: str
    others = "not"  # what else its name may be of, before "a model"
    instead = ""  # what to name in its place where it cannot be asked

    def __init__(self, name: str, metadata: Mapping[str, Any]) -> None:
        self.name = name
        self.dtype = str(metadata.get("dtype", ""))

    def check(self, task: Any) -> None:
        """Refuse a model that cannot be asked with a UserError, before the first request runs.

        It cannot be found (:func:`check_model`), or reads what is asked as other tokens than the evaluated model, whose
        prompts it gets and by whose tokens its answers are counted.
        """
        named = f"{self.key} {self.name!r} in --metadata"
        check_model(self.name, f"{named} is {self.others}")
        texts = ["".join(part for part in r.args[:2] if isinstance(part, str)) for r in task.instances]
        own = model_renderer({"pretrained": self.name}, PLAIN)  # a wording, as its template is not asked
        if own.encode_batch(texts) != task.renderer.encode_batch(texts):
            raise UserError(f"{named} has another tokenizer than the evaluated model{self.instead}")


class ReferenceModel(_AskedModel):
    """A model that never knew, and is asked what the evaluated one was asked."""

    key = "reference"
    others = "neither a results file nor"
    instead = ": give its results file instead"
    gives: frozenset[Need] = frozenset({"truth ratios of a reference", "reference", "reference model"})

    def answer(self, task: Any) -> None:
        """Ask it everything that the documents of this run were asked, and score the two models' answers by both."""
        lm = _load(self.name, self.dtype)
        asked: dict[str, list[Instance]] = {}
        for request in task.instances:
            if len(request.args) == 2:  # what goes to a membership reference has a third argument
                again = _again(request, harness.as_text(request.args, task.renderer))
                asked.setdefault(request.request_type, []).append(again)
        replies: dict[int, list[Any]] = {}
        for kind in asked:  # log-likelihoods stand before generations, as in the documents' own requests
            for request, reply in zip(asked[kind], getattr(lm, kind)(asked[kind]), strict=True):
                replies.setdefault(request.doc["id"], []).append(reply)
        docs = {doc["id"]: doc for doc in task.docs}
        for number, responses in replies.items():
            doc = docs[number]
            doc["reference"] = task.answers(doc, responses)
        evaluated = harness.evaluated_model()
        if evaluated is not None and any(metric.needs == "reference model" for metric in task.benchmark.metrics):
            given = _generations(task)
            texts = [[r.resps[0], docs[r.doc["id"]]["reference"]["generated"]] for r in given]
            scored = [_scores(task, given, texts, model) for model in (evaluated, lm)]
            for request, *sides in zip(given, *scored, strict=True):
                docs[request.doc["id"]]["reference"]["divergence_scores"] = [s for side in sides for s in side]


class OriginalModel(_AskedModel):
    """The model before it was made to forget: how fluent it finds each answer, about a person whom it does not know."""

    key = "original"
    gives: frozenset[Need] = frozenset({"original"})

    def answer(self, task: Any) -> None:
        """Ask it each question with an invented name in the target's place, and score its answer and the given one."""
        lm = _load(self.name, self.dtype)
        targets = {t.name: t for t in dataset.resolve_targets(task.settings.dataset, task.settings.targets)}
        docs = {doc["id"]: doc for doc in task.docs}
        given, asked, answers = _generations(task), [], []
        for request in given:
            doc = docs[request.doc["id"]]
            target, name = targets[doc["entity"]], _invented_name(doc, task.settings.seed)
            about_name = partial(renamed, of=target.name, to=name, aliases=target.aliases)
            asked.append(_again(request, (about_name(request.args[0]), *request.args[1:])))
            answers.append(about_name(request.resps[0]))
            doc["original"] = {"invented_name": name}
        texts = [list(pair) for pair in zip(lm.generate_until(asked), answers, strict=True)]
        for request, (fluent, _), scores in zip(asked, texts, _scores(task, asked, texts, lm), strict=True):
            docs[request.doc["id"]]["original"] |= {"generated": fluent, "oddness_scores": scores}


def _invented_name(doc: Mapping[str, Any], seed: int) -> str:
    """An invented name without a word of the target's, the same for a record whichever others are asked."""
    names = invented_names(" ".join((doc["question"], doc["answer"])))
    suitable = [name for name in names if not words(name) & words(doc["entity"])]
    return random.Random(f"{seed}/oddness/{doc['question']}").choice(suitable)


OtherModel = ReferenceRun | ReferenceLog | ReferenceModel | OriginalModel


def find_reference(task: Any, metadata: Mapping[str, Any]) -> OtherModel | None:
    """The reference that the settings name, None where there is none or it says nothing of this task."""
    name = task.settings.reference
    if not name:
        return None
    path = Path(name)
    if path.is_file() and not is_results(path):
        return ReferenceLog(path)
    if path.is_file() or (path.is_dir() and not (path / "config.json").is_file()):
        run = Run(path)
        if task.task_name in run.tasks:
            return ReferenceRun(run)
        log.warning("ELUDe: the reference %s has no %s: no distance to it there", name, task.task_name)
        return None
    return ReferenceModel(name, metadata)


@lru_cache(maxsize=8)
def check_model(name: str, line: str) -> None:
    """Refuse with a UserError that begins with ``line`` a model whose configuration cannot be loaded."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # a folder's files can be wrong in any way
        raise UserError(f"{line} a model that can be loaded ({reason(error)})") from None


def _same_evaluator(path: Path, evaluator: str | None, task: Any) -> None:
    """Refuse with a ``UserError`` a reference that was asked as another of TOFU's evaluators asks."""
    asks = getattr(task.settings, "evaluator", None)
    if evaluator != asks:
        raise UserError(
            f"reference {str(path)!r} was made with tofu_evaluator {evaluator}, and {task.task_name} asks as {asks}: "
            "their p-values are not comparable"
        )


def _asked(task: Any) -> list[dict[str, Any]]:
    """The documents of a task that are asked: a --limit, or other processes, take some away."""
    numbers = {request.doc["id"] for request in task.instances}
    return [doc for doc in task.docs if doc["id"] in numbers]


def _load(name: str, dtype: str) -> Any:
    """A model beside the evaluated one; with --use_cache its answers are kept there for the next checkpoint, too."""
    arguments: dict[str, Any] = {"pretrained": name, **({"dtype": dtype} if dtype else {})}
    # The harness's keys hold no model, and no type of its weights: the file's name does.
    cache = harness.cache_beside(f"beside_{harness.cache_key(provenance(arguments), dtype)}")
    evaluated = harness.evaluated_model()
    placed = getattr(getattr(evaluated, "model", None), "hf_device_map", None) or {}
    if len(set(placed.values())) > 1:  # it needed more than one device, and so does this one
        arguments["parallelize"] = True
    elif device := getattr(evaluated, "device", None):
        arguments["device"] = str(device)
    return _loaded(tuple(arguments.items()), cache, weights_stamp(Path(name)))


@lru_cache(maxsize=2)  # a reference and an original
def _loaded(arguments: tuple[tuple[str, Any], ...], cache: str | None, weights: tuple[Any, ...]) -> Any:
    log.info("ELUDe: loading %s beside the evaluated model", dict(arguments)["pretrained"])
    backend = import_module("lm_eval_elude.model.backend")  # lm-eval knows its class by our hook alone
    model = backend.EludeLM.create_from_arg_obj(dict(arguments), {"batch_size": 1})
    return CachingLM(model, cache) if cache else model


def _again(request: Instance, arguments: tuple[Any, ...]) -> Instance:
    """A request for another model, with arguments of its own."""
    return replace(request, arguments=arguments, resps=[], filtered_resps={})


def _generations(task: Any) -> list[Instance]:
    return [request for request in task.instances if request.request_type == "generate_until"]


def _scores(
    task: Any, asked: Sequence[Instance], texts: Sequence[Sequence[str]], model: Any
) -> list[list[AnswerScore]]:
    """Scores of each text as answer to a request's prompt, under one model; ``texts`` are by request of ``asked``."""
    template = next(r for r in task.instances if r.request_type == "loglikelihood")
    requests = [
        replace(template, arguments=pair, doc=request.doc)
        for request, answers in zip(asked, texts, strict=True)
        for pair in as_answers(answers, request.args[0], task.renderer)
    ]
    counts = task.continuation_tokens([request.args for request in requests])
    replies = (AnswerScore(float(r[0]), n) for r, n in zip(model.loglikelihood(requests), counts, strict=True))
    return [less_end(replies, len(answers), task.renderer.end_is_asked) for answers in texts]
