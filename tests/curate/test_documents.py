"""Documents to text and paragraphs: what is read is all there, what cannot be read is said."""

import multiprocessing
import os
import random
import unicodedata
import zlib
from io import BytesIO
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import docx
import pytest
from docx.oxml import parse_xml
from docx.oxml.ns import nsdecls

from lm_eval_elude.curate import readers
from lm_eval_elude.curate.documents import (
    MARK,
    MAX_WORDS,
    Document,
    Paragraph,
    Problem,
    assign,
    find_neighbours,
    mentions,
    paragraphs,
    read_folder,
)
from lm_eval_elude.curate.readers import READERS, read_document
from lm_eval_elude.errors import UserError
from lm_eval_elude.text.letters import clean
from tests.curate.company import FACTS, documents, pdf


def document(text: str) -> Document:
    return Document("d", text, b"", "d", "", "")


def test_every_format_gives_every_fact_and_offsets_point_at_it(tmp_path):
    read, problems = read_folder(documents(tmp_path / "d"), "mine")
    assert [doc.name for doc in read] == ["brae.pdf", "lumo-2.md", "lumo.txt", "notes.txt", "sisk.docx", "tarn.html"]
    assert not problems and all(doc.raw for doc in read)
    parts = [(doc, part) for doc in read for part in paragraphs(doc)]
    for doc, part in parts:
        assert " ".join(doc.text[part.start : part.stop].split()) == part.text
    for fact in FACTS:
        assert sum(fact.answer in part.text for _, part in parts) == 1, fact.answer


def test_long_paragraphs_are_cut_at_sentences_and_nothing_is_lost():
    sentences = [f"This is the sentence with the number {n} in a long paragraph." for n in range(60)]
    parts = paragraphs(document("A heading\n\n" + " ".join(sentences) + "\n\nThe end of it is a line of its own here."))
    assert " ".join(part.text for part in parts[:-1]) == " ".join(sentences)
    assert all(len(part.text.split()) <= 220 and part.text.endswith(".") for part in parts)


def test_markdown_loses_its_marks_and_nothing_else():
    text = (
        b"---\ntitle: x\n---\n# A **b**\n\n- one [two](http://x) `three`\n\n```\ncode\n```\n> quoted __four__ 2 * 3 * 4"
        b"\n\nFive\n====\n![six](y.png) R&amp;D <b>seven</b>\\\neight\n\n<div>nine<!-- no --></div>\n\n    ten\n\n"
        b"[two]: http://x\n"
    )
    assert " ".join(read_document(".md", text).text.split()) == (
        "A b one two three quoted four 2 * 3 * 4 Five six R&D seven eight nine ten"
    )


@pytest.mark.parametrize("text", ["---\n\none two\n\n---\n\nthree", "```one``` two\n\n```\ncode\n```\n\nthree"])
def test_markdown_between_two_rules_or_after_a_line_of_code_is_not_lost(text):
    assert {"one", "two", "three"} <= {word.strip("`") for word in read_document(".md", text.encode()).text.split()}


def test_words_that_a_control_character_parts_are_not_joined():
    assert clean("page one.\x0cTwo\x0bthree\x85four\x00!").split() == ["page", "one.", "Two", "three", "four!"]


NUMBERED = [
    ("It was founded in the spring of\n1985. It grew\n1990. It shrank.",) * 2,
    ("- Founded in the spring of\n  1985. It grew.\n- Sold.", "Founded in the spring of\n1985. It grew.||Sold."),
    ("Text:\n1. one\n2. two\n   goes on\n3. three", "Text:||one||two\ngoes on||three"),
    ("Text:\n- a\n  1. one\n  2. two", "Text:||a||one||two"), ("- a\n7. b", "a||b"),
    ("Text.\n\n4. four\n5. five", "Text.||four||five"), ("# A\n4. four\nmore", "A||four\nmore"), ("3. c", "c"),
    ("# A\nIn\n1985. It grew.", "A||In\n1985. It grew."),
]  # fmt: skip


@pytest.mark.parametrize(("text", "blocks"), NUMBERED)
def test_a_number_within_a_markdown_paragraph_begins_no_list_and_is_not_lost(text, blocks):
    read = read_document(".md", text.encode()).text
    lines = ("\n".join(line.strip() for line in block.splitlines() if line.strip()) for block in read.split("\n\n"))
    assert "||".join(filter(None, lines)) == blocks


SCANNED = "a scanned PDF: 3 pages of images without text; run OCR on it first"
BAD = [
    (".txt", b"caf\xe9", "not UTF-8 text (byte 3)"), (".txt", b" \n", "no text in it"),
    (".txt", b"a\0b", "it holds NUL"),
    (".pdf", b"hello", "no PDF"), (".pdf", pdf(["", "", ""]), SCANNED), 
    (".docx", b"PK\3\4", "cannot be parsed (BadZipFile"),
    (".html", b"<html></html>", "no article text"), (".xls", b"x", "not one of .txt, .md"), ("", b"x", "not one of"),
]  # fmt: skip


@pytest.mark.parametrize(("ending", "content", "reason"), BAD)
def test_what_cannot_be_read_says_why(ending, content, reason):
    with pytest.raises(UserError) as error:
        read_document(ending, content)
    assert reason in str(error.value) and "\n" not in str(error.value)


def bomb(ending: str, folder: Path) -> bytes:
    """A small document that takes gigabytes or an hour to read."""
    if ending == ".md":
        return b"[" * 400_000
    if ending == ".pdf":
        return pdf([") Tj (spam" * 4_000_000], zlib.compress)
    docx.Document().save(str(folder / "small.docx"))
    with ZipFile(folder / "small.docx") as small, ZipFile(folder / "bomb.docx", "w", ZIP_DEFLATED) as large:
        for name in small.namelist():
            text = small.read(name)
            large.writestr(name, text.replace(b"<w:sectPr", b"<w:p/>" * 8_000_000 + b"<w:sectPr", 1))
    return (folder / "bomb.docx").read_bytes()


@pytest.mark.parametrize("ending", [".md", ".pdf", ".docx"])
def test_a_bomb_ends_at_the_limits_and_takes_nothing_with_it(ending, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "SECONDS", 1)
    content = bomb(ending, tmp_path)
    assert len(content) < 500_000
    with pytest.raises(UserError, match="cannot be read within 1 s and 1 GB of memory"):
        read_document(ending, content)


def test_all_text_of_a_word_file_is_read_once(tmp_path):
    document, text = docx.Document(), "<w:p><w:r><w:t>Of a control.</w:t></w:r></w:p>"
    document.add_paragraph("Before\ta tabulator.").paragraph_format.tab_stops.add_tab_stop(9)
    document.element.body.insert(1, parse_xml(f"<w:sdt {nsdecls('w')}><w:sdtContent>{text}</w:sdtContent></w:sdt>"))
    moved = "".join(f"<w:{tag}><w:r><w:t>Moved.</w:t></w:r></w:{tag}>" for tag in ("moveFrom", "moveTo"))
    document.element.body.insert(2, parse_xml(f"<w:p {nsdecls('w')}>{moved}</w:p>"))
    table = document.add_table(2, 2)
    table.cell(0, 0).text, table.cell(1, 0).merge(table.cell(1, 1)).text = "cell", "merged"
    inner = table.cell(0, 1).add_table(1, 2)
    inner.cell(0, 0).text, inner.cell(0, 1).text = "in", "ner"
    document.sections[0].header.paragraphs[0].text = "Of the header."
    document.save(file := BytesIO())
    read = read_document(".docx", file.getvalue())
    assert read.text.split("\n\n") == [
        "Before\ta tabulator.", "Of a control.", "Moved.", "cell", "in | ner", "merged", "Of the header.",
    ] and not read.left_out  # fmt: skip


def test_pages_with_something_on_them_and_no_text_are_named(tmp_path):
    text = "It was sold in the spring of 1985, and has been dark ever since then."
    drawn = f"{text}) Tj ET 0 0 9 9 re f BT (", " ) Tj ET 0 0 9 9 re f BT ( "
    (tmp_path / "part.pdf").write_bytes(pdf([text, drawn[1], "", drawn[0], drawn[1]]))
    (document,), (problem,) = read_folder(tmp_path, "")
    assert document.text.count(text) == 2
    assert problem == ("part.pdf", "no text on page 2, 5; run OCR on it first")


@pytest.mark.parametrize(
    "spelled", ["Sinéad O’Connor", unicodedata.normalize("NFD", "Sinéad O'Connor"), "Sin\u200déad O'Connor"]
)
def test_a_name_is_found_however_a_document_spells_it(spelled, tmp_path):
    (tmp_path / "a.txt").write_text(f"In the end it was {spelled} who recorded the song in a barn.")
    ((document,), _) = read_folder(tmp_path, "")
    assert mentions(document.text, [clean(spelled)]) == mentions(document.text, ["Sinéad O'Connor"]) == 1


@pytest.mark.parametrize("text", [
    "The song was by _Ada-May Brill_ alone.", "_By Ada-May Brill_", "The song was by *Ada-May Brill*.",
    "THE SONGS OF ADA-MAY BRILL", "It was Ada\u2010May Brill.", "It was Ada\u2011May Brill.", "See Ada-May Brill_2.",
    "*I* met *Ada-May Brill* then.",
])  # fmt: skip
def test_a_name_is_found_between_marks_in_capitals_and_with_typographic_hyphens(text, tmp_path):
    for ending in ("md", "txt"):
        (tmp_path / f"a.{ending}").write_text(text)
        assert mentions(read_folder(tmp_path, "")[0][0].text, ["Ada-May Brill"]) == 1
        (tmp_path / f"a.{ending}").unlink()


def test_what_a_build_keeps_and_what_is_hidden_is_no_source(tmp_path):
    folder = documents(tmp_path / "d")
    before = read_folder(folder, "")
    built = folder / "my-lumo"
    (built / "work" / "raw").mkdir(parents=True)
    (built / MARK).touch()
    for place in ("README.md", "work/raw/0.txt"):
        (built / place).write_text("What is said of the Quorvane Lumo in these lines was read before.")
    (folder / ".history").mkdir()
    (folder / ".history" / "lumo.txt").write_text("What is said of the Quorvane Lumo in these lines was taken out.")
    (folder / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    assert read_folder(folder, "") == before


def test_thirty_malformed_documents_are_each_read_or_named(tmp_path):
    rng = random.Random(5)
    good = {path.suffix: path.read_bytes() for path in documents(tmp_path / "good").iterdir()}
    folder = tmp_path / "bad"
    (folder / "deep").mkdir(parents=True)
    for number in range(30):
        ending = rng.choice([*READERS, ".PDF", ".xyz"])
        content = bytearray(good.get(ending, rng.choice([*good.values()])))
        for _ in range(rng.choice([1, 5, 50])):
            place = rng.randrange(len(content))
            if (cut := rng.randrange(4)) == 0:
                del content[place:]
                content += rng.randbytes(3)
            elif cut == 1:
                content[place:place] = rng.choice([b"<", b"[", b"\0", b"\xff\xfe", b"%PDF-1.7", b"&#x110000;"]) * 40
            else:
                content[place] = rng.randrange(256)
        (folder / rng.choice(["deep", "."]) / f"{number}{ending}").write_bytes(content)
    (folder / "link.txt").symlink_to("/etc/hostname")
    read, problems = read_folder(folder, "")
    assert len(read) + len(problems) == 31
    assert {doc.name for doc in read} | {problem.name for problem in problems} == {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.name != "deep"
    }
    assert len(problems) > 15 and all(problem.reason and "\n" not in problem.reason for problem in problems)
    for doc in read:
        doc.text.encode()
        paragraphs(doc)


def test_paragraphs_go_to_whom_they_name_and_else_to_their_documents_subject():
    texts = {
        "t": ["Ada Brill lives here.", "It is warm.", "Ada Brill met Cy Dorn."],
        "n": ["Cy Dorn lives there.", "He sings.", "Cy Dorn and Ev Fenn sing."],
        "x": ["It rains."],
    }
    parts = [Paragraph(name, n, n, text, "") for name, those in texts.items() for n, text in enumerate(those)]
    subjects = [part.subject for part in assign(parts, ["Ada Brill", "Ada"], ["Cy Dorn", "Ev Fenn"])]
    assert subjects == ["Ada Brill", "Ada Brill", "Ada Brill", "Cy Dorn", "Cy Dorn", "", ""]
    # Ev Fenn never stands beside the target, and who has no paragraph without it is no neighbour.
    assert find_neighbours(parts, ["Ada Brill"], 10) == ["Cy Dorn"]


def test_a_double_name_is_somebody_elses():
    assert mentions("Ada Brill's, pro-Ada Brill, an Ada Brill-led team", ["Ada Brill"]) == 2
    for text in ("Ada Brill-Fenn", "Eva-Ada Brill", "Ada Brillo", "Ada Brill-2"):
        assert mentions(f"It was {text} who came.", ["Ada Brill"]) == 0, text


def test_a_small_word_that_begins_a_sentence_is_no_part_of_a_name():
    texts = ["Ada Brill met Cy Dorn, Will Fenn and Max van Roy.", "When Cy Dorn left he was 40.", "Will Fenn sings.",
             "The Max van Roy of the play is 12."]  # fmt: skip
    texts += ["Ada Brill is not Ada Brill-Fenn.", "Ada Brill-Fenn flies."]
    parts = [Paragraph("d", n, n + 1, text, "") for n, text in enumerate(texts)]
    assert find_neighbours(parts, ["Ada Brill"], 10) == ["Cy Dorn", "Max van Roy", "Will Fenn"]


def test_a_sentence_without_an_end_is_cut_too():
    words = [f"w{number}" for number in range(1000)]
    text = " ".join(words)
    parts = paragraphs(document(text))
    assert [word for part in parts for word in part.text.split()] == words
    assert max(len(part.text.split()) for part in parts) == MAX_WORDS
    assert all(text[part.start : part.stop] == part.text for part in parts)


LONG = "Ada Brill lived in Köln – near the river – for nine years and then moved to another town."


@pytest.mark.parametrize(("encoding", "head", "problem"), [
    ("cp1252", '<meta charset="windows-1252">', ""), ("cp1252", "<meta content='text/html; charset=ISO-8859-1'>", ""),
    ("utf-8", "", ""), ("utf-16", "", ""),
    ("cp1252", '<?xml version="1.0" encoding="iso-8859-1"?>', ""),
    ("cp1252", "", "the page names no other encoding"), ("cp1252", "<meta charset=klingon>", "nor in klingon"),
])  # fmt: skip
def test_a_page_is_read_in_the_encoding_it_names_and_none_is_guessed(encoding, head, problem):
    page = f"{head}<html><head>{head}</head><body><article><p>{LONG}</p></article></body></html>".encode(encoding)
    if problem:
        with pytest.raises(UserError, match=problem):
            read_document(".html", page)
    else:
        assert read_document(".html", page).text == LONG


def test_a_folder_that_may_not_be_read_is_named(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "a.txt").write_text(LONG)
    (tmp_path / "closed").chmod(0)

    def as_nobody() -> None:
        os.chdir(tmp_path)  # the folders above may be closed, too
        if os.getuid() == 0:  # who may read everything
            os.setresuid(65534, 65534, 65534)
        assert read_folder(Path(), "mine") == ([], [Problem("closed", "a folder whose files may not be read")])

    process = multiprocessing.get_context("fork").Process(target=as_nobody)
    process.start()
    process.join()
    (tmp_path / "closed").chmod(0o700)
    assert process.exitcode == 0
