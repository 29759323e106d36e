"""The tasks and groups as lm-eval runs them, and every workaround for lm-eval with its reason.

Tried with lm-eval 0.4.12 and 0.4.13 (``make compat``). What is asked, logged and measured stands in a
:class:`~lm_eval_elude.tasks.task.Task`.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial, wraps
from typing import Any

from lm_eval import evaluator_utils
from lm_eval.api.group import Group
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.openai_completions import LocalChatCompletion
from lm_eval.utils import hash_string

from lm_eval_elude.errors import UserError
from lm_eval_elude.metrics.estimates import Estimate
from lm_eval_elude.metrics.samples import Numbers, Sample, for_each_target
from lm_eval_elude.metrics.table import METRICS
from lm_eval_elude.tasks import GROUPS, TASKS, group_numbers
from lm_eval_elude.tasks.running import MODEL, TEMPLATE, say_once
from lm_eval_elude.tasks.settings import identity, model_renderer, provenance
from lm_eval_elude.tasks.task import NothingToAskError
from lm_eval_elude.text.chat import Renderer

log = logging.getLogger("lm_eval.elude")
VERSION = 3.0  # of prompts and numbers


class Score(float):
    """A value of a sample with the sample: the harness hands an aggregation nothing but these values."""

    sample: Sample

    def __new__(cls, value: float, sample: Sample) -> Score:
        score = super().__new__(cls, value)
        score.sample = sample
        return score

    def __getnewargs__(self) -> tuple[float, Sample]:  # type: ignore[override]  # ranks send each other their scores
        return float(self), self.sample


class Docs(list[dict[str, Any]]):
    """Documents; the harness asks a data set for its ``features`` even where it is a plain list."""

    @property
    def features(self) -> dict[str, Any]:
        return self[0]


class Aggregation:
    """An aggregation with a standard error of its own; the harness knows those of its own functions only."""

    def __init__(self, estimate: Callable[[list[Score]], Estimate]) -> None:
        self.estimate = estimate

    def __call__(self, scores: list[Score]) -> float:
        return self.estimate(scores).value

    def stderr(self, scores: list[Score]) -> float | str:
        """The standard error, as the harness writes one that is not known."""
        error = self.estimate(scores).stderr
        return "N/A" if math.isnan(error) else error


def _ask_aggregations_for_errors() -> None:
    original = getattr(evaluator_utils, "stderr_for_metric", None)
    if original is None or hasattr(original, "_lm_eval_elude"):  # 0.5 forms a task's row in the task itself
        return

    @wraps(original)
    def stderr_for_metric(metric: Any, *args: Any, **kwargs: Any) -> Any:
        return metric.stderr if isinstance(metric, Aggregation) else original(metric, *args, **kwargs)

    stderr_for_metric._lm_eval_elude = True  # type: ignore[attr-defined]
    evaluator_utils.stderr_for_metric = stderr_for_metric


_ask_aggregations_for_errors()


def scores_answers(model: Any) -> bool:
    """Whether a backend gives log-probabilities of given answers; chat APIs do not."""
    try:
        model.loglikelihood([])
    except NotImplementedError:
        return False
    except Exception as error:  # an empty batch may trouble a backend that scores well, or there is no model to ask
        log.debug("probe with an empty batch: %r", error)
    return True


def imprecise(model: Any) -> str:
    """What to say of a backend that forms log-probabilities in 16 bits, as stock ``hf`` does by default; else ""."""
    if not hasattr(model, "softmax_dtype"):
        return ""
    kind = model.softmax_dtype or getattr(model, "mixed_precision_dtype", None) or model.model.dtype
    if kind.itemsize > 2:
        return ""
    return (
        f"log-probabilities are formed in {str(kind).removeprefix('torch.')}, up to 0.1 nats a token off: add "
        "softmax_dtype=float32 to --model_args, or take --model elude"
    )


def name_in(config: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """The task or group that a YAML names; UserError for another name around a class of ours."""
    if config["task"] not in known:
        raise UserError(f"a YAML with a class of ELUDe's has `task: {config['task']}`, none of: {', '.join(known)}")
    return str(config["task"])


class EludeTask(ConfigurableTask):
    """The task of :data:`~lm_eval_elude.tasks.TASKS` that the YAML names."""

    VERSION = VERSION

    def __init__(self, config: dict[str, Any]) -> None:
        self.metadata = metadata = dict(config.get("metadata") or {})
        self.name = name_in(config, TASKS)
        self.asked = asked = TASKS[self.name]
        self.settings = asked.resolve(metadata)
        self.renderer = self._renderer()
        self.documents = Docs(asked.docs(self.settings))
        if prepare := asked.prepare:
            self.documents = Docs(prepare(doc, self.settings, self.renderer) for doc in self.documents)
        self.samples: list[Sample] = []  # those behind the last numbers
        self.numbers: Numbers = {}
        self.scored: dict[str, Any] = {
            **asdict(self.settings),
            **provenance(metadata),
            "data": self.settings.describe(),
            "template": self.renderer.fingerprint,
        }
        super().__init__(
            config={
                "task": self.name,
                "metadata": {**metadata, "elude": self.scored},
                "test_split": "test",
                "doc_to_text": "question",
                "doc_to_target": "answer",
                "output_type": "generate_until" if asked.generated else "loglikelihood",
                "generation_kwargs": self._generation() if asked.generated else None,
                "process_results": __name__,
                "metric_list": [
                    {"metric": name, "aggregation": "mean", "higher_is_better": better}
                    for name, better in self.higher_is_better().items()
                ],
            }
        )

    def _generation(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"until": self.renderer.stop, "do_sample": False}
        if self.asked.generated > 1:
            kwargs |= {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
        return kwargs

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.dataset = {"test": self.documents}

    # ---- requests
    def build_all_requests(self, *, tokenizer_name: str = "", **kwargs: Any) -> None:
        if self.config.num_fewshot:
            raise UserError(f"{self.name} asks without examples: --num_fewshot must be 0")
        model = MODEL.get()
        if TEMPLATE.get():
            self._take_template()
        self._check_run(model)
        if self.renderer.remark:
            say_once(self.renderer.remark)
        self.has_scores = self.asked.questions is not None and scores_answers(model)
        self.has_tokens = self.has_scores and self.asked.token_scores and hasattr(model, "token_logprobs")
        if self.asked.questions and not self.has_scores:
            if not self.asked.generated:
                raise UserError(f"{self.name} needs log-probabilities of given answers, and this backend has none")
            say_once("this backend has no log-probabilities of given answers: only what is generated is measured")
        if self.has_scores and self.asked.token_scores and not self.has_tokens:
            say_once("this backend has no log-probabilities of single tokens, for which some numbers are left out")
        if self.has_scores and (line := imprecise(model)):
            say_once(line)
        # The harness keys cached requests by task name alone.
        generation = self.config.generation_kwargs  # with the user's --gen_kwargs
        parts = (tokenizer_name, VERSION, self.scored, self.documents, self.has_scores, self.has_tokens, generation)
        key = str(hash_string(json.dumps(parts, sort_keys=True, default=str)))[:16]
        super().build_all_requests(tokenizer_name=key, **kwargs)
        self._count_tokens(getattr(model, "max_length", None))

    def _check_run(self, model: Any) -> None:
        """Mark sampled answers; UserError where ``--use_cache`` names the cache of another model."""
        if self.asked.generated == 1 and (self.config.generation_kwargs or {}).get("do_sample"):
            self.scored["sampled"] = True
            say_once("answers are sampled, as --gen_kwargs says: these numbers are not those of greedy answers")
        cache = getattr(model, "dbdict", None)  # the harness keys its answers by request alone
        if cache is not None and cache.setdefault("lm_eval_elude model", mine := identity(self.metadata)) != mine:
            raise UserError(f"--use_cache {model.cache_db}: has the answers of another model; name another file")

    def _renderer(self) -> Renderer:
        return model_renderer(self.metadata, partial(self.asked.renderer, self.settings))

    def _take_template(self) -> None:
        """Ask by the template that ``--apply_chat_template NAME`` names, which the run is told after its tasks."""
        before, self.renderer = self.renderer, self._renderer()
        self.scored["template"] = self.renderer.fingerprint
        kwargs = self.config.generation_kwargs or {}
        if kwargs.get("until") == before.stop:
            kwargs["until"] = self.renderer.stop

    def _count_tokens(self, longest: Any) -> None:
        """Tokens of each continuation by document, in the order of its requests: the harness does not give them."""
        pairs = [(r.doc["id"], *r.args) for r in self.instances if r.request_type == "loglikelihood"]
        contexts = list(dict.fromkeys(context for _, context, _ in pairs))
        lengths = dict(zip(contexts, map(len, self.renderer.encode_batch(contexts)), strict=True))
        wholes = self.renderer.encode_batch([context + continuation for _, context, continuation in pairs])
        self._tokens: dict[int, list[int]] = {}
        for (doc_id, context, _), ids in zip(pairs, wholes, strict=True):
            self._tokens.setdefault(doc_id, []).append(len(ids) - lengths[context])
        if isinstance(longest, int) and (most := max(map(len, wholes), default=0)) > longest:
            raise UserError(f"{self.name}: a question with its answer has {most} tokens, and the model takes {longest}")

    def fewshot_context(
        self, doc: dict[str, Any], *args: Any, system_instruction: str | None = None, **kwargs: Any
    ) -> str:
        """The user's system text: the document's own follows it before every question, with the chat template."""
        return system_instruction or ""

    def construct_requests(
        self, doc: dict[str, Any], ctx: str, apply_chat_template: bool = False, chat_template: Any = None, **kwargs: Any
    ) -> list[Instance]:
        system = "\n\n".join(filter(None, (ctx, self.settings.system(doc))))
        requests: list[tuple[str, tuple[Any, ...]]] = []
        token_requests: list[tuple[str, tuple[Any, ...]]] = []
        for question, texts in self.asked.questions(doc) if self.has_scores and self.asked.questions else ():
            prompt = self.renderer.prompt(question, system or None)
            context, end = self.renderer.split(prompt)
            ends = [end] * self.renderer.end_is_asked  # its log-probability is subtracted
            continuations = [*(end + self.renderer.answer(text) for text in texts), *ends]
            requests += [("loglikelihood", (context, continuation)) for continuation in continuations]
            if self.has_tokens:
                token_requests.append(("token_logprobs", (prompt, self.renderer.answer(texts[0]))))
        requests += token_requests
        if self.asked.generated:
            arguments = self._generation_arguments(doc["question"], system, chat_template)
            requests += [("generate_until", arguments)] * self.asked.generated
        if "doc_id" in kwargs:  # 0.5; before, these stood in `metadata`
            kwargs = kwargs | {"task_name": self.name, "target": doc["answer"]}
        return [
            Instance(request_type=kind, doc=doc, arguments=arguments, idx=i, **kwargs)
            for i, (kind, arguments) in enumerate(requests)
        ]

    def _generation_arguments(self, question: str, system: str, chat_template: Any) -> tuple[Any, dict[str, Any]]:
        """Prompt and settings of a generation; the user's ``--gen_kwargs`` are in the task's configuration by now."""
        prompt: Any = self.renderer.prompt(question, system or None)
        room = self.settings.new_tokens(self.asked, len(self.renderer.encode(prompt)))
        kwargs = {"max_gen_toks": room, **self.config.generation_kwargs}
        if isinstance(MODEL.get(), LocalChatCompletion):
            if chat_template is None:
                raise UserError("a chat API takes messages and no prompts: add --apply_chat_template")
            turns = [{"role": "system", "content": system}] if system else []
            prompt = chat_template([*turns, {"role": "user", "content": question}])
            kwargs = {k: v for k, v in kwargs.items() if k != "top_k"}
        return prompt, kwargs

    # ---- responses
    def apply_filters(self) -> Any:
        """Ranks of unequal length ask a request again; of the answers the first is kept."""
        for request in self.instances:
            del request.resps[1:]
        return super().apply_filters()

    def process_results(self, doc: dict[str, Any], results: list[Any]) -> dict[str, Any]:
        doc |= self._measured(doc, results)
        if self.predict_only:
            return {"bypass": None}
        sample = self.asked.sample(doc, self.scored)
        return {name: Score(value, sample) for name, value in logged(sample, self.asked.metrics).items()}

    def _measured(self, doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, Any]:
        """What is logged of the responses, which come in the order of the requests (see metrics/samples.py)."""
        responses, measured = iter(results), dict[str, Any]()
        questions = self.asked.questions(doc) if self.has_scores and self.asked.questions else []
        if questions:
            measured["answer_scores"], tokens = [], iter(self._tokens[doc["id"]])
            for _, texts in questions:
                scores = [(float(next(responses)[0]), next(tokens)) for _ in texts]
                end = (float(next(responses)[0]), next(tokens)) if self.renderer.end_is_asked else (0.0, 0)
                measured["answer_scores"] += [[log_prob - end[0], count - end[1]] for log_prob, count in scores]
        if self.has_tokens:
            token_scores = [next(responses) for _ in questions]
            if self.asked.generated:
                measured["greedy"] = list(token_scores[0][1])
            else:
                measured["token_scores"] = [[list(s[0]), list(s[2]), list(s[3])] for s in token_scores]
        if self.asked.generated:
            generated = list(responses)
            measured |= {"generated": generated[0]} if self.asked.generated == 1 else {"sampled": generated}
        return measured

    @property
    def predict_only(self) -> bool:
        """``--predict_only`` swaps the metrics inside the harness's own tasks for ``bypass``; others have to look."""
        metrics = getattr(self, "_metric_fn_list", None)
        if metrics is None:  # 0.5
            metrics = [metric.name for scorer in self.scorers for metric in scorer.metrics or ()]
        return "bypass" in metrics

    # ---- numbers
    def higher_is_better(self) -> dict[str, Any]:
        return {name: METRICS[name].better[not self.asked.forgotten] for name in self.asked.metrics}

    def aggregation(self) -> dict[str, Any]:
        if self.predict_only:
            return dict(super().aggregation())
        return {name: Aggregation(partial(self._estimate, name)) for name in self.asked.metrics}

    def _estimate(self, metric: str, scores: list[Score]) -> Estimate:
        """A number of the samples behind scores; all are computed at the first call."""
        samples = sorted((score.sample for score in scores), key=lambda sample: sample.doc_id)
        if samples != self.samples or not self.numbers:
            self.samples, self.numbers = samples, self.asked.numbers(samples, self.scored)
            if len(targets := for_each_target({self.name: samples})) > 1:
                self.scored["per_target"] = {
                    target: {k: v.value for k, v in self.asked.numbers(part[self.name], self.scored).items()}
                    for target, part in targets.items()
                }
        return self.numbers[metric]

    def aggregate(self, bootstrap_iters: int | None = 100000) -> tuple[dict[str, Any], int]:
        """The row that lm-eval before 0.5 makes of ``aggregation``; 0.5 would bootstrap all but its own mean."""
        samples = list(self.scorers[0].reduced_docs.values())
        row: dict[str, Any] = {}
        for metric, function in self.aggregation().items():
            scores = [sample[metric] for sample in samples if metric in sample]
            if scores:
                row[f"{metric},none"], row[f"{metric}_stderr,none"] = function(scores), function.stderr(scores)
        return row, len(samples)


def logged(sample: Sample, metrics: Sequence[str]) -> dict[str, float]:
    """The values of a sample as the harness logs them: of a membership attack's pair, by how much the member leads."""
    values = {name: sample.values[name] for name in metrics if name in sample.values}
    return {name: v[0] - v[1] if isinstance(v, tuple) else v for name, v in values.items()}


class EludeGroup(Group):
    """The group of :data:`~lm_eval_elude.tasks.GROUPS` that the YAML names: it builds its children itself.

    A child whose data has nothing to ask is left out, with a line.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        metadata = dict(config.get("metadata") or {})
        name = name_in(config, GROUPS)
        super().__init__(name=name, metadata={**metadata, "version": VERSION})
        for child in GROUPS[name].children:
            kind = EludeGroup if child in GROUPS else EludeTask
            try:
                self.add(kind({"task": child, "metadata": dict(metadata)}))
            except NothingToAskError as error:
                log.warning("ELUDe: %s is left out: %s", child, error)

    @property
    def has_aggregation(self) -> bool:
        return True

    def aggregate(self, task_metrics: dict[str, Any]) -> Any:
        tasks = self.get_all_tasks()
        row: dict[str, Any] = {"alias": self.alias or self.name, "name": self.name}
        row["sample_len"] = sum(task_metrics[task.task_name]["sample_len"] for task in tasks)
        if any(task.predict_only for task in tasks):
            return row
        for metric, estimate in group_numbers(self.name, {task.task_name: task.samples for task in tasks}).items():
            row[f"{metric},none"] = estimate.value
            row[f"{metric}_stderr,none"] = "N/A" if math.isnan(estimate.stderr) else estimate.stderr
        return row
