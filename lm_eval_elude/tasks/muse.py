"""MUSE (Shi et al. 2024, arXiv 2407.06460), asked and scored as its released code does (commit fcd6651).

The News and Books corpora, each with texts to go on with (VerbMem), questions with examples (KnowMem) and texts for
membership inference (PrivLeak). A folder holds what the authors' ``load_data.py`` writes. A document of KnowMem:

    {"id": 0, "question": "Question: ...\\nAnswer: ...\\n\\nQuestion: Who won?\\nAnswer: ", "answer": "...",
     "plain_question": "Who won?"}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lm_eval_elude.data.hub import HubData
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.errors import UserError
from lm_eval_elude.metrics.estimates import combine
from lm_eval_elude.metrics.membership import auc, min_k
from lm_eval_elude.metrics.samples import Doc, Numbers, Sample, Values, answer_values
from lm_eval_elude.metrics.text import rouge_l_f1
from lm_eval_elude.tasks import settings as read
from lm_eval_elude.tasks.task import Settings, Task, TaskGroup, documents
from lm_eval_elude.text.chat import RAW, Renderer, Texts

HUBS = {
    corpus: HubData("muse", f"muse-bench/MUSE-{corpus.title()}", "README.md", "", "muse_data in --metadata a folder")
    for corpus in ("news", "books")
}
# Of Min-40 %, forgotten against held-out texts, of the authors' retrained models (Llama-2 7B and ICLM 7B).
RETRAINED_AUC = {"news": 0.4772, "books": 0.5393}
REFERENCE_TOKENS = 128  # of VerbMem's continuation and of its reference
KEYS: dict[str, read.Reader] = {
    "muse_data": read.text,
    "muse_evaluator": read.one_of("released", "fixed"),
    "muse_retrained_auc": read.share,
}


@dataclass(frozen=True)
class MuseSettings(Settings):
    """What a run scores.

    Attributes:
        evaluator: ``released``, or ``fixed``: KnowMem's prompts end without a space, after which tokenizers in the
            manner of Llama-2's begin no word, and BOS is none of the 128 tokens of VerbMem's reference.
        retrained_auc: ``muse_auc`` of the retrained model, 0 for that of the authors'.
    """

    evaluator: str = "released"
    retrained_auc: float = 0.0


def resolve(metadata: Mapping[str, Any]) -> MuseSettings:
    values = read.read_metadata(metadata, KEYS)
    own, evaluator = values.get("muse_retrained_auc", 0.0), values.get("muse_evaluator", "released")
    return MuseSettings((), values.get("muse_data", "muse"), evaluator=evaluator, retrained_auc=own)


def rows(corpus: str, configuration: str, split: str, settings: MuseSettings, *columns: str) -> list[list[str]]:
    """The texts of some columns; UserError where a row lacks one."""
    found = []
    for where, row in HUBS[corpus].rows(settings.dataset, configuration, split, f"{corpus}/{configuration}/{split}"):
        if not all(isinstance(row.get(column), str) for column in columns):
            raise UserError(f"{where}: expected are texts in {' and '.join(columns)}")
        found.append([row[column] for column in columns])
    return found


def continuations(corpus: str, settings: MuseSettings) -> Iterator[tuple[QARecord, dict[str, Any]]]:
    return ((QARecord("", *row), {}) for row in rows(corpus, "verbmem", "forget", settings, "prompt", "gt"))


def cut(doc: dict[str, Any], settings: MuseSettings, renderer: Renderer) -> None:
    """Leave the first tokens of the reference; the released code counts BOS among them."""
    ids = renderer.tokenizer.encode(doc["answer"], add_special_tokens=settings.evaluator == "released")
    doc["answer"] = renderer.tokenizer.decode(ids[:REFERENCE_TOKENS], skip_special_tokens=True)


def questions(corpus: str, split: str, settings: MuseSettings) -> Iterator[tuple[QARecord, dict[str, Any]]]:
    examples = rows(corpus, "knowmem", f"{split}_qa_icl", settings, "question", "answer")
    before = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in examples)
    space = " " * (settings.evaluator == "released")
    for question, answer in rows(corpus, "knowmem", f"{split}_qa", settings, "question", "answer"):
        yield QARecord("", f"{before}Question: {question}\nAnswer:{space}", answer), {"plain_question": question}


def texts(corpus: str, settings: MuseSettings) -> Iterator[tuple[QARecord, dict[str, Any]]]:
    for split in ("forget", "holdout"):
        for (text,) in rows(corpus, "privleak", split, settings, "text"):
            yield QARecord("", text, text), {"split": split}


def answered(doc: Doc, forgotten: bool) -> Values:
    own = {"muse_rouge": rouge_l_f1(doc["answer"], doc["generated"])}
    return answer_values(doc, forgotten=forgotten, choice=False) | own


def membership(doc: Doc) -> Values:
    """Min-40% of a text, and its split; without log-probabilities of single tokens the split alone."""
    scores = [min_k(tokens[0], 0.4) for tokens in doc.get("token_scores", ())]
    return {"split": doc["split"]} | {name: score for score in scores for name in ("muse_auc", "muse_privleak")}


def privleak(corpus: str, samples: Sequence[Sample], settings: Mapping[str, Any]) -> Numbers:
    """AUC of held-out against forgotten texts, and how far it is from that of the retrained model."""
    sides = {"forget": [], "holdout": []}  # type: ignore[var-annotated]
    for sample in samples:
        if "muse_auc" not in sample.values:
            return {}
        sides[sample.values["split"]].append((sample.record, sample.values["muse_auc"]))
    area, own = auc(sides["holdout"], sides["forget"]), settings.get("retrained_auc") or RETRAINED_AUC[corpus]
    return {"muse_auc": area, "muse_privleak": combine((area.value - own) / own, [area], [1 / own])}


def _generated(docs: Any, forgotten: bool, new_tokens: int, stop: Sequence[str] = (), prepare: Any = None) -> Task:
    return Task(
        docs=lambda settings: documents(docs(settings), "MUSE"),
        measure=lambda doc, settings: answered(doc, forgotten),
        metrics=("muse_rouge", "rougeL_recall", "repetition"),
        resolve=resolve,
        forgotten=forgotten,
        questions=None,
        new_tokens=new_tokens,
        renderer=lambda settings, tokenizer, template: Renderer(tokenizer, RAW._replace(stop=tuple(stop))),
        prepare=prepare,
    )


def _of_corpus(corpus: str) -> dict[str, Task]:
    stop = ("\n\n", "\nQuestion", "Question:")
    return {
        f"muse_{corpus}_verbmem": _generated(partial(continuations, corpus), True, REFERENCE_TOKENS, prepare=cut),
        f"muse_{corpus}_knowmem_forget": _generated(partial(questions, corpus, "forget"), True, 32, stop),
        f"muse_{corpus}_knowmem_retain": _generated(partial(questions, corpus, "retain"), False, 32, stop),
        f"muse_{corpus}_privleak": Task(
            docs=lambda settings: documents(texts(corpus, settings), "MUSE"),
            measure=lambda doc, settings: membership(doc),
            metrics=("muse_auc", "muse_privleak"),
            resolve=resolve,
            forgotten=True,
            questions=lambda doc: [(doc["question"], [doc["answer"]])],
            generated=0,
            token_scores=True,
            renderer=lambda settings, tokenizer, template: Texts(tokenizer),
            estimate=partial(privleak, corpus),
        ),
    }


TASKS: dict[str, Task] = {name: task for corpus in HUBS for name, task in _of_corpus(corpus).items()}
GROUPS = {f"muse_{corpus}": TaskGroup(tuple(_of_corpus(corpus)), lambda tasks: {}) for corpus in HUBS}
