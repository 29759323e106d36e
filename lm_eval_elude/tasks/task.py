"""What a task is: its documents, what is asked of each, how it is measured, and which numbers it reports.

Nothing here needs torch or the harness: ``elude report`` measures a log with the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from lm_eval_elude.errors import UserError
from lm_eval_elude.metrics.samples import Doc, Numbers, Sample, Values, numbers
from lm_eval_elude.text.chat import Renderer


class NothingToAskError(UserError):
    """The data has nothing that the task could ask; a group leaves the task out with a line."""


@dataclass(frozen=True)
class Settings:
    """What a run scores; a benchmark's settings are a subclass.

    Attributes:
        targets: display names, () where the data have none.
        dataset: as a user names it.
        truth_ratio: mean of the wrong answers' probabilities, ``geometric`` or ``arithmetic``.
        seed: of everything that is sampled from the data, and of the membership attack.
    """

    targets: tuple[str, ...]
    dataset: str
    truth_ratio: Any = "geometric"
    seed: int = 0

    def system(self, doc: Doc) -> str:
        """The system text before a document's questions; "" for none."""
        return ""

    def new_tokens(self, task: Task, prompt_tokens: int) -> int:
        """How many tokens an answer may have after a prompt of so many."""
        return task.new_tokens

    def describe(self) -> dict[str, Any]:
        """Where the data come from, for the results file."""
        return {"dataset": self.dataset}


@dataclass(frozen=True)
class Published(Settings):
    """Of a benchmark with code of its own: ``evaluator`` says whose prompts are asked, and whether as released."""

    evaluator: str = "released"


# What a question with its answers is measured by.
ANSWERED = (
    "probability", "rougeL_recall", "truth_ratio", "mc_accuracy", "log_truth_ratio", "repetition", "refusal",
)  # fmt: skip


def answers(doc: Doc) -> list[tuple[str, list[str]]]:
    """Questions with the answers that are scored under each; most tasks have one, with all that the record has."""
    paraphrase = [doc["paraphrased_answer"]] if doc.get("paraphrased_answer") else []
    texts = [doc["answer"], *paraphrase, *doc.get("perturbed_answer", ()), *doc.get("named_answers", ())]
    return [(doc["question"], texts)]


class Task(NamedTuple):
    """One task of the harness.

    Attributes:
        docs: from the settings to the documents, in the order in which they are asked.
        measure: from a logged document and the settings of its run to the values of its metrics; what cannot be had is
            left out.
        metrics: what the task reports.
        resolve: from ``--metadata`` (with ``--model_args`` merged in) to the settings.
        forgotten: whether it asks what is to be forgotten.
        questions: what is scored of a document, in a fixed order; None where no answer is scored.
        generated: answers that are generated: none, a greedy one, or so many sampled at temperature 1.
        new_tokens: of a generated answer.
        token_scores: whether log-probabilities of single tokens are asked for, of the first answer to each question.
        renderer: from the settings, the model's tokenizer and the name of a template to what writes the prompts.
        prepare: changes what of a document depends on the tokenizer.
        estimate: from samples to numbers, in the place of those of :mod:`lm_eval_elude.metrics.samples`.
    """

    docs: Callable[[Any], list[dict[str, Any]]]
    measure: Callable[[Doc, Mapping[str, Any]], Values]
    metrics: tuple[str, ...]
    resolve: Callable[[Mapping[str, Any]], Any]
    forgotten: bool = False
    questions: Callable[[Doc], list[tuple[str, list[str]]]] | None = answers
    generated: int = 1
    new_tokens: int = 128
    token_scores: bool = False
    renderer: Callable[[Any, Any, str], Renderer] = lambda settings, tokenizer, name: Renderer(tokenizer, template=name)
    prepare: Callable[[dict[str, Any], Any, Renderer], dict[str, Any]] | None = None
    estimate: Callable[[Sequence[Sample]], Numbers] | None = None

    def sample(self, doc: Doc, settings: Mapping[str, Any]) -> Sample:
        """The sample of a logged document; ``settings`` are those in the results file."""
        record = doc.get("plain_question") or doc["question"]
        return Sample(doc.get("entity", ""), record, doc["id"], self.measure(doc, settings))

    def numbers(self, samples: Sequence[Sample], settings: Mapping[str, Any]) -> Numbers:
        """The numbers of its samples."""
        return self.estimate(samples) if self.estimate else numbers(samples, self.metrics, settings.get("seed", 0))


class TaskGroup(NamedTuple):
    """A group: its tasks and groups, and its numbers from the samples of all tasks below it."""

    children: tuple[str, ...]
    numbers: Callable[[Mapping[str, Sequence[Sample]]], Numbers]


def documents(rows: Iterable[tuple[Any, dict[str, Any]]], what: str) -> list[dict[str, Any]]:
    """Documents of (record, further columns) in the order in which they are asked; NothingToAskError for none.

    Targets take turns, so that a ``--limit`` takes from each.
    """
    targets: dict[str, list[dict[str, Any]]] = {}
    for record, more in rows:
        columns = {k: v for k, v in record.columns().items() if k != "translated_question"}
        targets.setdefault(columns.get("entity", ""), []).append(columns | more)
    docs = list(filter(None, chain.from_iterable(zip_longest(*targets.values()))))
    if not docs:
        raise NothingToAskError(f"no records to ask about ({what})")
    return [{"id": number, **doc} for number, doc in enumerate(docs)]
