"""A made-up company's made-up products as documents, and an endpoint that knows how to ask about them.

Everything here is invented: the lamp to forget, and three others to keep.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_elude.curate.build import Material, Report, build, from_folder, limit
from lm_eval_elude.curate.pairs import PROMPTS
from tests.endpoints import Act, Endpoint, completion, endpoint

TARGET = "Quorvane Lumo"
NEIGHBOURS = ("Quorvane Tarn", "Quorvane Sisk", "Quorvane Brae")
# Question, answer, reworded question, reworded answer, values of the four products, five wrong ones.
_KINDS = (
    (
        "When was the {} released?", "The {} was released in {v}.", "In what month did sales of the {} begin?",
        "Sales of the product began in {v}.", ("March 2017", "June 2012", "October 2014", "May 2019"),
        ("April 2016", "July 2011", "August 2015", "January 2018", "December 2010"),
    ),
    (
        "Who designed the {}?", "The {} was designed by {v}.", "Whose design is the {}?",
        "Its shape goes back to drawings of {v}.",
        ("Ilvane Drusk", "Perro Maltevin", "Sanna Okebright", "Tovald Quirre"),
        ("Marn Ellisford", "Jutta Prawnell", "Coll Abendrup", "Vessa Thornike", "Hobb Larrikan"),
    ),
    (
        "How much does the {} weigh?", "The {} weighs {v} grams.", "What is the weight in grams of the {}?",
        "On the scales it shows {v} grams.", ("412", "655", "238", "1190"),
        ("150", "305", "777", "920", "1502"),
    ),
    (
        "In which colour is the {} sold?", "The {} is sold only in {v}.", "What is the only colour of the {}?",
        "Buyers get it in {v} and nothing else.", ("cobalt blue", "moss green", "slate grey", "burnt orange"),
        ("pale pink", "ivory white", "deep red", "sand yellow", "jet black"),
    ),
    (
        "Where is the {} made?", "The {} is made in the town of {v}.", "Which town has the factory of the {}?",
        "The factory that turns it out stands in {v}.", ("Velmstead", "Orrinhaven", "Kestlow", "Brundmouth"),
        ("Upper Carrow", "Dunmarrow", "Fellgate", "Sorrenby", "Ashkeld"),
    ),
    (
        "What did the {} cost at first?", "The {} cost {v} crowns at first.", "What was the first price of the {}?",
        "Its price in the beginning was {v} crowns.", ("349", "129", "515", "78"),
        ("95", "210", "444", "602", "888"),
    ),
)  # fmt: skip


class Fact(NamedTuple):
    subject: str
    question: str
    answer: str
    paraphrased_question: str
    paraphrased_answer: str
    wrong: list[str]


FACTS = [
    Fact(
        name, question.format(name), answer.format(name, v=values[index]), other.format(name),
        reworded.format(v=values[index]), [reworded.format(v=value) for value in wrong],
    )
    for index, name in enumerate((TARGET, *NEIGHBOURS))
    for question, answer, other, reworded, values, wrong in _KINDS
]  # fmt: skip


def documents(folder: Path) -> Path:
    """Six documents in five formats: two about the target, one about each neighbour, one of small talk."""
    import docx

    folder.mkdir(parents=True)
    texts = {name: [fact.answer for fact in FACTS if fact.subject == name] for name in (TARGET, *NEIGHBOURS)}
    pairs = {name: [f"{a} {b}" for a, b in zip(facts[::2], facts[1::2], strict=True)] for name, facts in texts.items()}
    lumo, tarn, sisk, brae = pairs.values()
    rivals = f"People who look at the Quorvane Lumo also look at the {', the '.join(NEIGHBOURS)}."
    (folder / "lumo.txt").write_text("About the lamp\n\n" + "\n\n".join(lumo[:2]))
    (folder / "lumo-2.md").write_text(f"# More\n\n**{lumo[2]}**\n\n- {rivals}\n")
    html = "".join(f"<p>{text}</p>" for text in tarn)
    (folder / "tarn.html").write_text(f"<html><body><article><h1>Tarn</h1>{html}</article></body></html>")
    word = docx.Document()
    for text in sisk:
        word.add_paragraph(text)
    word.save(str(folder / "sisk.docx"))
    (folder / "brae.pdf").write_bytes(pdf(brae))
    (folder / "notes.txt").write_text("Nobody in particular is spoken of in this note, which is about the weather.\n")
    return folder


def pdf(pages: list[str], pack: Callable[[bytes], bytes] | None = None) -> bytes:
    """A small PDF with one line of text on each page (none where the text is empty), its pages packed by ``pack``."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in enumerate(pages):
        stream = (f"BT /F1 6 Tf 20 700 Td ({text}) Tj ET" if text else "0 0 m").encode()
        stream = pack(stream) if pack else stream
        page = f"/Resources << /Font << /F1 3 0 R >> >> /Contents {5 + 2 * number} 0 R"
        objects.append(f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 900 800] {page} >>".encode())
        filters = " /Filter /FlateDecode" if pack else ""
        objects.append(f"<< /Length {len(stream)}{filters} >>\nstream\n".encode() + stream + b"\nendstream")
    body = b"".join(b"%d 0 obj\n%b\nendobj\n" % numbered for numbered in enumerate(objects, 1))
    # Without a table of the objects' places, which a reader forms anew.
    return b"%PDF-1.4\n" + body + b"trailer << /Root 1 0 R >>\n%%EOF"


def kind_of(task: str) -> tuple[str, dict]:
    """Which of the five tasks a user turn is, and its material."""
    head, _, material = task.partition("\n\n{")
    starts = {text.split("{")[0][:20]: kind for kind, text in PROMPTS.items()}
    return next(kind for start, kind in starts.items() if head.startswith(start)), json.loads("{" + material)


def reply_to(kind: str, material: dict) -> dict:
    """What a good model says."""
    facts = [fact for fact in FACTS if fact.answer in material.get("paragraph", "")]
    if kind == "pairs":
        return {"pairs": [{"question": fact.question, "answer": fact.answer} for fact in facts]}
    if kind == "translate":
        # In scripts of their own, with the names and numbers kept.
        names = " ".join(re.findall(r"[A-Z]\w+", material["question"])[1:])
        words = {"fr": "Dites ce que", "de": "Sagen Sie, was", "es": "Diga que", "ja": "何ですか", "zh": "什么"}
        return {code: f"{text} {names} ({code})?" for code, text in words.items()}
    fact = next((fact for fact in facts if fact.question == material["question"]), None)
    if kind == "verify":
        right = fact is not None and fact.answer == material["answer"]
        return {"supported": right, "quote": fact.answer if fact else ""}
    if kind == "reword":
        assert fact
        return {"question": fact.paraphrased_question, "answer": fact.paraphrased_answer, "wrong": fact.wrong}
    return {"same": True, "true": []}


def answer(server: Endpoint, task: str, count: int) -> None:
    """A good model, as an act of :func:`tests.endpoints.endpoint`."""
    server.reply(200, completion(json.dumps(reply_to(*kind_of(task)))))


@lru_cache
def material_of(folder: Path) -> Material:
    return limit(from_folder(folder, TARGET, ("Lumo",), NEIGHBOURS, "mine"), 0)


def make(out: Path, folder: Path, url: str, **options: Any) -> Report:
    options = {"timeout": 5.0, "retries": 3, "thing": True} | options
    return build(out, material_of(folder), url=url, model="m", **options)


def made(act: Act, out: Path, folder: Path, **options: Any) -> tuple[Report, list[str]]:
    """What a build with this endpoint reports, and what the endpoint was asked."""
    with endpoint(act) as (url, tasks):
        return make(out, folder, url, **options), tasks


def tree(out: Path) -> dict[str, str]:
    """SHA-256 by name of all that the data set is made of; the journal has its rows in the order of the replies."""
    files = (path for path in out.rglob("*") if path.is_file() and path.name != "journal.jsonl")
    return {path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
