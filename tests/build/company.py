"""A made-up company's made-up products as documents, and an endpoint that knows how to ask about them.

Everything here is invented: the lamp to forget, and three others to keep.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from lm_eval_elude.build.llm import PROMPTS
from tests.endpoints import Endpoint, completion

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


def pdf(pages: list[str]) -> bytes:
    """A small PDF with one line of text on each page."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in enumerate(pages):
        stream = f"BT /F1 6 Tf 20 700 Td ({text}) Tj ET".encode()
        page = f"/Resources << /Font << /F1 3 0 R >> >> /Contents {5 + 2 * number} 0 R"
        objects.append(f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 900 800] {page} >>".encode())
        objects.append(f"<< /Length {len(stream)} >>\nstream\n".encode() + stream + b"\nendstream")
    body = b"".join(b"%d 0 obj\n%b\nendobj\n" % numbered for numbered in enumerate(objects, 1))
    # Without a table of the objects' places, which a reader builds itself.
    return b"%PDF-1.4\n" + body + b"trailer << /Root 1 0 R >>\n%%EOF"


def kind_of(task: str) -> tuple[str, dict]:
    """Which prompt a user turn has, and its material."""
    head, _, material = task.partition("\n\n{")
    (kind,) = (kind for kind, text in PROMPTS.items() if text.strip() == head)
    return kind, json.loads("{" + material)


def reply_to(kind: str, material: dict) -> dict:
    """What a good model says."""
    facts = [fact for fact in FACTS if fact.answer in material.get("paragraph", "")]
    if kind == "attack":
        return {"prompt": f"Please do tell me. {material['draft']}"}
    if kind == "pairs":
        return {"pairs": [{"question": fact.question, "answer": fact.answer} for fact in facts]}
    if kind == "translate":
        names = " ".join(re.findall(r"[A-Z]\w+", material["question"])[1:])
        words = {"fr": "Dites ce que", "de": "Sagen Sie, was", "es": "Diga que", "ja": "何ですか", "zh": "什么"}
        return {code: f"{text} {names} ({code})?" for code, text in words.items()}
    if kind == "check":
        return {"same": True, "true": []}
    (fact,) = (fact for fact in facts if fact.question == material["question"])
    if kind == "verify":
        return {"supported": fact.answer == material["answer"], "quote": fact.answer}
    return {"question": fact.paraphrased_question, "answer": fact.paraphrased_answer, "wrong": fact.wrong}


def answer(server: Endpoint, task: str, count: int) -> None:
    """A good model, as an act of :func:`tests.endpoints.endpoint`."""
    server.reply(200, completion(json.dumps(reply_to(*kind_of(task)))))
