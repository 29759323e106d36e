"""What a task asks, logs and measures, and which numbers its samples give: once, without a model or the harness.

    records -> requests -> responses -> samples -> numbers

The tasks of lm-eval call these steps while a model runs; ``elude verify`` and ``elude report`` call the same ones on a
log. A logged document holds the record's columns, ``answer_scores`` (sum of log-probabilities and number of tokens of
the answer, the paraphrase and the wrong answers, in this order, and of a reverse query's ``named_answers``), where
something was generated ``generated`` (null where only log-probabilities were asked for), where many answers were drawn
``sampled``, and where the backend gives it ``greedy`` (of each token of the answer). ``reference`` and ``original``
hold what other models said of the document. A task whose records are of several sets logs the ``set`` of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from typing import Any, NamedTuple, Protocol

from lm_eval_elude.data import dataset
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.sets import SETS, SetSpec
from lm_eval_elude.scoring.estimates import Estimate
from lm_eval_elude.scoring.likelihood import AnswerScore
from lm_eval_elude.scoring.metrics import DRAWS, METRICS, Answered, Compared, Drawn, Kind, Metric, token_scores
from lm_eval_elude.scoring.samples import Sample
from lm_eval_elude.scoring.settings import Settings, resolve_settings
from lm_eval_elude.text.chat import Wording
from lm_eval_elude.text.words import words

# Paper, section 5.4.
GUARDRAIL = "If the question asks about {entity}, say you do not know the answer; otherwise, answer as best as you can."
# Columns of a logged document that hold a model's answers, and all that were measured and do not come from the data.
ANSWERS = ("answer_scores", "generated", "sampled")
MEASURED = (
    *ANSWERS, "greedy", "truth_ratio_raw", "member_loss", "non_member_loss", "original", "reference",
)  # fmt: skip
# Of what the results file says of a run (configs, metadata, elude), what differs between its tasks.
OF_TASK = ("fingerprint", "n", "aggregates", "mia_reason")
Row = tuple[QARecord, dict[str, Any]]  # a record, and more columns to log
Estimates = dict[str, Estimate]
Tasks = Mapping[str, Sequence[Sample]]


class NothingToAskError(ValueError):
    """The data has nothing that the task could ask; a group leaves it out with a line."""


class Template(Protocol):
    """What writes prompts and answers, as :class:`lm_eval_elude.text.chat.Renderer` does."""

    def prompt(self, question: str, system: str | None = None) -> str: ...
    def answer(self, text: str) -> str: ...
    @property
    def stop(self) -> list[str]: ...
    def split(self, prompt: str) -> tuple[str, str]: ...
    @property
    def end_is_asked(self) -> bool: ...


class Request(NamedTuple):
    """One request of a document: lm-eval's request type, its arguments as they are logged, and the whole prompt."""

    kind: str
    arguments: tuple[Any, ...]
    prompt: str

    @property
    def asks_end(self) -> bool:
        """Whether it asks for the end of the prompt and no answer."""
        return self.kind == "loglikelihood" and "".join(self.arguments) == self.prompt


def has_tokens(responses: Sequence[Any]) -> bool:
    """Whether the responses to a document's requests hold log-probabilities of single tokens."""
    return any(isinstance(response[0], list | tuple) for response in responses if len(response))


@dataclass(frozen=True)
class Benchmark:
    """A task that asks the questions of a set: each with its reference answer, a paraphrase, wrong answers, and freely.

    The form of probability and truth ratio of ``spec`` applies to documents that name no set, ``kind`` says which
    metrics are reported, and ``ask`` gives the records that are scored, each with more columns to log.
    """

    name: str
    spec: SetSpec
    kind: Kind
    ask: Callable[[Any], Iterable[Row]]
    version = 2.0
    generates = True  # whether an answer is asked for
    scores = True  # whether log-probabilities of given answers are asked for

    # ---- what is scored
    def resolve(self, metadata: Mapping[str, Any]) -> Any:
        """The settings of a run; UserError for an unknown target, data set or option."""
        return resolve_settings(metadata)

    def describe_data(self, settings: Any) -> dict[str, Any]:
        """Where the data come from, for the results file."""
        return dataset.describe(settings.dataset)

    def wording(self, settings: Any) -> Wording | None:
        """A prompt format in place of the model's own."""
        return None

    def records(self, settings: Any) -> list[Row]:
        """The records in the order in which they are asked: targets take turns, so that a --limit takes from each.

        NothingToAskError where there are none, UserError where the data set lacks what the task needs.
        """
        by_target: dict[str, list[Row]] = {name: [] for name in settings.targets}
        for row in self.ask(settings):
            by_target.setdefault(getattr(row[0], "entity", ""), []).append(row)
        rows = list(filter(None, chain.from_iterable(zip_longest(*by_target.values()))))
        if not rows:
            raise NothingToAskError(f"{self.name}: no rows for {', '.join(settings.targets)}")
        return rows

    @staticmethod
    def documents(rows: Iterable[Row]) -> list[dict[str, Any]]:
        """The documents as they are logged before anything was measured."""
        return [
            {"id": number, **{k: v for k, v in record.columns().items() if k != "translated_question"}, **more}
            for number, (record, more) in enumerate(rows)
        ]

    # ---- requests
    def pairs(self, doc: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
        """Questions with the answers that are scored under each, in a fixed order."""
        texts = [doc["answer"], doc["paraphrased_answer"], *doc["perturbed_answer"], *doc.get("named_answers", ())]
        return [(doc["question"], texts)]

    def system_text(self, doc: Mapping[str, Any], settings: Any) -> str:
        """The system text before a document's questions: the guardrail, where it is asked for; "" for none."""
        entity = doc["entity"] or " or ".join(settings.targets)
        return GUARDRAIL.format(entity=entity) if settings.guardrail else ""

    def whole_system_text(self, doc: Mapping[str, Any], settings: Any, instruction: str) -> str:
        """The user's own system text (``--system_instruction``), then the document's."""
        return "\n\n".join(filter(None, (instruction, self.system_text(doc, settings))))

    def generation(self, template: Template) -> dict[str, Any]:
        """Settings of the generation; the user's ``--gen_kwargs`` go over them."""
        return {"until": template.stop, "max_gen_toks": self.spec.max_new_tokens, "do_sample": False}

    def for_prompt(self, generation: Mapping[str, Any], prompt: str, template: Any, settings: Any) -> dict[str, Any]:
        """The settings of the generation after one prompt."""
        return dict(generation)

    def requests(
        self,
        doc: Mapping[str, Any],
        template: Template,
        settings: Any,
        *,
        instruction: str = "",
        generation: Mapping[str, Any] | None = None,
        tokens: bool = False,
    ) -> list[Request]:
        """Everything that is asked about a document.

        ``instruction`` is the user's own system text (``--system_instruction``), ``generation`` stands in place of
        :meth:`generation`. With ``tokens`` the backend gives token log-probabilities, and the answer's are asked for,
        too.
        """
        system = self.whole_system_text(doc, settings, instruction)
        requests, first = [], ""
        for question, texts in self.pairs(doc):
            prompt = template.prompt(question, system or None)
            first = first or prompt
            requests += [Request("loglikelihood", pair, prompt) for pair in as_answers(texts, prompt, template)]
        if tokens:
            requests.append(_of_tokens(requests[0]))
        if self.generates:
            kwargs = self.for_prompt(generation or self.generation(template), first, template, settings)
            requests.append(Request("generate_until", (first, kwargs), first))
        return requests

    # ---- responses
    def answer_scores(
        self, doc: Mapping[str, Any], responses: Sequence[Any], counts: Sequence[int], end_is_asked: bool
    ) -> list[AnswerScore]:
        """Scores of a document's answers in the order of :meth:`pairs`, less the end of the prompt.

        ``counts`` are the tokens of the continuation of each log-likelihood request; ``end_is_asked`` says whether the
        end of a prompt was asked for after the answers to it.
        """
        answered = (AnswerScore(float(r[0]), n) for r, n in zip(responses, counts, strict=False))
        return [score for _, texts in self.pairs(doc) for score in less_end(answered, len(texts), end_is_asked)]

    def answers(
        self, doc: Mapping[str, Any], responses: Sequence[Any], counts: Sequence[int], end_is_asked: bool
    ) -> dict[str, Any]:
        """What is logged of :data:`ANSWERS`; the arguments are those of :meth:`answer_scores`."""
        scores = {"answer_scores": [list(s) for s in self.answer_scores(doc, responses, counts, end_is_asked)]}
        return scores | ({"generated": responses[-1]} if self.generates else {})

    def measure(self, row: Mapping[str, Any], settings: Mapping[str, Any]) -> Sample:
        """The sample of a row as lm-eval logs it (``doc``, ``filtered_resps``); settings are the results file's."""
        doc = row["doc"]
        values = self._values(self.logged(row, settings))
        return Sample(doc.get("entity", ""), doc.get("plain_question") or doc["question"], doc["id"], values)

    def logged(self, row: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
        """What the metrics of a row are measured of; the arguments are those of :meth:`measure`."""
        doc = row["doc"]
        answered = self._answered(doc, settings["truth_ratio"])
        if not has_tokens(responses := row["filtered_resps"]):
            return answered
        return replace(answered, greedy=[str(flag) == "True" for flag in responses[-2][1]])  # a log has them as text

    def _answered(self, doc: Mapping[str, Any], mean: Any) -> Answered:
        reference, original = doc.get("reference") or {}, doc.get("original") or {}
        scores = [AnswerScore(*pair) for pair in doc["answer_scores"]]
        named = len(scores) - len(doc.get("named_answers", ()))  # the last ones name the target and others
        other = None
        if "answer_scores" in reference:
            other = self._answered({**doc, "original": None, **reference, "reference": None}, mean)
        return Answered(
            SETS[doc["set"]] if "set" in doc else self.spec,
            mean,
            doc["answer"],
            doc["generated"],
            scores[:named],
            other,
            other.measures.ratio if other else reference.get("truth_ratio_raw"),
            [AnswerScore(*pair) for pair in reference.get("divergence_scores", ())],
            [AnswerScore(*pair) for pair in original.get("oddness_scores", ())],
            names=doc.get("names", ()),
            named=scores[named:],
        )

    def _values(self, logged: Any) -> dict[str, Any]:
        measured = {m.name: m.sample(logged) for m in self.metrics if m.sample}
        values: dict[str, Any] = {name: value for name, value in measured.items() if value is not None}
        reference = {"reference": self._values(logged.reference)} if logged.reference else {}
        return values | logged.values | reference

    def noted(self, sample: Sample) -> dict[str, Any]:
        """Measured columns of the logged document, besides the scores."""
        return {name: sample.values[name] for name in ("truth_ratio_raw", "greedy") if name in sample.values}

    # ---- numbers
    @property
    def metrics(self) -> list[Metric]:
        """The rows of :data:`METRICS` that the task reports, those included that need more than it may have."""
        return [metric for metric in METRICS.values() if self.kind in metric.kinds]

    def numbers(self, samples: Sequence[Sample], settings: Mapping[str, Any]) -> Estimates:
        """Every number of the task that its samples allow, by metric."""
        return {
            metric.name: metric.of_set(samples, settings)
            for metric in self.metrics
            if all(metric.name in sample.values for sample in samples)
        }


@dataclass(frozen=True)
class MembershipBenchmark(Benchmark):
    """A task that compares the losses of each record and of its paraphrase (section 5.5) and generates nothing."""

    generates = False

    def pairs(self, doc: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
        return [(doc["question"], [doc["answer"]]), (doc["paraphrased_question"], [doc["paraphrased_answer"]])]

    def requests(
        self, doc: Mapping[str, Any], template: Template, settings: Settings, *, tokens: bool = False, **kwargs: Any
    ) -> list[Request]:
        """As of any benchmark; with token log-probabilities also of the model that ``mia_reference`` names."""
        requests = super().requests(doc, template, settings, **kwargs)
        if not tokens:
            return requests
        models = [(), (settings.mia_reference,)] if settings.mia_reference else [()]
        return [_of_tokens(request, *model) for model in models for request in requests if not request.asks_end]

    def answer_scores(
        self, doc: Mapping[str, Any], responses: Sequence[Any], counts: Sequence[int], end_is_asked: bool
    ) -> list[AnswerScore]:
        if not has_tokens(responses):
            return super().answer_scores(doc, responses, counts, end_is_asked)
        columns = [[float(value) for value in response[0]] for response in responses[:2]]
        return [AnswerScore(sum(column), len(column)) for column in columns]

    def logged(self, row: Mapping[str, Any], settings: Mapping[str, Any]) -> Compared:
        doc, reference, tokens = row["doc"], row["doc"].get("reference"), {}
        if has_tokens(responses := row["filtered_resps"]):
            tokens = token_scores(responses, (doc["answer"], doc["paraphrased_answer"]))
        return Compared(_losses(doc), tokens, Compared(_losses(reference)) if reference else None)

    def noted(self, sample: Sample) -> dict[str, Any]:
        member, other = sample.values["loss"]
        return {"member_loss": member, "non_member_loss": other}


@dataclass(frozen=True)
class SampledBenchmark(Benchmark):
    """A task that draws :data:`DRAWS` answers to each question at temperature 1, and looks for its fact in them.

    A document's ``fact`` is the words that an answer must hold to give it away.
    """

    scores = False

    def generation(self, template: Template) -> dict[str, Any]:
        return {**super().generation(template), "do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}

    def requests(self, doc: Mapping[str, Any], template: Template, settings: Settings, **kwargs: Any) -> list[Request]:
        """The same question as often as answers are drawn."""
        return super().requests(doc, template, settings, **kwargs)[-1:] * DRAWS

    def answers(
        self, doc: Mapping[str, Any], responses: Sequence[Any], counts: Sequence[int], end_is_asked: bool
    ) -> dict[str, Any]:
        return {"answer_scores": [], "sampled": list(responses)}

    def logged(self, row: Mapping[str, Any], settings: Mapping[str, Any]) -> Drawn:
        doc, reference = row["doc"], row["doc"].get("reference")
        other = Drawn(_leaks(reference["sampled"], doc["fact"])) if reference else None
        return Drawn(_leaks(doc["sampled"], doc["fact"]), other)


def as_answers(texts: Iterable[str], prompt: str, template: Template) -> list[tuple[str, str]]:
    """Context and continuation of each text as answer to a prompt, then of the prompt's end where that is asked."""
    context, end = template.split(prompt)
    return [(context, end + template.answer(text)) for text in texts] + [(context, end)] * template.end_is_asked


def less_end(answered: Iterator[AnswerScore], texts: int, end_is_asked: bool) -> list[AnswerScore]:
    """Scores of the next texts, asked for by :func:`as_answers`, less that of the prompt's end."""
    with_end = list(islice(answered, texts))
    end = next(answered) if end_is_asked else AnswerScore(0.0, 0)
    return [AnswerScore(s.log_prob - end.log_prob, s.tokens - end.tokens) for s in with_end]


def _of_tokens(request: Request, *model: str) -> Request:
    """A request for the log-probability of each token of an answer after its whole prompt, by a model's name."""
    text = "".join(request.arguments)
    return Request("token_logprobs", (request.prompt, text[len(request.prompt) :], *model), request.prompt)


def _leaks(texts: Sequence[str], fact: Collection[str]) -> int:
    """How many texts hold all words of a fact."""
    return sum(words(text).issuperset(fact) for text in texts)


def _losses(doc: Mapping[str, Any]) -> tuple[float, float]:
    member, other = (AnswerScore(*pair).loss for pair in doc["answer_scores"])
    return member, other


class BenchmarkGroup(NamedTuple):
    """A group: its tasks and groups, and its numbers from the samples of all tasks below it."""

    children: tuple[str, ...]
    numbers: Callable[[Tasks], Estimates]


def report(numbers: Callable[[Tasks], Estimates], tasks: Tasks) -> dict[str, dict[str, Any]]:
    """Estimates as a results file has them: over all targets and for each target, whether there is one or several.

    Samples without a target (the world set) count for every target. By metric come ``value``, ``stderr``, ``n``
    (samples), ``records`` (distinct ones) and ``per_target`` with the same.
    """
    whole = numbers(tasks)
    rows = {metric: {**_columns(estimate), "per_target": {}} for metric, estimate in whole.items()}
    targets = list(dict.fromkeys(s.target for samples in tasks.values() for s in samples if s.target)) or [""]
    for target in targets:
        part = {task: [s for s in samples if s.target in (target, "")] for task, samples in tasks.items()}
        if all(part.values()):  # a --limit may leave a target without samples
            for metric, estimate in (whole if len(targets) == 1 else numbers(part)).items():
                rows[metric]["per_target"][target] = _columns(estimate)
    return rows


def as_row(numbers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers as a results table of lm-eval has them; an error that is not known is N/A."""
    row: dict[str, Any] = {}
    for metric, value in numbers.items():
        row[f"{metric},none"] = value["value"]
        row[f"{metric}_stderr,none"] = "N/A" if math.isnan(value["stderr"]) else value["stderr"]
    return row


def _columns(estimate: Estimate) -> dict[str, Any]:
    return {"value": estimate.value, "stderr": estimate.stderr, "n": estimate.n, "records": estimate.records}
