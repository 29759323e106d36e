"""TOFU (Maini et al. 2024, arXiv 2401.06121): four sets about made-up authors, real authors and the world.

The questions are asked as one of its evaluators asks them. Forget quality, the p-value of a Kolmogorov-Smirnov test
against a retained model, is a number of two runs: ``elude report --reference``. A document:

    {"id": 0, "question": "What does Hina Ameen write?", "answer": "...", "paraphrased_answer": "...",
     "perturbed_answer": ["...", ...]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from lm_eval_elude.data import tofu
from lm_eval_elude.data.sets import SetSpec
from lm_eval_elude.errors import UserError
from lm_eval_elude.metrics.samples import Doc, Numbers, Sample, answer_values, set_quality
from lm_eval_elude.tasks import settings as read
from lm_eval_elude.tasks.task import ANSWERED, Published, Task, TaskGroup, documents
from lm_eval_elude.text.chat import Renderer, Wording


class Evaluator(NamedTuple):
    """How an evaluator asks.

    Attributes:
        wording: of prompt and answer; None for the model's chat template.
        system: text of the system turn, "" for none.
        records: at most so many of a set, 0 for all.
        with_prompt: whether the prompt's tokens count among the 200 of an answer.
    """

    wording: Wording | None
    system: str
    records: int
    with_prompt: bool


# The released evaluator's two prompts (its loss takes in the answer's tag), and open-unlearning's.
EVALUATORS = {
    "released": Evaluator(Wording("Question: {question}\n", "Answer: "), "", 300, True),
    "released-llama2": Evaluator(Wording("[INST] {question} [/INST]", ""), "", 300, True),
    "open-unlearning": Evaluator(None, "You are a helpful assistant.", 0, False),
}
NEW_TOKENS = 200
KEYS: dict[str, read.Reader] = {
    "tofu_split": read.one_of(*tofu.RETAIN_OF),
    "tofu_data": read.text,
    "tofu_evaluator": read.one_of(*EVALUATORS),
}


@dataclass(frozen=True)
class TofuSettings(Published):
    """What a run scores; ``split`` is what was forgotten."""

    split: str = ""

    def system(self, doc: Doc) -> str:
        return EVALUATORS[self.evaluator].system

    def new_tokens(self, task: Task, prompt_tokens: int) -> int:
        return max(1, NEW_TOKENS - prompt_tokens * EVALUATORS[self.evaluator].with_prompt)

    def describe(self) -> dict[str, Any]:
        return tofu.HUB.describe(self.dataset)


def resolve(metadata: Mapping[str, Any]) -> TofuSettings:
    """What ``--metadata`` says, otherwise the checkpoint's manifest; UserError where nothing says which split."""
    values = read.read_metadata(metadata, KEYS)
    manifest = read.checkpoint_manifest(metadata)
    trained = manifest.settings if manifest else {}
    split = values.get("tofu_split") or trained.get("forget_split")
    if split not in tofu.RETAIN_OF:
        raise UserError(f"TOFU's tasks need tofu_split in --metadata, what was forgotten: {', '.join(tofu.RETAIN_OF)}")
    known = manifest.dataset if manifest and trained.get("forget_split") else tofu.HUB.source
    evaluator = values.get("tofu_evaluator") or trained.get("tofu_evaluator") or "released"
    return TofuSettings((), values.get("tofu_data", known), split=split, evaluator=evaluator)


def docs(spec: SetSpec, settings: TofuSettings) -> list[dict[str, Any]]:
    """The records of a set that the evaluator scores; where a row has no paraphrase the answer stands for it."""
    rows = tofu.load(settings.dataset, spec.stems[0].format(split=settings.split))
    rows = rows[: EVALUATORS[settings.evaluator].records or None]
    return documents(((replace(r, paraphrased_answer=r.paraphrased_answer or r.answer), {}) for r in rows), "TOFU")


def _task(spec: SetSpec) -> Task:
    quality = "forget_quality" if spec.forgotten else "set_quality"
    return Task(
        docs=partial(docs, spec),
        measure=lambda doc, settings: answer_values(doc, forgotten=spec.forgotten, choice=spec.choice),
        metrics=(quality, *ANSWERED),
        resolve=resolve,
        forgotten=spec.forgotten,
        new_tokens=NEW_TOKENS,
        renderer=lambda settings, tokenizer, name: Renderer(
            tokenizer, EVALUATORS[settings.evaluator].wording, template=name
        ),
    )


def _utility(tasks: Mapping[str, Sequence[Sample]]) -> Numbers:
    return {"model_utility": set_quality(*(tasks[name] for name, spec in tofu.SETS.items() if not spec.forgotten))}


TASKS = {name: _task(spec) for name, spec in tofu.SETS.items()}
GROUPS = {"tofu": TaskGroup(tuple(TASKS), _utility)}
