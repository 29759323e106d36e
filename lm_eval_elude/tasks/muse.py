"""MUSE (Shi et al. 2024, arXiv 2407.06460), asked and scored as its released code does (commit fcd6651).

Of the News and the Books corpus texts to go on with (VerbMem), questions after examples (KnowMem) and texts for
membership inference (PrivLeak). A folder holds what the authors' ``load_data.py`` writes. A document of KnowMem:

    {"id": 0, "question": "Question: Who lost?\\nAnswer: ...\\n\\nQuestion: Who won?\\nAnswer: ", "answer": "...",
     "plain_question": "Who won?"}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lm_eval_elude.data.formats import load_configuration
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.metrics.estimates import combine
from lm_eval_elude.metrics.membership import auc, min_k
from lm_eval_elude.metrics.samples import Doc, Numbers, Sample, Values, answer_values
from lm_eval_elude.metrics.text import rouge_l_f1
from lm_eval_elude.tasks import settings as read
from lm_eval_elude.tasks.task import Settings, Task, TaskGroup, documents
from lm_eval_elude.text.chat import RAW, Renderer, Texts

# AUC of Min-40 %, held-out against forgotten texts, of the authors' retrained models (Llama-2 7B; ICLM 7B).
RETRAINED = {"news": 0.4772, "books": 0.5393}
CONTINUATION = 128  # tokens
STOP = ("\n\n", "\nQuestion", "Question:")
KEYS = {"muse_data": read.text, "muse_evaluator": read.one_of("released", "fixed")}
Rows = Iterator[tuple[QARecord, dict[str, Any]]]


@dataclass(frozen=True)
class MuseSettings(Settings):
    """What a run scores; ``evaluator`` is ``released``, or ``fixed``: KnowMem's prompt does not end with the space that
    words begin with, and BOS is none of the 128 tokens of VerbMem's reference.
    """

    evaluator: str = "released"


def resolve(metadata: Mapping[str, Any]) -> MuseSettings:
    values = read.read_metadata(metadata, KEYS)
    return MuseSettings((), values.get("muse_data", "muse"), evaluator=values.get("muse_evaluator", "released"))


def rows(settings: MuseSettings, corpus: str, name: str, split: str, *columns: str) -> Iterator[list[str]]:
    """The texts in some columns."""
    place = f"muse-bench/MUSE-{corpus.title()}" if settings.dataset == "muse" else settings.dataset
    for row in load_configuration(place, name, split, [f"{corpus}/{name}/{split}"], columns):
        yield [row[column] for column in columns]


def continuations(corpus: str, settings: MuseSettings) -> Rows:
    return ((QARecord("", *pair), {}) for pair in rows(settings, corpus, "verbmem", "forget", "prompt", "gt"))


def cut(doc: dict[str, Any], settings: MuseSettings, renderer: Renderer) -> None:
    """Leave the first tokens of the reference; the released code counts BOS among them."""
    ids = renderer.tokenizer.encode(doc["answer"], add_special_tokens=settings.evaluator == "released")
    doc["answer"] = renderer.tokenizer.decode(ids[:CONTINUATION], skip_special_tokens=True)


def questions(split: str, corpus: str, settings: MuseSettings) -> Rows:
    examples = rows(settings, corpus, "knowmem", f"{split}_qa_icl", "question", "answer")
    before = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in examples)
    end = "\nAnswer: " if settings.evaluator == "released" else "\nAnswer:"
    for question, answer in rows(settings, corpus, "knowmem", f"{split}_qa", "question", "answer"):
        yield QARecord("", f"{before}Question: {question}{end}", answer), {"plain_question": question}


def texts(corpus: str, settings: MuseSettings) -> Rows:
    for split in ("forget", "holdout"):
        for (text,) in rows(settings, corpus, "privleak", split, "text"):
            yield QARecord("", text, text), {"split": split}


def answered(doc: Doc) -> Values:
    own = {"muse_rouge": rouge_l_f1(doc["answer"], doc["generated"])}
    return own | answer_values(doc, forgotten=True, choice=False)


def membership(doc: Doc) -> Values:
    """Min-40% of a text, and its split; without log-probabilities of single tokens the split alone."""
    scores = [min_k(tokens[0], 0.4) for tokens in doc.get("token_scores", ())]
    return {"split": doc["split"]} | {name: score for score in scores for name in ("muse_auc", "muse_privleak")}


def privleak(corpus: str, samples: Sequence[Sample]) -> Numbers:
    """AUC of held-out against forgotten texts, and its distance from that of the retrained model as a share."""
    sides = [
        [(s.record, s.values["muse_auc"]) for s in samples if s.values["split"] == split and "muse_auc" in s.values]
        for split in ("holdout", "forget")
    ]
    area, before = auc(*sides), RETRAINED[corpus]
    return {"muse_auc": area, "muse_privleak": combine(area.value / before - 1, [area], [1 / before])}


def _generated(docs: Any, stop: tuple[str, ...] = (), **more: Any) -> Task:
    return Task(
        docs=lambda settings: documents(docs(settings), "MUSE"),
        measure=lambda doc, settings: answered(doc),
        metrics=("muse_rouge", "rougeL_recall", "repetition"),
        resolve=resolve,
        questions=None,
        renderer=lambda settings, tokenizer, template: Renderer(tokenizer, RAW._replace(stop=stop)),
        **more,
    )


def _of_corpus(corpus: str) -> dict[str, Task]:
    return {
        "verbmem": _generated(partial(continuations, corpus), forgotten=True, new_tokens=CONTINUATION, prepare=cut),
        "knowmem_forget": _generated(partial(questions, "forget", corpus), STOP, forgotten=True, new_tokens=32),
        "knowmem_retain": _generated(partial(questions, "retain", corpus), STOP, new_tokens=32),
        "privleak": Task(
            docs=lambda settings: documents(texts(corpus, settings), "MUSE"),
            measure=lambda doc, settings: membership(doc),
            metrics=("muse_auc", "muse_privleak"),
            resolve=resolve,
            forgotten=True,
            generated=0,
            token_scores=True,
            renderer=lambda settings, tokenizer, template: Texts(tokenizer),
            estimate=partial(privleak, corpus),
        ),
    }


TASKS = {f"muse_{corpus}_{name}": task for corpus in RETRAINED for name, task in _of_corpus(corpus).items()}
GROUPS = {f"muse_{c}": TaskGroup(tuple(n for n in TASKS if f"_{c}_" in n), lambda tasks: {}) for c in RETRAINED}
