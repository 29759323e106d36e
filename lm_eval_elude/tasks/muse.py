"""MUSE (Shi et al. 2024, arXiv 2407.06460), asked and scored as its released code does (commit fcd6651).

Of the News and the Books corpus texts to go on with (VerbMem), questions after examples (KnowMem) and texts for
membership inference (PrivLeak). A folder holds what the authors' ``load_data.py`` writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from lm_eval_elude.data.formats import load_configuration
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.metrics.estimates import combine
from lm_eval_elude.metrics.membership import auc, min_k
from lm_eval_elude.metrics.samples import Doc, Numbers, Sample, Values, answer_values
from lm_eval_elude.metrics.text import rouge_l_f1
from lm_eval_elude.tasks import settings as read
from lm_eval_elude.tasks.task import Published, Task, TaskGroup, documents
from lm_eval_elude.text.chat import RAW, Renderer, Texts

# AUC of Min-40 %, held-out against forgotten texts, of the authors' retrained models (Llama-2 7B; ICLM 7B).
RETRAINED = {"news": 0.4772, "books": 0.5393}
STOP = ("\n\n", "\nQuestion", "Question:")
# ``fixed``: KnowMem's prompt does not end with the space of words, and BOS is none of VerbMem's 128 tokens.
KEYS = {"muse_data": read.text, "muse_evaluator": read.one_of("released", "fixed")}
Docs = Iterator[tuple[QARecord, dict[str, Any]]]


def resolve(metadata: Mapping[str, Any]) -> Published:
    values = read.read_metadata(metadata, KEYS)
    return Published((), values.get("muse_data", "muse"), evaluator=values.get("muse_evaluator", "released"))


def rows(corpus: str, settings: Published, name: str, split: str, *columns: str) -> Iterator[list[str]]:
    place = f"muse-bench/MUSE-{corpus.title()}" if settings.dataset == "muse" else settings.dataset
    found = load_configuration(place, name, split, [f"{corpus}/{name}/{split}"], columns)
    return ([row[column] for column in columns] for row in found)


def continuations(corpus: str, settings: Published) -> Docs:
    return ((QARecord("", p, text), {}) for p, text in rows(corpus, settings, "verbmem", "forget", "prompt", "gt"))


def cut(doc: dict[str, Any], settings: Published, renderer: Renderer) -> dict[str, Any]:
    """A continuation of 128 tokens at most, among which the released code counts BOS."""
    ids = renderer.tokenizer.encode(doc["answer"], add_special_tokens=settings.evaluator == "released")
    return doc | {"answer": renderer.tokenizer.decode(ids[:128], skip_special_tokens=True)}


def questions(split: str, corpus: str, settings: Published) -> Docs:
    examples = rows(corpus, settings, "knowmem", f"{split}_qa_icl", "question", "answer")
    before = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in examples)
    end = "\nAnswer: " if settings.evaluator == "released" else "\nAnswer:"
    for question, answer in rows(corpus, settings, "knowmem", f"{split}_qa", "question", "answer"):
        yield QARecord("", f"{before}Question: {question}{end}", answer), {"plain_question": question}


def texts(corpus: str, settings: Published) -> Docs:
    for split in ("forget", "holdout"):
        for (text,) in rows(corpus, settings, "privleak", split, "text"):
            yield QARecord("", text, text), {"split": split}


def values(doc: Doc) -> Values:
    """ROUGE of an answer; of a text its split and Min-40%, where the backend has log-probabilities of single tokens."""
    if "generated" in doc:
        own = {"muse_rouge": rouge_l_f1(doc["answer"], doc["generated"])}
        return own | answer_values(doc, forgotten=True, choice=False)
    scores = [min_k(tokens[0], 0.4) for tokens in doc.get("token_scores", ())]
    return {"split": doc["split"]} | {name: score for score in scores for name in ("muse_auc", "muse_privleak")}


def privleak(corpus: str, samples: Sequence[Sample]) -> Numbers:
    """AUC of held-out against forgotten texts, and its distance from that of the retrained model as a share."""
    scored = [(s.values["split"], (s.record, s.values["muse_auc"])) for s in samples if "muse_auc" in s.values]
    area = auc(*([pair for split, pair in scored if split == side] for side in ("holdout", "forget")))
    before = RETRAINED[corpus]
    return {"muse_auc": area, "muse_privleak": combine(area.value / before - 1, [area], [1 / before])}


def _task(docs: Any, metrics: tuple[str, ...], renderer: Any, forgotten: bool = True, **more: Any) -> Task:
    return Task(
        docs=lambda settings: documents(docs(settings), "MUSE"),
        measure=lambda doc, settings: values(doc),
        metrics=metrics,
        resolve=resolve,
        forgotten=forgotten,
        renderer=lambda settings, tokenizer, template: renderer(tokenizer),
        **more,
    )


def _of_corpus(corpus: str) -> dict[str, Task]:
    scores, membership = ("muse_rouge", "rougeL_recall", "repetition"), ("muse_auc", "muse_privleak")
    raw, asked = partial(Renderer, wording=RAW), partial(Renderer, wording=RAW._replace(stop=STOP))
    forget, retain = (partial(questions, split, corpus) for split in ("forget", "retain"))
    leaks: dict[str, Any] = {"generated": 0, "token_scores": True, "estimate": partial(privleak, corpus)}
    return {
        "verbmem": _task(partial(continuations, corpus), scores, raw, questions=None, prepare=cut),
        "knowmem_forget": _task(forget, scores, asked, questions=None, new_tokens=32),
        "knowmem_retain": _task(retain, scores, asked, forgotten=False, questions=None, new_tokens=32),
        "privleak": _task(partial(texts, corpus), membership, Texts, **leaks),
    }


TASKS = {f"muse_{corpus}_{name}": task for corpus in RETRAINED for name, task in _of_corpus(corpus).items()}
GROUPS = {f"muse_{c}": TaskGroup(tuple(n for n in TASKS if f"_{c}_" in n), lambda tasks: {}) for c in RETRAINED}
