"""What all leaves and groups share: documents, requests with a common context, exact answer scores, one report.

Requests of one record share one context: its answer, its paraphrased answer, the wrong answers, and one greedy
generation. Token counts come from the evaluated model's own tokenizer. Numbers are formed by
:mod:`lm_eval_elude.results`, from what is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import cached_property, partial
from itertools import islice
from typing import Any, ClassVar

from lm_eval.api.group import Group
from lm_eval.api.instance import Instance

from lm_eval_elude import documents, harness
from lm_eval_elude.core import dataset
from lm_eval_elude.core.chat import Renderer
from lm_eval_elude.core.likelihood import AnswerScore
from lm_eval_elude.core.records import DataError, Record, fingerprint
from lm_eval_elude.documents import Asked, NothingToAskError, Pairs
from lm_eval_elude.harness import Aggregation, Docs, HarnessTask, Score
from lm_eval_elude.results.numbers import report
from lm_eval_elude.results.samples import Sample
from lm_eval_elude.results.suites import GROUPS, Suite, suite, task_report
from lm_eval_elude.settings import Settings, model_renderer, provenance, resolve_settings
from lm_eval_elude.tasks.reference import Reference, find_reference

log = logging.getLogger("lm_eval.elude")


class QuestionTask(HarnessTask):
    """A leaf: prompts, requests with a common context, exact answer scores, and the report of its numbers."""

    VERSION = 1.0
    metrics: ClassVar[dict[str, bool | None]] = {}  # name -> higher is better; None: neither
    max_new_tokens: ClassVar[int] = 128
    generates: ClassVar[bool] = True
    gaps: ClassVar[dict[str, bool | None]] = {}  # metrics that a reference allows

    def __init__(self, config: dict[str, Any]) -> None:
        metadata = dict(config.get("metadata") or {})
        self.settings = self.resolve(metadata)
        self.renderer = self.make_renderer(metadata)
        found = suite(config["task"])
        assert found, config["task"]
        self.suite: Suite = found
        self.records, self.docs = self._collect(config["task"])
        self.samples: list[Sample] = []  # those behind the last report
        self.reference: Reference | None = None
        self._compared = False
        generation = {"until": self.renderer.stop, "max_gen_toks": self.max_new_tokens, "do_sample": False}
        scored = {
            **asdict(self.settings),
            **provenance(metadata),
            "data": self.origin(),
            "template": self.renderer.fingerprint,
        }
        super().__init__(
            config={
                "task": config["task"],
                "metadata": {**metadata, "elude": scored | {"fingerprint": "", "n": 0, "aggregates": {}}},
                "test_split": "test",
                "doc_to_text": "question",
                "doc_to_target": "answer",
                "output_type": "generate_until" if self.generates else "loglikelihood",
                "generation_kwargs": generation if self.generates else None,
                "process_results": __name__,
                "metric_list": [
                    {"metric": name, "aggregation": "mean", "higher_is_better": up} for name, up in self.metrics.items()
                ],
            }
        )

        if self.gaps:
            self.reference = find_reference(self, metadata)

    # ---- what a benchmark defines
    def resolve(self, metadata: Mapping[str, Any]) -> Settings:
        """The settings of the run."""
        return resolve_settings(metadata)

    def origin(self) -> dict[str, Any]:
        """Where the data come from."""
        return dataset.describe(self.settings.dataset)

    def make_renderer(self, metadata: Mapping[str, Any]) -> Renderer:
        """What writes the prompts."""
        return model_renderer(metadata)

    def system_text(self, doc: dict[str, Any]) -> str:
        """The benchmark's own system text before a document's questions, "" for none."""
        return documents.guardrail(self.settings, doc["entity"])

    def generation(self, prompt: str) -> dict[str, Any]:
        """Settings of the generation after a prompt."""
        return dict(self.config.generation_kwargs)

    # ---- what a leaf defines
    def make_docs(self) -> Iterable[Asked]:
        """The records that are scored, each with more columns to log."""
        raise NotImplementedError

    def pairs(self, doc: dict[str, Any]) -> Pairs:
        """Questions with the answers to score under each, in a fixed order."""
        return documents.pairs(doc)

    # ---- data
    def _collect(self, task: str) -> tuple[list[Record], Docs]:
        """The records in the order in which they are asked, and their documents."""
        rows = documents.in_turns(task, self.make_docs(), self.settings)
        return [record for record, _ in rows], Docs(documents.columns(*row) for row in enumerate(rows))

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.dataset = {"test": self.docs}

    # ---- requests
    def build_all_requests(self, *, tokenizer_name: str = "", **kwargs: Any) -> None:
        if self.config.num_fewshot:
            raise DataError(
                f"{self.config.task} asks without examples: --num_fewshot must be 0, got {self.config.num_fewshot}"
            )
        harness.check_backend()
        own = (self.VERSION, asdict(self.settings), self.config.generation_kwargs, fingerprint(self.records))
        super().build_all_requests(
            tokenizer_name=harness.cache_key(tokenizer_name, self.renderer.fingerprint, *own), **kwargs
        )
        self._count_tokens()

    def fewshot_context(
        self, doc: dict[str, Any], *args: Any, system_instruction: str | None = None, **kwargs: Any
    ) -> str:
        """The system text of a document: with the chat template it goes before every one of its questions."""
        parts = [system_instruction] if system_instruction else []
        if told := self.system_text(doc):
            parts.append(told)
        return "\n\n".join(parts)

    def construct_requests(
        self, doc: dict[str, Any], ctx: str, apply_chat_template: bool = False, chat_template: Any = None, **kwargs: Any
    ) -> list[Instance]:
        requests: list[tuple[str, tuple[Any, ...]]] = []
        prompts = []
        for question, answers in self.pairs(doc):
            prompts.append(prompt := self.renderer.prompt(question, system=ctx or None))
            context, space = harness.split_context(prompt)
            requests += [("loglikelihood", (context, space + self.renderer.answer(a))) for a in answers]
            if self.space_tokens:
                requests.append(("loglikelihood", (context, space)))
        if self.generates:
            requests.append(("generate_until", (prompts[0], self.generation(prompts[0]))))
        return self.make_instances(doc, requests, doc["answer"], kwargs)

    @cached_property
    def space_tokens(self) -> int:
        """Number of tokens of the white space that ends a prompt; the same for all prompts of a template."""
        return self.space_tokens_of(self.renderer)

    def space_tokens_of(self, other: Renderer) -> int:
        """The same where another model's tokenizer reads this model's prompts."""
        prompt = self.renderer.prompt(self.docs[0]["question"])
        return len(other.encode(prompt)) - len(other.encode(prompt.rstrip()))

    def _count_tokens(self) -> None:
        """Number of answer tokens of every log-likelihood request, by document, in the order of the requests."""
        requests = [r for r in self.instances if r.request_type == "loglikelihood"]
        contexts = list(dict.fromkeys(r.args[0] for r in requests))
        lengths = dict(zip(contexts, map(len, self.renderer.encode_batch(contexts)), strict=True))
        wholes = self.renderer.encode_batch([r.args[0] + r.args[1] for r in requests])
        self._token_counts: dict[int, list[int]] = {}
        for request, ids in zip(requests, wholes, strict=True):
            self._token_counts.setdefault(request.doc["id"], []).append(len(ids) - lengths[request.args[0]])

    # ---- results
    def process_results(self, doc: dict[str, Any], results: list[Any]) -> dict[str, Any]:
        if self.reference and not self._compared:
            self._compared = True
            self.reference.tell(self)
        doc["answer_scores"] = [list(score) for score in self.answer_scores(doc, results)]
        if self.generates:
            doc["generated"] = results[-1]
        if self.predict_only:
            return {"bypass": None}
        sample = self.suite.sample({"doc": doc, "filtered_resps": results}, self.config.metadata["elude"])
        doc |= self.noted(sample)
        return {metric: Score(self.logged(metric, sample), sample) for metric in self.higher_is_better()}

    def noted(self, sample: Sample) -> dict[str, Any]:
        """More columns for the log."""
        return {}

    def logged(self, metric: str, sample: Sample) -> float:
        """What one sample says of a metric by itself, for its row in the log."""
        return float(sample.values[metric])

    def answer_scores(self, doc: dict[str, Any], results: list[Any]) -> list[AnswerScore]:
        """Scores of a document's answers in the order of :meth:`pairs`, less the white space that ends the prompt."""
        counts = self._token_counts[doc["id"]]
        answered = iter([AnswerScore(float(r[0]), n) for r, n in zip(results, counts, strict=False)])
        scores: list[AnswerScore] = []
        for _, answers in self.pairs(doc):
            own = list(islice(answered, len(answers)))
            space = next(answered) if self.space_tokens else AnswerScore(0.0, 0)
            scores += [AnswerScore(s.log_prob - space.log_prob, s.tokens - space.tokens) for s in own]
        return scores

    def aggregation(self) -> dict[str, Any]:
        if self.predict_only:
            return dict(super().aggregation())
        return {
            metric: Aggregation(partial(self._reported, metric, "value"), partial(self._reported, metric, "stderr"))
            for metric in self.higher_is_better()
        }

    def higher_is_better(self) -> dict[str, Any]:
        return {**self.metrics, **(self.reference.metrics(self) if self.reference else {})}

    def _reported(self, metric: str, part: str, scores: list[Score]) -> float:
        samples = sorted((s.sample for s in scores if s.sample), key=lambda sample: sample.doc_id)
        if samples != self.samples or not self.aggregates:
            self.samples = samples
            scored = self.config.metadata["elude"]
            scored["aggregates"] = task_report(self.config.task, samples, scored)
            scored["n"] = len(samples)
            scored["fingerprint"] = fingerprint(self.records[sample.doc_id] for sample in samples)
            self.reported()
        return float(self.aggregates[metric][part])

    def reported(self) -> None:
        """Called once after each report, for what there is to say about it."""

    @property
    def aggregates(self) -> dict[str, Any]:
        """Values with standard errors, n and per-target values, by metric; they reach the results file."""
        return self.config.metadata["elude"]["aggregates"]


class QuestionGroup(Group):
    """A group that builds its own children and forms its own values from their samples.

    A child whose data has nothing to ask is left out, with a line.
    """

    children: ClassVar[dict[str, Callable[[dict[str, Any]], Any]]] = {}

    def __init__(self, config: dict[str, Any]) -> None:
        metadata = {**(config.get("metadata") or {}), "version": QuestionTask.VERSION}
        super().__init__(name=config["task"], metadata=metadata)
        for name, make in self.children.items():
            try:
                self.add(make({"task": name, "metadata": dict(config.get("metadata") or {})}))
            except NothingToAskError as error:
                log.warning("ELUDe: %s is left out: %s", name, error)

    @property
    def has_aggregation(self) -> bool:
        return True

    def aggregate(self, task_metrics: dict[str, Any]) -> Any:
        own = [task_metrics[task.task_name] for task in self.get_all_tasks()]
        row: dict[str, Any] = {"alias": self.alias or self.name, "name": self.name}
        row["sample_len"] = sum(task["sample_len"] for task in own)
        if any(task.predict_only for task in self.get_all_tasks()):
            return row
        samples = {task.task_name: task.samples for task in self.get_all_tasks()}
        for metric, value in report(GROUPS[self.name], samples).items():
            row[f"{metric},none"] = value["value"]
            row[f"{metric}_stderr,none"] = value["stderr"] if value["stderr"] == value["stderr"] else "N/A"
        return row
