"""A folder of documents to paragraphs, each about the target, about a neighbour, or about nobody."""

import logging
import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from lm_eval_elude.build.checks import mentions
from lm_eval_elude.errors import UserError, reason
from lm_eval_elude.text.letters import clean
from lm_eval_elude.text.words import STOP

ENDINGS = (".txt", ".md", ".html", ".htm", ".pdf", ".docx")
MIN_WORDS, LONGEST = 8, 1500  # words of a paragraph that is no heading or the like; characters of one that is not cut
NEIGHBOURS = 10  # as in the paper (4.2)


class Document(NamedTuple):
    """A source as it was read."""

    address: str  # the file below the folder, or the permanent link of a page
    time: str  # of the last change, or of retrieval
    licence: str = ""


class Paragraph(NamedTuple):
    """A text to ask about; ``subject`` is whom it is about, "" for nobody or several."""

    document: Document
    text: str
    subject: str = ""


class Material(NamedTuple):
    """What a data set is made of. ``names`` has all names of each subject, the full one first; the target is first."""

    parts: list[Paragraph]
    names: dict[str, tuple[str, ...]]
    problems: list[str]  # files that were left out, with the reason


def from_folder(folder: Path, names: tuple[str, ...], neighbours: tuple[str, ...]) -> Material:
    """Read a folder; without ``neighbours`` they are those most often named beside the target."""
    from markitdown import MarkItDown
    from pdfminer.high_level import extract_text

    logging.getLogger("pdfminer").setLevel(logging.ERROR)  # remarks on fonts
    reader, parts, problems = MarkItDown(enable_plugins=False), [], []
    files = [path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS and not path.name.startswith(".")]
    for path in sorted(files):
        name = path.relative_to(folder).as_posix()
        try:
            # markitdown's own way with PDF files runs words together
            text = extract_text(path) if path.suffix.lower() == ".pdf" else reader.convert(path).markdown
        except Exception as error:  # whatever a parser of foreign files raises
            problems.append(f"{name}: cannot be read ({reason(error)})")
            continue
        document = Document(name, datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds"))
        if not (texts := paragraphs(text)):
            problems.append(f"{name}: no paragraph of {MIN_WORDS} words in it (a scan has none)")
        parts += [Paragraph(document, text) for text in texts]
    if not parts:
        raise UserError(f"--from {folder}: no text in it; {'; '.join(problems[:3]) or ENDINGS}")
    subjects = {names[0]: names} | {other: (other,) for other in neighbours or find_neighbours(parts, names)}
    assigned = assign(parts, subjects)
    found = {part.subject for part in assigned}
    if lacking := [name for name in (names[0], *neighbours) if name not in found]:
        raise UserError(f"--from {folder}: no paragraph is about {', '.join(lacking)}; --alias adds the target's names")
    return Material(assigned, {name: called for name, called in subjects.items() if name in found}, problems)


def paragraphs(markdown: str) -> list[str]:
    """The paragraphs of a Markdown text, as plain text; headings, tables, code and what is short are left out."""
    text = re.sub(r"(?ms)^(```|~~~).*?^\1|<!--.*?-->", "\n\n", clean(markdown))
    text = re.sub(r"(?m)^\s*(?:#.*|\|.*\|)\s*$", "\n", text)
    text = re.sub(r"(?m)^\s*(?:[-*+>]|\d+[.)])\s+", "\n\n", text)  # an item of a list is a paragraph
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\*{1,3}|`|(?<!\w)_{1,2}|_{1,2}(?!\w)|\\(?=[^\w\s])", "", text)
    piece = re.compile(rf"(?s)\S.{{0,{LONGEST}}}(?:[.!?](?=\s)|$)|\S.{{1,{LONGEST}}}")  # cut at the end of a sentence
    lines = (" ".join(part.split()) for block in re.split(r"\n\s*\n", text) for part in piece.findall(block))
    return [line for line in lines if len(line.split()) >= MIN_WORDS]


def find_neighbours(parts: Sequence[Paragraph], names: Sequence[str]) -> list[str]:
    """Names (capitalised words in a row) beside the target's that also stand in paragraphs without it."""
    first, word = "|".join(map(str.capitalize, STOP)), r"[^\W\d_a-z][\w'’-]+"
    pattern = re.compile(rf"\b(?!(?:{first})\b){word}(?: (?:(?:de|da|van|von|of|the|der|al) )?{word})+")
    beside: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    for part in parts:
        found = {name for name in pattern.findall(part.text) if not mentions(name, names)}
        (beside if mentions(part.text, names) else alone).update(found)
    return sorted((name for name in beside if alone[name]), key=lambda name: (-beside[name], name))[:NEIGHBOURS]


def assign(parts: Sequence[Paragraph], subjects: dict[str, tuple[str, ...]]) -> list[Paragraph]:
    """Give each paragraph its subject: the target where it is named, else the one neighbour that is.

    One that names nobody is about whom its document names most; one that names several neighbours is about nobody.
    """
    target, *_ = subjects
    counts: dict[Document, Counter[str]] = {part.document: Counter() for part in parts}
    named = [Counter({subject: mentions(part.text, names) for subject, names in subjects.items()}) for part in parts]
    pairs = [*zip(parts, named, strict=True)]
    for part, here in pairs:
        counts[part.document] += here
    assigned = []
    for part, here in pairs:
        present = [*+here] or [name for name, _ in counts[part.document].most_common(1)]
        subject = target if target in present else present[0] if len(present) == 1 else ""
        assigned.append(part._replace(subject=subject))
    return assigned
