"""The tasks and groups as lm-eval runs them: thin, for what is asked, logged and measured stands in a Benchmark."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from lm_eval.api.group import Group
from lm_eval.api.instance import Instance

from lm_eval_elude.data.records import fingerprint
from lm_eval_elude.errors import UserError
from lm_eval_elude.scoring.answers import rouge_reads
from lm_eval_elude.scoring.benchmark import Benchmark, NothingToAskError, as_row
from lm_eval_elude.scoring.benchmarks import BENCHMARKS, GROUPS, group_report, task_report
from lm_eval_elude.scoring.metrics import Metric, membership_attacks
from lm_eval_elude.scoring.samples import Sample
from lm_eval_elude.scoring.settings import model_renderer, provenance, say_once
from lm_eval_elude.tasks import harness
from lm_eval_elude.tasks.harness import Aggregation, Docs, HarnessTask, Score
from lm_eval_elude.tasks.reference import OriginalModel, OtherModel, check_model, find_reference

log = logging.getLogger("lm_eval.elude")
T = TypeVar("T")


def row_of(config: Mapping[str, Any], rows: Mapping[str, T]) -> T:
    """The row of the task or group that a YAML names, which may be a user's own around one of ours.

    UserError where it has another name; a line where it sets more than metadata, which is all that is read.
    """
    name = config["task"]
    if name not in rows:
        raise UserError(f"a YAML with a class of ELUDe's has `task: {name}`, which is none of: {', '.join(rows)}")
    read = ("task", "class", "metadata", "_qualified_name")  # the last is the harness's, from 0.5 on
    if unread := sorted(key for key, value in config.items() if key not in read and value):
        log.warning("ELUDe: of a YAML %s reads metadata alone, and not %s", name, ", ".join(unread))
    return rows[name]


class QuestionTask(HarnessTask):
    """The task whose name is that of a row of :data:`BENCHMARKS`."""

    VERSION = Benchmark.version

    def __init__(self, config: dict[str, Any]) -> None:
        metadata = dict(config.get("metadata") or {})
        self.benchmark = benchmark = row_of(config, BENCHMARKS)
        self.settings = benchmark.resolve(metadata)
        self.renderer = model_renderer(metadata, benchmark.wording(self.settings))
        rows = benchmark.records(self.settings)
        self.records, self.docs = [record for record, _ in rows], Docs(benchmark.documents(rows))
        unread = sum(not rouge_reads(doc["answer"]) for doc in self.docs) if benchmark.generates else 0
        if unread:
            log.warning(
                "ELUDe: ROUGE reads the letters a to z alone, so ROUGE, FQ, RQ and leak@k say nothing of %d of %s's %d "
                "answers",
                unread, config["task"], len(self.records),
            )  # fmt: skip
        if benchmark.generates and benchmark.scores and benchmark.kind in ("forget", "kept", "attack"):
            most = benchmark.spec.max_new_tokens
            answers = [doc["answer"] for doc in self.docs]
            lengths, stops = map(len, self.renderer.encode_batch(answers)), self.renderer.stop
            ended = [any(stop in answer for stop in stops) for answer in answers]  # of a model without a template
            if cut := sum(length > most or is_ended for length, is_ended in zip(lengths, ended, strict=True)):
                log.warning(
                    "ELUDe: %d of %s's %d answers have more than %d tokens or a blank line at which generation stops: "
                    "ROUGE, FQ and RQ count the rest as missing", cut, config["task"], len(self.records), most,
                )  # fmt: skip
        same = sum(
            (doc.get("paraphrased_answer") or "").casefold() in map(str.casefold, doc.get("perturbed_answer") or ())
            for doc in self.docs
        )
        if same:
            log.warning(
                "ELUDe: in %d of %s's %d records a wrong answer is the right one: truth_first, R and multiple choice "
                "say nothing of them", same, config["task"], len(self.records),
            )  # fmt: skip
        self.samples: list[Sample] = []  # those behind the last report
        self.other_models: list[OtherModel] = []
        self.token_log_probs = False  # whether the backend serves them
        scored = {
            **asdict(self.settings),
            **provenance(metadata),
            "data": benchmark.describe_data(self.settings),
            "template": self.renderer.fingerprint,
        }
        super().__init__(
            config={
                "task": config["task"],
                "metadata": {**metadata, "elude": scored | {"fingerprint": "", "n": 0, "aggregates": {}}},
                "test_split": "test",
                "doc_to_text": "question",
                "doc_to_target": "answer",
                "output_type": "generate_until" if benchmark.generates else "loglikelihood",
                "generation_kwargs": benchmark.generation(self.renderer) if benchmark.generates else None,
                "process_results": __name__,
                "metric_list": [
                    {"metric": m.name, "aggregation": "mean", "higher_is_better": m.higher_is_better(benchmark.kind)}
                    for m in benchmark.metrics
                    if not m.needs
                ],
            }
        )
        if any(metric.is_distance for metric in benchmark.metrics):
            if reference := find_reference(self, metadata):
                self.other_models.append(reference)
            elif benchmark.kind == "tofu forget":
                log.warning("TOFU: no forget quality without a retained model: give its results or log as reference")
        if wanted := [metric.name for metric in benchmark.metrics if metric.needs == "original"]:
            if self.settings.original:
                self.other_models.append(OriginalModel(self.settings.original, metadata))
            else:
                say_once(f"no original in --metadata: {', '.join(wanted)} is absent", logging.INFO)

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.dataset = {"test": self.docs}

    # ---- requests
    def build_all_requests(self, *, tokenizer_name: str = "", **kwargs: Any) -> None:
        if self.config.num_fewshot:
            raise UserError(
                f"{self.config.task} asks without examples: --num_fewshot must be 0, got {self.config.num_fewshot}"
            )
        if self.benchmark.scores:
            harness.check_backend()
        if wanted := [m.name for m in self.benchmark.metrics if m.needs_tokens]:
            self.token_log_probs = hasattr(harness.evaluated_model(), "token_logprobs")
            if not self.token_log_probs:
                names = ", ".join(sorted(wanted))
                log.warning("ELUDe: only --model elude gives token log-probabilities: %s are absent", names)
        key = harness.cache_key(
            tokenizer_name, self.renderer.fingerprint, self.VERSION, asdict(self.settings),
            self.config.generation_kwargs, fingerprint(self.records), self.token_log_probs, kwargs.get("samples"),
        )  # fmt: skip
        super().build_all_requests(tokenizer_name=key, **kwargs)
        scored = [r for r in self.instances if r.request_type == "loglikelihood"]
        most = harness.longest_answer()
        self._token_counts: dict[int, list[int]] = {}  # by document, in the order of its requests
        for request, count in zip(scored, self.continuation_tokens([r.args for r in scored]), strict=True):
            self._token_counts.setdefault(request.doc["id"], []).append(count)
            if count > most:
                raise UserError(
                    f"{self.config.task}: an answer to {request.doc['question'][:80]!r} has {count} tokens, and the "
                    f"model takes {most:.0f}"
                )
        written = [r.args[1].get("max_gen_toks", 1) for r in self.instances if r.request_type == "generate_until"]
        if wrong := [tokens for tokens in written if type(tokens) is not int or tokens < 1]:
            raise UserError(f"--gen_kwargs max_gen_toks must be a whole number above 0, got {wrong[0]!r}")
        if (longest := max(written, default=0)) >= most:
            raise UserError(
                f"{self.config.task}: an answer may have {longest} tokens, and the model takes {most:.0f}, prompt "
                "included: give --gen_kwargs max_gen_toks=N"
            )
        for other in self.other_models:
            other.check(self)
        if self.token_log_probs and self.mia_reference:
            check_model(self.mia_reference, f"mia_reference {self.mia_reference!r} in --metadata is not")

    def fewshot_context(
        self, doc: dict[str, Any], *args: Any, system_instruction: str | None = None, **kwargs: Any
    ) -> str:
        """The user's system text: the document's own goes before every one of its questions, with the chat template."""
        return system_instruction or ""

    def construct_requests(
        self, doc: dict[str, Any], ctx: str, apply_chat_template: bool = False, chat_template: Any = None, **kwargs: Any
    ) -> list[Instance]:
        requests = self.benchmark.requests(
            doc,
            self.renderer,
            self.settings,
            instruction=ctx,
            generation=self.config.generation_kwargs,
            tokens=self.token_log_probs,
        )
        if not self.benchmark.scores and (as_messages := harness.takes_messages(chat_template)):
            system = self.benchmark.whole_system_text(doc, self.settings, ctx)
            asked = as_messages(doc["question"], system)
            # What is None is not sent; the backend has a seed of its own, which only a None of the user's takes away.
            sent = {k: v for k, v in requests[0].arguments[1].items() if v is not None or k == "seed"}
            requests = [request._replace(arguments=(asked, sent)) for request in requests]
        return self.make_instances(doc, requests, doc["answer"], kwargs)

    def continuation_tokens(self, arguments: Sequence[tuple[Any, ...]]) -> list[int]:
        """Number of tokens of each continuation, by the model's tokenizer; the arguments of log-likelihood requests."""
        pairs = [pair[:2] for pair in arguments]
        contexts = list(dict.fromkeys(context for context, _ in pairs))
        lengths = dict(zip(contexts, map(len, self.renderer.encode_batch(contexts)), strict=True))
        wholes = self.renderer.encode_batch([context + continuation for context, continuation in pairs])
        return [len(ids) - lengths[context] for ids, (context, _) in zip(wholes, pairs, strict=True)]

    # ---- responses
    def apply_filters(self) -> Any:
        """Ask the other models, too: the harness calls this first of all when it has the responses.

        Ranks of unequal length ask a request again; of the answers the first is kept.
        """
        for request in self.instances:
            del request.resps[1:]
        for other in self.other_models:
            other.answer(self)
        return super().apply_filters()

    def process_results(self, doc: dict[str, Any], results: list[Any]) -> dict[str, Any]:
        doc |= self.answers(doc, results)
        if self.predict_only:
            return {"bypass": None}
        sample = self.benchmark.measure({"doc": doc, "filtered_resps": results}, self.config.metadata["elude"])
        doc |= self.benchmark.noted(sample)
        return {metric.name: Score(sample.values[metric.name], sample) for metric in self.reported}

    @property
    def mia_reference(self) -> str:
        """Model of the reference attack on membership, "" for none."""
        return str(self.settings.mia_reference) if self.benchmark.kind == "membership" else ""

    def answers(self, doc: dict[str, Any], results: Sequence[Any]) -> dict[str, Any]:
        """What is logged of the responses to a document's requests, of this model or of a reference."""
        counts = self._token_counts.get(doc["id"], ())
        return self.benchmark.answers(doc, results, counts, self.renderer.end_is_asked)

    # ---- results
    @property
    def reported(self) -> list[Metric]:
        """The metrics of this run: those for which all is at hand that they need."""
        at_hand = {""}.union(*(other.gives for other in self.other_models))
        if self.token_log_probs:
            at_hand |= {"token log-probabilities", "mia_reference" if self.mia_reference else ""}
        return [metric for metric in self.benchmark.metrics if metric.needs in at_hand]

    def higher_is_better(self) -> dict[str, Any]:
        return {metric.name: metric.higher_is_better(self.benchmark.kind) for metric in self.reported}

    def aggregation(self) -> dict[str, Any]:
        if self.predict_only:
            return dict(super().aggregation())
        return {metric.name: Aggregation(partial(self._estimate, metric.name)) for metric in self.reported}

    def _estimate(self, metric: str, scores: list[Score]) -> dict[str, Any]:
        """A number of the samples behind scores, as the results file has it; all are formed at the first call."""
        samples = sorted((s.sample for s in scores if s.sample), key=lambda sample: sample.doc_id)
        scored = self.config.metadata["elude"]
        if samples != self.samples or not scored["aggregates"]:
            self.samples = samples
            scored["aggregates"] = task_report(self.config.task, samples, scored)
            scored["n"] = len(samples)
            scored["fingerprint"] = fingerprint(self.records[sample.doc_id] for sample in samples)
            if self.benchmark.kind == "membership":
                for target, attack in membership_attacks(samples, self.settings.seed).items():
                    if attack.reason:
                        scored["mia_reason"] = attack.reason
                        say_once(f"no membership attack on {target}: {attack.reason}")
        return scored["aggregates"][metric]


class QuestionGroup(Group):
    """The group whose name is that of a row of :data:`GROUPS`: it builds its children and forms its own numbers.

    A child whose data has nothing to ask is left out, with a line.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        metadata = dict(config.get("metadata") or {})
        super().__init__(name=config["task"], metadata={**metadata, "version": Benchmark.version})
        for name in row_of(config, GROUPS).children:
            kind = QuestionGroup if name in GROUPS else QuestionTask
            try:
                self.add(kind({"task": name, "metadata": dict(metadata)}))
            except NothingToAskError as error:
                log.warning("ELUDe: %s is left out: %s", name, error)

    @property
    def has_aggregation(self) -> bool:
        return True

    def aggregate(self, task_metrics: dict[str, Any]) -> Any:
        tasks = self.get_all_tasks()
        row: dict[str, Any] = {"alias": self.alias or self.name, "name": self.name}
        row["sample_len"] = sum(task_metrics[task.task_name]["sample_len"] for task in tasks)
        if any(task.predict_only for task in tasks):
            return row
        return row | as_row(group_report(self.name, {task.task_name: task.samples for task in tasks}))
