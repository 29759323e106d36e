"""Every workaround for lm-eval in one place, each with its reason and what would make it unnecessary.

Tried with 0.4.12, 0.4.13 and 0.5.0.dev1 (``make compat``). If an internal name
of lm-eval that is used here is missing, an error says so.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any

from lm_eval import evaluator_utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM, CachingLM
from lm_eval.api.task import ConfigurableTask
from lm_eval.utils import hash_string

from lm_eval_elude.errors import UserError
from lm_eval_elude.scoring.benchmark import Request
from lm_eval_elude.scoring.benchmarks import GROUPS
from lm_eval_elude.scoring.samples import Sample
from lm_eval_elude.scoring.settings import say_once

log = logging.getLogger("lm_eval.elude")


class Score(float):
    """A per-sample value as it is logged, with the sample behind it.

    The harness hands an aggregation nothing but the values that ``process_results`` returned; a float that carries its
    sample lets one value be formed of several. Unnecessary once aggregations receive documents.
    """

    sample: Sample | None

    def __new__(cls, value: float, sample: Sample | None = None) -> Score:
        score = super().__new__(cls, value)
        score.sample = sample
        return score


class Docs(list[dict[str, Any]]):
    """The documents of a task; the harness asks a data set for its ``features`` even where it is a plain list."""

    @property
    def features(self) -> dict[str, Any]:
        return self[0]


class Aggregation:
    """An aggregation with a standard error of its own.

    The harness knows standard errors of its own functions only and writes N/A for all others; :func:`_own_errors` makes
    it ask. Unnecessary once an aggregation may return its error.
    """

    def __init__(self, estimate: Callable[[list[Score]], Mapping[str, float]]) -> None:
        self.estimate = estimate

    def __call__(self, scores: list[Score]) -> float:
        return float(self.estimate(scores)["value"])

    def stderr(self, scores: list[Score]) -> float | str:
        """The standard error, as the harness writes one that is not known."""
        error = float(self.estimate(scores)["stderr"])
        return "N/A" if math.isnan(error) else error


def _own_errors() -> None:
    original = getattr(evaluator_utils, "stderr_for_metric", None)
    if original is None or hasattr(original, "_lm_eval_elude"):  # 0.5 forms a task's row in the task itself
        return

    @wraps(original)
    def stderr_for_metric(metric: Any, *args: Any, **kwargs: Any) -> Any:
        return metric.stderr if isinstance(metric, Aggregation) else original(metric, *args, **kwargs)

    stderr_for_metric._lm_eval_elude = True  # type: ignore[attr-defined]
    evaluator_utils.stderr_for_metric = stderr_for_metric


_own_errors()


def longest_answer() -> float:
    """How many tokens a model of transformers takes; any number where another backend is asked, or none is known."""
    evaluated = evaluated_model()
    known = hasattr(getattr(evaluated, "model", None), "named_parameters")
    return float(evaluated.max_length) if known and evaluated is not None else math.inf


def takes_messages(chat_template: Any) -> Callable[[str, str], Any] | None:
    """How a question and its system text are asked of a backend that writes prompts itself, None for any other.

    Such a backend is known by whose the harness's ``chat_template`` is, which ``--apply_chat_template`` hands over;
    UserError without that flag.
    """
    from lm_eval.models.openai_completions import LocalChatCompletion

    if chat_template is None and isinstance(evaluated_model(), LocalChatCompletion):
        raise UserError("a chat-completions backend takes messages and no prompts: add --apply_chat_template")

    def as_messages(question: str, system: str) -> Any:
        turns = [{"role": "system", "content": system}] if system else []
        return chat_template([*turns, {"role": "user", "content": question}])

    return as_messages if isinstance(getattr(chat_template, "__self__", None), LocalChatCompletion) else None


def as_text(arguments: tuple[Any, ...], renderer: Any) -> tuple[Any, ...]:
    """The arguments of a request with the prompt as the renderer writes it, where :func:`takes_messages` made it."""
    prompt, given = arguments
    if isinstance(prompt, str):
        return arguments
    turns = {turn["role"]: turn["content"] for turn in json.loads(prompt.prompt)}
    # A top_k that was not sent is None here, too: without the key transformers draws from the likeliest 50.
    return renderer.prompt(turns["user"], turns.get("system")), {"top_k": None, **given}


def refuse_twice(names: Sequence[str]) -> None:
    """Refuse tasks of ours that are asked for by themselves and in a group, before anything is loaded.

    The harness loads everything first, then names one task and no way out. Unnecessary once it takes each task once.
    The UserError says which names hold all that was asked for.
    """

    def leaves(name: str) -> set[str]:
        children = GROUPS[name].children if name in GROUPS else ()
        return {leaf for child in children for leaf in leaves(child)} or {name}

    held = {name: leaves(name) for name in names}
    twice = [task for task, count in Counter(chain.from_iterable(held.values())).items() if count > 1]
    if twice:
        enough = [name for name in held if not any(held[name] < other for other in held.values())]
        shown = ", ".join([*sorted(twice)[:3], "..."][: len(twice)])
        raise UserError(f"--tasks asks twice for {shown}, by name and in a group: give --tasks {','.join(enough)}")


def cache_key(*parts: Any) -> str:
    """What cached requests depend on: the harness keys them by task name alone (and the tokenizer with a template)."""
    return str(hash_string(json.dumps(parts, sort_keys=True)))[:16]


def _held_model() -> Any:
    """The model that is evaluated as the harness holds it, with --use_cache in its wrapper.

    The harness tells a task nothing about the model, so it is looked for among what the harness's functions that led
    here hold, under whatever name. Unnecessary once tasks are told.
    """
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    callers = [f for f in frames if str(f.f_globals.get("__name__")).startswith("lm_eval.")]
    held = (value for frame in callers for value in frame.f_locals.values())
    model = next((value for value in held if isinstance(value, (LM, CachingLM))), None)
    if model is None and callers:
        say_once("this lm-eval keeps its model where tasks cannot see it: whether it can score is not checked")
    return model


def evaluated_model() -> Any:
    """The model that is evaluated; None where it cannot be found, which is said, or outside the harness."""
    model = _held_model()
    return model.lm if isinstance(model, CachingLM) else model


def cache_beside(name: str) -> str | None:
    """Where what another model answers is kept beside --use_cache, a file for each process; None without that flag."""
    model = _held_model()
    if not isinstance(model, CachingLM):
        return None
    path = Path(model.cache_db).absolute()
    return str(path.with_name(f"{name}_rank{path.name.rpartition('_rank')[2]}"))


def check_backend() -> None:
    """Refuse a backend that cannot score answers before any request runs, and say where one loses precision.

    UserError where the backend has no log-probabilities of given answers.
    """
    if (model := evaluated_model()) is None:
        return
    if line := imprecise(model):
        say_once(line)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # it draws empty progress bars
            model.loglikelihood([])
    except NotImplementedError:
        name = type(model).__name__
        raise UserError(f"ELUDe needs log-probabilities of given answers, and the backend {name} has none") from None
    except Exception as error:  # an empty batch may trouble a backend that scores well
        log.debug("probe with an empty batch: %s", error)


def imprecise(model: Any) -> str:
    """What to say of a backend that forms log-probabilities in 16 bits, as stock ``hf`` does by default; else ""."""
    if not hasattr(model, "softmax_dtype"):
        return ""
    kind = model.softmax_dtype or model.mixed_precision_dtype or model.model.dtype
    if kind.itemsize > 2:
        return ""
    return (
        f"log-probabilities are formed in {str(kind).removeprefix('torch.')}, up to 0.1 nats a token off: "
        "add softmax_dtype=float32 to --model_args, or take --model elude"
    )


class HarnessTask(ConfigurableTask):
    """What every task of ours needs because of how the harness works."""

    @property
    def predict_only(self) -> bool:
        """``--predict_only`` swaps the metrics inside its own tasks for one named ``bypass``; others have to look."""
        if (metrics := getattr(self, "_metric_fn_list", None)) is None:  # 0.5
            metrics = [metric.name for scorer in self.scorers for metric in scorer.metrics or ()]
        return "bypass" in metrics

    def make_instances(
        self, doc: dict[str, Any], requests: Sequence[Request], target: str, kwargs: dict[str, Any]
    ) -> list[Instance]:
        """Requests as the harness wants them."""
        if "doc_id" in kwargs:  # 0.5; before, these stood in `metadata`, and the harness asked for the target
            kwargs = kwargs | {"task_name": self.config.task, "target": target}
        return [
            Instance(request_type=request.kind, doc=doc, arguments=request.arguments, idx=i, **kwargs)
            for i, request in enumerate(requests)
        ]

    def aggregate(self, bootstrap_iters: int | None = 100000) -> tuple[dict[str, Any], int]:
        """The row that lm-eval before 0.5 makes of ``aggregation``; 0.5 would bootstrap all but its own mean."""
        samples = list(self.scorers[0].reduced_docs.values())
        row: dict[str, Any] = {}
        for metric, function in self.aggregation().items():
            scores = [sample[metric] for sample in samples]
            row[f"{metric},none"] = function(scores)
            row[f"{metric}_stderr,none"] = function.stderr(scores) if bootstrap_iters else "N/A"
        return row, len(samples)
