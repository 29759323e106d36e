"""A submission checked without trust: documents against the data loaded here, prompts, responses, every number.

:data:`MEANING` has the levels of proof; the two higher ones are given by :mod:`~lm_eval_elude.board.rescore`. The
:class:`~lm_eval_elude.scoring.benchmark.Benchmark` of a task defines what it asks and measures; here it is compared.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from lm_eval_elude.board import attacked
from lm_eval_elude.board import submission as packed
from lm_eval_elude.board.contradictions import across, contradiction, difference
from lm_eval_elude.board.submission import Packed, Submission, shown
from lm_eval_elude.data import dataset, jsonio, manifest
from lm_eval_elude.data.records import fingerprint
from lm_eval_elude.errors import UserError
from lm_eval_elude.scoring.benchmark import ANSWERS, MEASURED, OF_TASK, NothingToAskError, Request, as_row, has_tokens
from lm_eval_elude.scoring.benchmarks import BENCHMARKS, GROUPS, group_report, task_report
from lm_eval_elude.scoring.likelihood import AnswerScore
from lm_eval_elude.scoring.metrics import METRICS
from lm_eval_elude.scoring.runs import Run
from lm_eval_elude.scoring.samples import Sample, same_answers
from lm_eval_elude.scoring.settings import MOST_PROMPTS, Settings
from lm_eval_elude.stress.outcome import TASK, Outcome
from lm_eval_elude.text.chat import Renderer, cut_prompt

Level = Literal["recomputed", "rescored", "reproduced"]
LEVELS: tuple[Level, ...] = get_args(Level)  # the lowest first
MEANING: dict[Level, str] = {
    "recomputed": "every number follows from the logged answers",
    "rescored": "a drawn part of the answers came out of the model again",
    "reproduced": "all answers came out of the model again",
}
_MOST = 20  # findings of one task that are listed
_MOST_TEXT = 200  # characters of a message that repeats what a submitter wrote
Docs = list[dict[str, Any]]


@dataclass
class Verdict:
    """What came of a submission."""

    findings: list[str] = field(default_factory=list)  # what is wrong, a line each; none is a pass
    remarks: list[str] = field(default_factory=list)  # what could not be looked at
    proof: Level = LEVELS[0]  # how far what was looked at goes
    submission: Submission | None = None  # its first file, where it could be read
    samples: dict[str, list[Sample]] = field(default_factory=dict)  # measured here, by task
    docs: dict[str, Docs] = field(default_factory=dict)  # the logged documents of these samples
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)  # formed here, by task or group and metric
    outcome: Outcome | None = None  # of the attacks on its weights, where it brings some
    digest: str = ""  # what names the submission
    data: str = ""  # the data set that it was compared with, the Hub's at the commit that was scored

    @property
    def level(self) -> Level | Literal[""]:
        """Of proof, "" where something is wrong."""
        return "" if self.findings else self.proof

    def compare(self, where: str, stated: Any, formed: Any) -> None:
        """A finding where what is stated differs from what was formed here."""
        if differs := difference(stated, formed):
            self.findings.append(f"{where}{differs}")


def verify(folder: Path, *, data: str = "", renderer: Renderer | None = None, reference: Run | None = None) -> Verdict:
    """Check a submission.

    Args:
        data: the data set, where the submission's is a path on another machine.
        renderer: of the model's tokenizer, for prompts and token counts; without it the prompts must be of one form.
            It is never taken from the submission: a chat template is a program.
        reference: the run of the model that the submission names as its reference; without it the distances to that
            model are left out.
    """
    verdict = Verdict()
    try:
        verdict.submission = packed.read(folder)
        packed.check_files(folder, verdict.submission.files)
        verdict.digest = packed.digest(folder)  # not before: a spoilt copy has the digest of the honest submission
        _verify(Packed(folder), verdict.submission, verdict, data, renderer, reference)
    except Exception as error:  # whatever is in the files: one submission never stops who checks many
        verdict.findings.append(_reason(error).replace(f"{folder}/", ""))
    return verdict


def _reason(error: Exception) -> str:
    known = isinstance(error, UserError)
    return str(error) if known else f"cannot be read ({type(error).__name__}: {shown(str(error))})"


def _verify(
    run: Packed, submission: Submission, verdict: Verdict, data: str, renderer: Renderer | None, reference: Run | None
) -> None:
    names = _tree("elude")
    if foreign := [name for name in run.results["configs"] if name.startswith("elude") and name not in names]:
        raise UserError(
            f"{packed.RESULTS}: {shown(foreign[0])} is no task of the group elude, which alone is submitted"
        )
    settings = _settings(run, submission, data)
    verdict.data = settings.dataset
    _check_run(run, submission, verdict, settings)
    expected = {name: asked for name in names if name in BENCHMARKS and (asked := _expected(name, settings))}
    if reference and not submission.scored.get("reference"):
        verdict.remarks.append(f"the run names no reference: nothing is compared with {reference.path}")
        reference = None
    if renderer and submission.scored.get("template") != renderer.fingerprint:
        verdict.findings.append("the template is not that of the tokenizer given")
    rows = RowCheck(run, settings, renderer)
    for task in run.tasks:
        if task not in expected:
            verdict.findings.append(f"{task}: the data set has nothing that it could ask")
            continue
        docs, data_fingerprint = expected[task]
        answers = None
        if reference and (answers := _reference_answers(reference, task, docs)) is None:
            verdict.findings.append(f"{task}: the reference {reference.path} was scored on other documents")
        rows.check(task, docs, answers, verdict)
        prints = [run.settings(task)["fingerprint"], submission.fingerprints.get(task)]
        verdict.compare(f"{task}, fingerprint", prints, [data_fingerprint] * 2)
    if missing := [task for task in expected if task not in run.tasks]:
        verdict.findings.append(f"{', '.join(missing)}: not in the run")
    elif not verdict.findings:
        verdict.findings += across(verdict.docs, settings)[:_MOST]
        _check_numbers(run, verdict, reference)
        if submission.attacked:
            verdict.outcome = attacked.check(run, expected[TASK][0], settings)
    if not renderer:
        verdict.remarks.append(
            "no tokenizer was given: token counts, and that the template is the model's, not looked at"
        )


def _tree(name: str) -> list[str]:
    """A group with all groups and tasks below it."""
    return [name, *(below for child in GROUPS[name].children for below in _tree(child))] if name in GROUPS else [name]


# ---- the run as a whole
def _settings(run: Packed, submission: Submission, data: str) -> Settings:
    """What the run scored, with the data set that it is compared with."""
    scored = submission.scored
    for task in run.tasks:
        if {name: value for name, value in run.settings(task).items() if name not in OF_TASK} != scored:
            raise UserError(f"{packed.RESULTS}: the tasks do not say the same of the run as {packed.FILE_NAME}")
    said = {*(item.name for item in fields(Settings)), "checkpoint", "data", "template", "versions"}
    if missing := sorted(said - scored.keys()):
        raise UserError(f"{packed.FILE_NAME}: field 'scored' does not say {', '.join(missing)}")
    source = data or str(scored["dataset"])
    if dataset.HUB.revision(source) is not None:
        # The published data as of the commit that was scored; nothing else of the Hub is read.
        described = scored["data"]
        if described.get("repository") != dataset.HUB.published or described.get("world") != dataset.HUB_WORLD_URL:
            raise UserError("the data set is not the published one: name the one it was with --dataset")
        revision = described.get("revision")
        if not isinstance(revision, str) or not re.fullmatch(r"[0-9a-f]{40}", revision):
            raise UserError(f"{packed.RESULTS}: the data's revision is {shown(revision)}, expected a commit")
        source = f"hub@{revision}"
    elif not data and source != "mini":
        raise UserError(f"the data set {shown(source)} is not at hand: name it with --dataset")
    attack_file = str(run.folder / packed.ATTACKS) if scored["attack_file"] else ""
    if attack_file and packed.ATTACKS not in submission.files:
        raise UserError(f"the run had an attack file, and {packed.ATTACKS} is missing")
    table = {**scored, "dataset": source, "attack_file": attack_file, "reference": "", "original": ""}
    settings: Settings = jsonio.check(
        {item.name: table[item.name] for item in fields(Settings)}, Settings, packed.RESULTS
    )
    if not settings.targets or not 1 <= settings.attack_prompts <= MOST_PROMPTS:
        raise UserError(f"{packed.RESULTS}: no targets, or attack_prompts is not from 1 to {MOST_PROMPTS}")
    return settings


def _check_run(run: Packed, submission: Submission, verdict: Verdict, settings: Settings) -> None:
    checkpoint = submission.scored["checkpoint"]
    if (limit := run.results["config"].get("limit")) is not None:
        verdict.findings.append(f"the run had --limit {shown(limit)}: not all documents were asked")
    if run.results.get("system_instruction"):
        verdict.findings.append("the run had a --system_instruction, which the task does not ask with")
    if manifest.FILE_NAME in submission.files:
        trained = manifest.read_manifest(run.folder)
        if trained is None or trained.weights not in [c.get("weights") for c in checkpoint or ()]:
            verdict.findings.append(f"{manifest.FILE_NAME} is not that of the scored checkpoint")
        elif submission.role == "submission" and not set(settings.targets) <= set(trained.targets):
            verdict.findings.append(f"{manifest.FILE_NAME}: the checkpoint did not forget all that was scored")
    if submission.weights != ((checkpoint or [{}])[0].get("weights") or None):
        verdict.findings.append(f"{packed.FILE_NAME}: the weights are not those that were scored")


@lru_cache(maxsize=64)
def _expected(task: str, settings: Settings) -> tuple[Docs, str] | None:
    """The documents that a task must have, as they are logged, and their fingerprint; None where it asks nothing."""
    try:
        rows = BENCHMARKS[task].records(settings)
    except NothingToAskError:
        return None
    return BENCHMARKS[task].documents(rows), fingerprint(record for record, _ in rows)


def _reference_answers(reference: Run, task: str, docs: Docs) -> Docs | None:
    """What a reference run answered to each document, None where it was asked others."""
    logged = [row["doc"] for row in reference.rows(task)] if task in reference.tasks else []
    columns = ("id", "entity", "question")
    if [[doc.get(c) for c in columns] for doc in logged] != [[doc.get(c) for c in columns] for doc in docs]:
        return None
    if not all(map(same_answers, logged, docs)):
        return None
    return [{key: doc[key] for key in ANSWERS if key in doc} for doc in logged]


def _check_numbers(run: Packed, verdict: Verdict, reference: Run | None) -> None:
    """Every reported number against the one that is formed here."""
    formed, results = verdict.numbers, run.results
    distances = sorted({m for task in run.tasks for m in run.settings(task)["aggregates"] if _is_distance(m)})
    # A model that was asked during the run rounded in batches of its own, and divergences need texts that no log has.
    exact = reference is not None and "reference_divergence" not in distances
    if distances and not exact:
        how = "those reported are not looked at" if reference else "left out; --reference RESULTS forms them"
        verdict.remarks.append(f"{', '.join(distances)}: {how}")

    def compare(where: str, stated: Mapping[str, Any], formed_here: Mapping[str, Any]) -> None:
        """Of distances a run reports its own choice."""
        left = {name: value for name, value in stated.items() if exact or not _is_distance(name)}
        right = {name: value for name, value in formed_here.items() if name in left or not _is_distance(name)}
        verdict.compare(where, left, right)

    for task, samples in verdict.samples.items():
        stated = run.settings(task)
        formed[task] = task_report(task, samples, stated)
        compare(f"{task}, aggregates", stated["aggregates"], formed[task])
        counts = {"original": len(samples), "effective": len(samples)}
        verdict.compare(f"{task}, n", [stated["n"], results["n-samples"][task]], [len(samples), counts])
    for group in GROUPS.keys() & _tree("elude"):  # also where the run asked for its parts alone
        formed[group] = group_report(group, verdict.samples)
    for place in ("results", "groups"):
        for name, row in results.get(place, {}).items():
            if name in formed:
                reported = {column: value for column, value in row.items() if column.endswith(",none")}
                compare(f"{place}, {name}", reported, as_row(formed[name]))
    if reference:
        for name in ("elude_forget", "elude_mia", "elude"):
            if far := [f"{metric} {row['value']:.4g}" for metric, row in formed[name].items() if _is_distance(metric)]:
                verdict.remarks.append(f"{name}, against the reference: {', '.join(far)}")


def _is_distance(column: str) -> bool:
    name = column.removesuffix(",none").removesuffix("_stderr")
    return name in METRICS and METRICS[name].is_distance


# ---- rows
class LearnedTemplate:
    """What a question and an answer look like to the model, as the first row of a task has them.

    After how many words a prompt is cut a tokenizer alone knows, so each row must show it: :meth:`of`.
    """

    _contexts: frozenset[str] = frozenset()  # of one row

    def __init__(self, run: Packed, task: str, settings: Settings) -> None:
        row: Any = next(packed.packed_rows(run.sample_file(task)), None)
        if row is None:
            raise UserError(f"{task}: no row in it")
        doc, arguments = row["doc"], _arguments(row)
        (_, first), (prompt, generation) = arguments[0], arguments[-1]
        guardrail = BENCHMARKS[task].system_text(doc, replace(settings, guardrail=True))
        system = guardrail if settings.guardrail else ""
        if not isinstance(generation, dict) or prompt.count(doc["question"]) != 1:
            raise UserError(f"{task}: the prompt of its first row is not a question in a template")
        if prompt.count(guardrail) != int(settings.guardrail):
            raise UserError(
                f"{task}: the run states guardrail {settings.guardrail}, the prompt of its first row does not"
            )
        cut = self.of(row).split(prompt)[1]
        self._before, _, self._after = first.removeprefix(cut).partition(doc["answer"])
        self._prompt = prompt.replace(doc["question"], "\1")
        self._prompt = self._prompt.replace(system, "\2") if system else self._prompt
        self.stop = generation["until"]
        self.end_is_asked = any(prompt == context + continuation for context, continuation in arguments[:-1])

    def prompt(self, question: str, system: str | None = None) -> str:
        return self._prompt.replace("\2", system or "").replace("\1", question)

    def answer(self, text: str) -> str:
        return f"{self._before}{text.strip()}{self._after}"

    def of(self, row: Mapping[str, Any]) -> LearnedTemplate:
        """This template with the cuts of a row's prompts."""
        of_row = copy(self)
        of_row._contexts = frozenset(context for context, *_ in _arguments(row))
        return of_row

    def split(self, prompt: str) -> tuple[str, str]:
        cuts = {cut_prompt(prompt, len(prompt.removeprefix(context).split())) for context in self._contexts}
        return max((cut for cut in cuts if cut[0] in self._contexts), default=cut_prompt(prompt))


class _Original(msgspec.Struct, forbid_unknown_fields=True):
    """What a run logs of the original model."""

    invented_name: str = ""
    generated: str = ""
    oddness_scores: list[tuple[float, int]] = []


class RowCheck:
    """Compares the rows of a run with what the data, the template and their own responses give."""

    def __init__(self, run: Packed, settings: Settings, renderer: Renderer | None) -> None:
        self.run, self.settings, self.renderer = run, settings, renderer
        self.learned = None if renderer else LearnedTemplate(run, run.tasks[0], settings)
        self.counts: dict[str, int] = {}  # tokens of an answer, by prompt and answer

    def check(self, task: str, docs: Docs, reference: Docs | None, verdict: Verdict) -> None:
        """Put the samples of a task into a verdict; what is wrong with a row becomes a finding.

        ``docs`` are as they are logged before anything was measured, ``reference`` what the reference run answered to
        each.
        """
        samples, logged = verdict.samples.setdefault(task, []), verdict.docs.setdefault(task, [])
        stated, wrong, count = self.run.settings(task), [], 0
        for count, row in enumerate(packed.packed_rows(self.run.sample_file(task), len(docs)), 1):
            try:
                answers = reference[count - 1] if reference else None
                samples.append(self._sample(task, row, docs[count - 1], stated, answers))
                logged.append(row["doc"])
            except Exception as error:  # whatever is in it
                wrong.append(f"row {count}: {_reason(error)}")
        if count != len(docs):
            wrong.append(f"{count} rows, and the data set has {len(docs)}")
        verdict.findings += [f"{task}, {line}" for line in wrong[:_MOST]]
        if len(wrong) > _MOST:
            verdict.findings.append(f"{task}, and {len(wrong) - _MOST} more")

    def _sample(
        self, task: str, row: dict[str, Any], expected: dict[str, Any], stated: Mapping[str, Any],
        reference: dict[str, Any] | None,
    ) -> Sample:  # fmt: skip
        """The sample of a row, which must be what is expected; otherwise a :class:`UserError` says what is not."""
        benchmark, doc = BENCHMARKS[task], row["doc"]
        _demand("the document", {name: value for name, value in doc.items() if name not in MEASURED}, expected)
        _demand("doc_id", row["doc_id"], expected["id"])
        _demand("target", row["target"], expected["answer"])
        template: Any = self.learned.of(row) if self.learned else self.renderer
        responses = row["filtered_resps"]
        requests = benchmark.requests(expected, template, self.settings, tokens=has_tokens(responses))
        _demand("the prompt", _arguments(row), [list(request.arguments) for request in requests])
        _demand("filtered_resps", [[response] for response in responses], row["resps"])
        counts = self._token_counts(doc, requests)
        answers = benchmark.answers(doc, responses, counts, template.end_is_asked)
        _demand("answer_scores", doc["answer_scores"], answers["answer_scores"])
        if benchmark.generates:
            if not isinstance(doc["generated"], str):
                raise UserError(f"generated is {shown(doc['generated'])}")
            _demand("generated", doc["generated"], answers["generated"])
        scores = [AnswerScore(*score) for score in answers["answer_scores"]]
        if line := contradiction(requests, responses, scores, self.renderer and self.renderer.tokenizer):
            raise UserError(line)
        doc.pop("reference", None)  # untrusted: distances are formed from the samples of the reference
        if reference:
            doc["reference"] = reference
        if (original := doc.get("original")) is not None:
            try:
                jsonio.check(original, _Original, "original")
            except UserError as error:
                raise UserError(str(error)[:_MOST_TEXT]) from None
        sample = benchmark.measure(row, stated)
        noted = benchmark.noted(sample)
        for name, value in noted.items():
            _demand(name, doc[name], value)
        if unmeasured := sorted((doc.keys() & {*MEASURED}) - {"original", "reference"} - answers.keys() - noted.keys()):
            raise UserError(f"{unmeasured[0]}: the responses do not give it")
        for name in row["metrics"]:
            if not _is_distance(name):
                _demand(name, row[name], sample.values[name])
        # lm-eval's own hash of the document covers nothing that is not compared above.
        for name, text in (("prompt_hash", requests[0].arguments[0]), ("target_hash", expected["answer"])):
            _demand(name, row[name], hashlib.sha256(text.encode()).hexdigest())
        return sample

    def _token_counts(self, doc: Mapping[str, Any], requests: Sequence[Request]) -> list[int]:
        """Tokens of the answer of each request, which must be those stated; 0 for the end of a prompt."""
        stated = [tokens for _, tokens in doc["answer_scores"]]
        if not all(type(tokens) is int and tokens > 0 for tokens in stated):
            raise UserError("answer_scores: a number of tokens is not a whole number above 0")
        scored = [request for request in requests if request.kind != "generate_until"]
        answers = [request for request in scored if not request.asks_end]
        counts = [self._answer_tokens(request, tokens) for request, tokens in zip(answers, stated, strict=False)]
        _demand("answer_scores, tokens", stated, counts)
        left = iter(counts)
        return [0 if request.asks_end else next(left, 0) for request in scored]

    def _answer_tokens(self, request: Request, stated: int) -> int:
        """Tokens of an answer: the tokenizer's, otherwise what was first stated of the same request."""
        text = "".join(request.arguments[:2])
        if self.renderer and text not in self.counts:
            ids, start = self.renderer.encode_pair(request.prompt, text[len(request.prompt) :])
            self.counts[text] = len(ids) - start
        return self.counts.setdefault(text, stated)


def _demand(what: str, stated: Any, formed: Any) -> None:
    if differs := difference(stated, formed):
        raise UserError(f"{what}{differs}")


def _arguments(row: Mapping[str, Any]) -> list[list[Any]]:
    """What the model was asked, as lm-eval logs it."""
    table = row["arguments"]
    return [[table[f"gen_args_{i}"][f"arg_{j}"] for j in range(len(table[f"gen_args_{i}"]))] for i in range(len(table))]
