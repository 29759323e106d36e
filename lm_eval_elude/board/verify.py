"""A submission checked without trust: documents against the data loaded here, prompts, responses, every number.

Levels of proof, from the lowest: ``withheld`` (numbers follow from the sums, counts and stated values; texts were not
seen), ``recomputed`` (every number follows from the samples, and these are what the data and the template ask),
``rescored`` (a random part of the samples came out of the model again, see :mod:`~lm_eval_elude.board.rescore`),
``reproduced`` (all of them did).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_elude.attacks.builders import ATTACKS, CONTROL
from lm_eval_elude.board import submission as packed
from lm_eval_elude.board.submission import MEASURED, OF_TASK, Packed, Submission, Withheld, shown
from lm_eval_elude.core import dataset, manifest
from lm_eval_elude.core.chat import Renderer
from lm_eval_elude.core.records import DataError, fingerprint
from lm_eval_elude.core.sets import FORGET, WORLD
from lm_eval_elude.documents import (
    ATTACK,
    NothingToAskError,
    columns,
    compared_pairs,
    documents,
    guardrail,
    pairs,
)
from lm_eval_elude.results.numbers import TOKEN_ATTACKS, report
from lm_eval_elude.results.reference import beside, is_distance
from lm_eval_elude.results.runs import Run
from lm_eval_elude.results.samples import Sample
from lm_eval_elude.results.suites import GROUPS, suite, task_report
from lm_eval_elude.settings import MOST_PROMPTS, Settings

LEVELS = ("withheld", "recomputed", "rescored", "reproduced")
MIA = "elude_mia"
TASKS = ("elude_forget", "elude_retain", "elude_world", MIA, *(f"{ATTACK}{name}" for name in (*ATTACKS, CONTROL)))
OURS = ("elude_quality", "elude_attacks", "elude")
TOLERANCE = 1e-6  # of a number that is formed again, relative above 1
_MOST = 20  # findings of one task that are listed
_HASH = re.compile(r"[0-9a-f]{64}")
_ODD = (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError, OverflowError)


@dataclass
class Verdict:
    """What came of a submission.

    Attributes:
        findings: what is wrong, a line each; none is a pass.
        remarks: what could not be looked at.
        level: of proof, "" where something is wrong.
        submission: its first file, where it could be read.
        samples, numbers: formed here, where the rows could be read.
        docs: the logged documents by task, which the samples were measured from.
        digest: what names the submission.
    """

    findings: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    level: str = ""
    submission: Submission | None = None
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    docs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    digest: str = ""


def verify(
    folder: Path, *, data: str = "", renderer: Renderer | None = None, key: bytes = b"", reference: Run | None = None
) -> Verdict:
    """Check a submission.

    Args:
        folder: of the submission.
        data: the data set, where the submission's is a path on another machine.
        renderer: of the model's tokenizer, for prompts and token counts; without it the prompts must be of one form.
            It is never taken from the submission: a chat template is a program.
        key: of withheld texts, if they are to be compared too.
        reference: the run of the model that the submission names as its reference, for the distances to it; without
            it they are left out.
    """
    verdict = Verdict()
    try:
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder")
        _verify(folder, verdict, data, renderer, key, reference)
    except (DataError, manifest.ManifestError) as error:
        verdict.findings.append(str(error).replace(f"{folder}/", ""))
    except (*_ODD, OSError) as error:
        verdict.findings.append(f"cannot be read ({type(error).__name__}: {shown(str(error))})")
    if not verdict.findings and verdict.submission:
        verdict.level = "withheld" if verdict.submission.redacted else "recomputed"
    return verdict


def _verify(
    folder: Path, verdict: Verdict, data: str, renderer: Renderer | None, key: bytes, reference: Run | None
) -> None:
    packed.listing(folder)
    verdict.digest = packed.digest(folder)
    verdict.submission = submission = packed.read(folder)
    packed.check_files(folder, submission.files)
    run = Packed(folder)
    if odd := [name for name in run.results["configs"] if name not in TASKS and name.startswith("elude")]:
        raise DataError(f"{packed.RESULTS}: {shown(odd[0])} is no task of ELUDe")
    settings = _settings(run, submission, folder, data, key)
    _check_run(run, verdict, settings)
    expected = _expected(settings) if settings else None
    template = Template(renderer) if renderer else None
    known = reference if submission.scored.get("reference") else None
    for task in run.tasks:
        asked = expected.get(task) if expected is not None else None
        if expected is not None and asked is None:
            verdict.findings.append(f"{task}: the data set has nothing that it could ask")
            continue
        said = run.settings(task)
        docs = asked.docs if asked else None
        if submission.redacted:
            hide = Withheld(key, {**said, "targets": settings.targets}) if key and settings else None
            check = partial(_check_withheld, task, docs if hide else None, said, hide)
        else:
            assert settings and docs
            template = template or Template.learn(run, task, settings)
            check = partial(_check_row, task, docs, said, settings, template)
            if renderer and said["template"] != renderer.fingerprint:
                verdict.findings.append(f"{task}, the template is not that of the tokenizer given")
        samples = _rows(run, task, len(docs) if docs else said["n"], check, verdict)
        verdict.samples[task] = samples
        if known and samples:
            both = beside(samples, known.samples(task) if task in known.tasks else ())
            verdict.samples[task] = both or samples
            if both is None:
                verdict.findings.append(f"{task}: the reference {known.path} was scored on other documents")
        own = asked.fingerprint if asked else said["fingerprint"]
        _compare(verdict, f"{task}, fingerprint", [said["fingerprint"], submission.fingerprints.get(task)], [own] * 2)
    if lacking := [task for task in (expected or TASKS) if task not in run.tasks]:
        if expected is not None or lacking != [f"{ATTACK}cross_lingual"]:
            verdict.findings.append(f"{', '.join(lacking)}: not in the run")
    elif not verdict.findings:
        _check_numbers(run, verdict, known)
    if template and not renderer:
        verdict.remarks.append(
            "no tokenizer was given: token counts, and that the template is the model's, not looked at"
        )


# ---- the run as a whole
def _settings(run: Packed, submission: Submission, folder: Path, data: str, key: bytes) -> Settings | None:
    """What the run scored; None where texts and data are withheld."""
    common = [{name: value for name, value in run.settings(task).items() if name not in OF_TASK} for task in run.tasks]
    if any(other != submission.scored for other in common):
        raise DataError(f"{packed.RESULTS}: the tasks do not say the same of the run as {packed.FILE_NAME}")
    said = submission.scored
    _typed(said, targets=list, dataset=str, truth_ratio=str, guardrail=bool, attack_file=str, seed=int,
           attack_prompts=int, template=str, data=dict, versions=dict, checkpoint=list)  # fmt: skip
    if not said["targets"] or not all(isinstance(name, str) for name in said["targets"]):
        raise DataError(f"{packed.RESULTS}: targets must be names, got {shown(said['targets'])}")
    if said["truth_ratio"] not in ("geometric", "arithmetic"):
        raise DataError(f"{packed.RESULTS}: truth_ratio is {shown(said['truth_ratio'])}")
    if not 1 <= said["attack_prompts"] <= MOST_PROMPTS:
        raise DataError(f"{packed.RESULTS}: attack_prompts is {said['attack_prompts']}, expected 1 to {MOST_PROMPTS}")
    source = data or str(said["dataset"])
    targets = said["targets"]
    if submission.redacted:
        if not data:
            return None
        hide = Withheld(key, said)
        targets = [name for name in dataset.entities(data) if f"target-{hide.hash(name)[:12]}" in targets]
        if key and len(targets) != len(said["targets"]):
            raise DataError(f"the data set {data!r} with this key does not have the targets of the submission")
    elif source.startswith("hub"):
        source = _hub(said["data"])
    elif not data and source != "mini":
        raise DataError(f"the data set {shown(source)} is not at hand: name it with --dataset")
    file = folder / packed.ATTACKS
    if said["attack_file"] and not submission.redacted and packed.ATTACKS not in submission.files:
        raise DataError(f"the run had an attack file, and {packed.ATTACKS} is missing")
    return Settings(
        tuple(targets), source, said["truth_ratio"], said["guardrail"], str(file) if said["attack_file"] else "",
        said["seed"], attack_prompts=said["attack_prompts"],
    )  # fmt: skip


def _hub(described: Mapping[str, Any]) -> str:
    """The published data as of the commit that was scored; nothing else of the Hub is read."""
    if described.get("repository") != dataset.HUB_REPOSITORY or described.get("world") != dataset.HUB_WORLD_URL:
        raise DataError("the data set is not the published one: name the one it was with --dataset")
    revision = described.get("revision")
    if not isinstance(revision, str) or not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise DataError(f"{packed.RESULTS}: the data's revision is {shown(revision)}, expected a commit")
    return f"hub@{revision}"


def _check_run(run: Packed, verdict: Verdict, settings: Settings | None) -> None:
    found, submission = run.results, verdict.submission
    assert submission
    if found["config"].get("limit") is not None:
        verdict.findings.append(f"the run had --limit {shown(found['config']['limit'])}: not all documents were asked")
    if found.get("system_instruction"):
        verdict.findings.append("the run had a --system_instruction, which the task does not ask with")
    if manifest.FILE_NAME in submission.files:
        own = manifest.read_manifest(run.folder)
        digest = submission.files[manifest.FILE_NAME]
        identity = next((c for c in submission.scored["checkpoint"] if c.get("manifest") == digest), None)
        if own is None or identity is None or identity.get("weights") != own.weights:
            verdict.findings.append(f"{manifest.FILE_NAME} is not that of the scored checkpoint")
        elif submission.role == "submission" and settings and not set(settings.targets) <= set(own.targets):
            verdict.findings.append(f"{manifest.FILE_NAME}: the checkpoint did not forget all that was scored")
    weights = (submission.scored["checkpoint"] or [{}])[0].get("weights") or None
    if submission.weights != weights:
        verdict.findings.append(f"{packed.FILE_NAME}: the weights are not those that were scored")


class Expected(NamedTuple):
    """The documents that a task must have, as they are logged, and their fingerprint."""

    docs: list[dict[str, Any]]
    fingerprint: str


def _expected(settings: Settings) -> dict[str, Expected]:
    """The documents of every task that the data allows."""
    return {task: rows for task in TASKS if (rows := _asked(task, settings))}


@lru_cache(maxsize=64)
def _asked(task: str, settings: Settings) -> Expected | None:
    try:
        rows = documents(task, settings)
    except NothingToAskError:
        return None
    return Expected([columns(*row) for row in enumerate(rows)], fingerprint(record for record, _ in rows))


def _check_numbers(run: Packed, verdict: Verdict, reference: Run | None) -> None:
    """Every reported number against the one that is formed here."""
    found, results = verdict.numbers, run.results
    far = sorted({m for task in run.tasks for m in run.settings(task)["aggregates"] if is_distance(m)})
    # A model that was asked during the run rounded in batches of its own, and divergences need texts that no log has.
    exact = reference is not None and "reference_divergence" not in far
    if far and not exact:
        how = "those that the run reports are not looked at" if reference else "left out"
        verdict.remarks.append(f"{', '.join(far)}: {how}" + "; --reference RESULTS forms them" * (not reference))

    def stated(row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if exact or not is_distance(name.removesuffix(",none"))}

    for task, samples in verdict.samples.items():
        said = run.settings(task)
        found[task] = task_report(task, samples, said)
        _compare(verdict, f"{task}, aggregates", stated(said["aggregates"]), stated(found[task]))
        counts = {"original": len(samples), "effective": len(samples)}
        _compare(verdict, f"{task}, n", [said["n"], results["n-samples"][task]], [len(samples), counts])
    for group in OURS:  # also where the run asked for its parts alone
        found[group] = report(GROUPS[group], verdict.samples)
    for place in ("results", "groups"):
        for name, row in results.get(place, {}).items():
            if name in found:
                said = stated(_reported(row))  # of distances a task reports its own choice
                formed = {m: v for m, v in stated(_row(found[name])).items() if m in said or not is_distance(m[:-5])}
                _compare(verdict, f"{place}, {name}", said, formed)
    for name in ("elude_forget", MIA, "elude") if reference else ():
        far = [f"{metric} {row['value']:.4g}" for metric, row in found[name].items() if is_distance(metric)]
        verdict.remarks += [f"{name}, against the reference: {', '.join(far)}"] if far else []


def _reported(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name.endswith(",none")}


def _row(numbers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers as a table of lm-eval has them."""
    row: dict[str, Any] = {}
    for metric, value in numbers.items():
        row[f"{metric},none"] = value["value"]
        row[f"{metric}_stderr,none"] = "N/A" if math.isnan(value["stderr"]) else value["stderr"]
    return row


def _compare(verdict: Verdict, where: str, said: Any, formed: Any) -> None:
    if differs := _difference(said, formed):
        verdict.findings.append(f"{where}{differs}")


def _difference(said: Any, formed: Any) -> str:
    """Where two values differ first, and how; "" where they do not."""
    if said is formed or (type(said) in (dict, list, str) and said == formed):
        return ""
    if isinstance(formed, float) and type(said) in (int, float):
        both = math.isnan(said) and math.isnan(formed)
        same = both or math.isclose(said, formed, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        return "" if same else f": reported {said!r}, formed from the samples {formed!r}"
    if isinstance(formed, dict) and isinstance(said, dict):
        if odd := sorted(set(said) ^ set(formed)):
            return f": {shown(odd[0])} is {'missing' if odd[0] in formed else 'none of its numbers'}"
        return next((f", {shown(k)}{d}" for k in formed if (d := _difference(said[k], formed[k]))), "")
    if isinstance(formed, list | tuple) and isinstance(said, list) and len(said) == len(formed):
        return next((d for a, b in zip(said, formed, strict=True) if (d := _difference(a, b))), "")
    return "" if type(said) is type(formed) and said == formed else f": {shown(said)} instead of {shown(formed)}"


# ---- rows
class Template:
    """What a question and an answer look like to the model: from its tokenizer, or as learnt from the first row."""

    def __init__(self, renderer: Renderer) -> None:
        self.prompt: Callable[[str, str], str] = lambda question, system: renderer.prompt(question, system or None)
        self.answer, self.stop = renderer.answer, list(renderer.stop)
        self._renderer: Renderer | None = renderer
        self._lengths: dict[str, int] = {}
        self.seen: dict[tuple[str, str], int] = {}
        prompt = renderer.prompt("What do blue whales do?")
        self.space = self.count("", prompt) - self.count("", prompt.rstrip())

    @classmethod
    def learn(cls, run: Packed, task: str, settings: Settings) -> Template:
        """The form that the first row of a task has, which all rows of all tasks must then have."""
        row = next(packed.packed_rows(run.sample_file(task)))[1]
        doc, arguments = row["doc"], _arguments(row)
        context, asked = arguments[0][0], arguments[-1]
        system = guardrail(settings, doc["entity"])
        if not isinstance(asked[1], dict) or context.count(doc["question"]) != 1 or context.count(system or "\0") > 1:
            raise DataError(f"{task}: the prompt of its first row is not a question in a template")
        marked = context.replace(doc["question"], "\1")
        marked = marked.replace(system, "\2") if system else marked
        space = asked[0].removeprefix(context)
        lead, _, tail = arguments[0][1].removeprefix(space).partition(doc["answer"])
        self = cls.__new__(cls)
        self._renderer, self.seen = None, {}
        self.prompt = lambda question, told: marked.replace("\2", told).replace("\1", question) + space
        self.answer = lambda text: f"{lead}{text.strip()}{tail}"
        self.stop = asked[1]["until"]
        self.space = int(any(not arguments[i][1].strip() for i in range(len(arguments) - 1)))
        return self

    @property
    def counts(self) -> bool:
        """Whether there is a tokenizer to count with."""
        return self._renderer is not None

    def known(self, request: tuple[str, str], count: int) -> int:
        """Without a tokenizer: the count that the same request had before, or this one."""
        return self.seen.setdefault(request, count)

    def count(self, context: str, continuation: str) -> int:
        """Number of tokens of a continuation, by the tokenizer."""
        assert self._renderer
        for text in (context, context + continuation):
            if text and text not in self._lengths:
                self._lengths[text] = len(self._renderer.encode(text))
        return self._lengths[context + continuation] - (self._lengths[context] if context else 0)


def _rows(
    run: Packed, task: str, expected: int, check: Callable[[int, dict[str, Any]], Sample], verdict: Verdict
) -> list[Sample]:
    """The samples of a task, each row checked; what is wrong becomes findings."""
    samples, wrong, docs, count = [], [], [], 0
    for number, (_, row) in enumerate(packed.packed_rows(run.sample_file(task), expected)):
        count += 1
        try:
            samples.append(check(number, row))
            docs.append(row["doc"])
        except (DataError, *_ODD) as error:
            told = str(error) if isinstance(error, DataError) else f"cannot be read ({error!r:.80})"
            wrong.append(f"row {number + 1}: {told}")
    if count != expected:
        wrong.append(f"{count} rows, and the data set has {expected}")
    verdict.findings += [f"{task}, {line}" for line in wrong[:_MOST]]
    if len(wrong) > _MOST:
        verdict.findings.append(f"{task}, and {len(wrong) - _MOST} more")
    verdict.docs[task] = docs
    return samples


def _check_row(
    task: str, docs: Sequence[dict[str, Any]], said: Mapping[str, Any], settings: Settings, template: Template,
    number: int, row: dict[str, Any],
) -> Sample:  # fmt: skip
    """The sample of a row, which must be what the data, the template and its own responses give.

    Raises:
        DataError: it is not.
    """
    doc, expected = row["doc"], docs[number]
    own = {name: value for name, value in doc.items() if name not in MEASURED}
    _demand("the document", own, expected)
    _demand("doc_id", row["doc_id"], number)
    _demand("target", row["target"], expected["answer"])
    tokens = "prompt_tokens" in doc
    arguments = _arguments(row)
    requests = _requests(task, expected, template, settings, tokens)
    if tokens and len(arguments) == 2 * len(requests):  # asked again of a reference model
        reference = arguments[-1][2]
        requests += [(*request, reference) for request in requests]
    _demand("the prompt", [list(a) for a in arguments], [list(r) for r in requests])
    responses = row["filtered_resps"]
    _demand("filtered_resps", [[r] for r in responses], row["resps"])
    _demand("answer_scores", doc["answer_scores"], _scores(task, doc, requests, responses, template, tokens))
    if task != MIA:
        _demand("generated", doc["generated"], responses[-1])
    found = suite(task)
    assert found
    doc.pop("reference", None)  # nobody's word: a distance is formed from the reference's own samples
    sample = found.sample(row, said)
    for name, value in _logged(task, sample).items():
        if name in row or name in doc:
            _demand(name, row.get(name, doc.get(name)), value)
    if lacking := [name for name in row["metrics"] if name not in row]:
        raise DataError(f"{shown(lacking[0])} is missing")
    # lm-eval's own hash of the document covers nothing that is not compared above.
    for name, text in (("prompt_hash", requests[0][0]), ("target_hash", expected["answer"])):
        _demand(name, row[name], hashlib.sha256(text.encode()).hexdigest())
    return sample


def _demand(what: str, said: Any, formed: Any) -> None:
    if differs := _difference(said, formed):
        raise DataError(f"{what}{differs}")


def _arguments(row: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """What the model was asked, as lm-eval logs it."""
    table = row["arguments"]
    return [tuple(table[f"gen_args_{i}"][f"arg_{j}"] for j in range(len(table[f"gen_args_{i}"])))
            for i in range(len(table))]  # fmt: skip


def _requests(
    task: str, doc: Mapping[str, Any], template: Template, settings: Settings, tokens: bool
) -> list[tuple[Any, ...]]:
    """What a document must have been asked with."""
    requests: list[tuple[Any, ...]] = []
    first = ""
    for question, answers in compared_pairs(doc) if task == MIA else pairs(doc):
        prompt = template.prompt(question, guardrail(settings, doc["entity"]))
        first = first or prompt
        context = prompt.rstrip()
        space = prompt[len(context) :]
        requests += [(context, space + template.answer(answer)) for answer in answers]
        if template.space and not tokens:
            requests.append((context, space))
    if task != MIA:
        spec = WORLD if task == "elude_world" else FORGET
        requests.append((first, {"until": template.stop, "max_gen_toks": spec.max_new_tokens, "do_sample": False}))
    return requests


def _scores(
    task: str, doc: Mapping[str, Any], requests: Sequence[tuple[Any, ...]], responses: Sequence[Any],
    template: Template, tokens: bool,
) -> list[list[Any]]:  # fmt: skip
    """Sums of log-probabilities as the responses have them, with counts: the tokenizer's, else those that are said."""
    said = doc["answer_scores"]
    if not all(type(pair[1]) is int and pair[1] > 0 and len(pair) == 2 for pair in said):
        raise DataError("answer_scores: a number of tokens is not a whole number above 0")
    if tokens:
        skip = doc["prompt_tokens"]
        columns = [[float(value) for value in response[0]] for response in responses[:2]]
        if any(value > 0 for column in columns for value in column):
            raise DataError("a log-probability is above 0")
        if type(skip) is not int or skip < 0 or (template.counts and skip != template.space):
            raise DataError(f"prompt_tokens is {shown(skip)}")
        counts = []
        for request, column in zip(requests, columns, strict=False):
            own = len(column) - skip
            counts.append(template.count(*request[:2]) - skip if template.counts else template.known(request[:2], own))
        return [[float(sum(column[skip:])), count] for column, count in zip(columns, counts, strict=True)]
    group = len(compared_pairs(doc)[0][1]) if task == MIA else len(pairs(doc)[0][1])
    width = group + bool(template.space)
    found: list[list[Any]] = []
    for index, (request, response) in enumerate(zip(requests, responses, strict=True)):
        start, place = index - index % width, index % width
        if len(found) == len(said) or place == group:
            continue
        total, own = float(response[0]), said[len(found)][1]
        count = template.count(*request) if template.counts else template.known(request, own)
        if total > 0:
            raise DataError("a log-probability is above 0")
        if template.space:
            total -= float(responses[start + group][0])
            count -= template.space if template.counts else 0
        found.append([total, count])
    return found


def _logged(task: str, sample: Sample) -> dict[str, float]:
    """What a row says of its own sample, by column."""
    if task != MIA:
        own = {name: value for name, value in sample.values.items() if isinstance(value, float)}
        return own | {"forget_quality": own["quality"], "set_quality": own["quality"]}
    member, other = sample.values["loss"]
    found = {"member_loss": member, "non_member_loss": other}
    names = ("accuracy", "accuracy_std", "auc", "auc_low", "auc_high", "auc_distance")
    found |= {f"mia_{name}": other - member for name in names}
    return found | {n: sample.values[n][0] - sample.values[n][1] for n in TOKEN_ATTACKS if n in sample.values}


def _check_withheld(
    task: str, docs: Sequence[dict[str, Any]] | None, said: Mapping[str, Any], hide: Withheld | None,
    number: int, row: dict[str, Any],
) -> Sample:  # fmt: skip
    """A row without texts: probabilities and losses must follow from sums and counts."""
    doc, stated = row["doc"], row["stated"]
    _demand("id", doc["id"], number)
    for name in ("record", "document", "generated"):
        if not _HASH.fullmatch(doc[name]):
            raise DataError(f"{name} is no hash")
    found = suite(task)
    assert found
    # What texts would say is stated; all else follows.
    bare = {**doc, "question": doc["record"], "answer": "", "generated": "", "prompt_tokens": 0}
    bare.pop("prompt_tokens")
    sample = found.sample({"doc": bare, "filtered_resps": ()}, said)
    if task == MIA:
        _demand("loss", stated["loss"], list(sample.values["loss"]))
    else:
        names = ("probability", "truth_ratio", "truth_ratio_raw")
        _demand("stated", {n: stated[n] for n in names}, {n: sample.values[n] for n in names})
        for name in ("rougeL_recall", "degenerate", "refusal"):
            if not 0 <= stated[name] <= 1:
                raise DataError(f"{name} is {shown(stated[name])}, not from 0 to 1")
    if docs and hide:
        _demand("document", doc["document"], hide.document(docs[number]))
    return packed.withheld_sample(row)


def _typed(table: Mapping[str, Any], **kinds: type) -> None:
    for name, kind in kinds.items():
        if type(table.get(name)) is not kind:
            raise DataError(f"{packed.RESULTS}: {name} is {shown(table.get(name))}, expected {kind.__name__}")
