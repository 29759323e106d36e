"""A folder of documents (TXT, MD, HTML, PDF, DOCX) to text and paragraphs; unreadable files are reported."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from lm_eval_elude.curate.readers import read_document
from lm_eval_elude.errors import UserError
from lm_eval_elude.text.words import STOP

MARK = "work/made-by-elude-build"  # says that the folder is ours to write into and to purge
MAX_FILE = 50 << 20  # bytes of a document
# Words of a paragraph: shorter ones are headings and the like, longer ones are cut at a sentence.
MIN_WORDS, MAX_WORDS = 8, 220


@dataclass(frozen=True)
class Document:
    """One source as it was read."""

    name: str  # file name within the folder, or page title
    text: str  # what offsets count in (characters)
    raw: bytes  # what the text was read from
    address: str  # permanent link, or the file name
    time: str  # when it was retrieved (a file: last changed), UTC
    licence: str  # as the source or the user states it
    revision: str = ""  # of a page
    subject: str = ""  # whom all of it is about; "" where the names in its paragraphs decide

    @cached_property
    def sha256(self) -> str:
        """Of the raw bytes."""
        return hashlib.sha256(self.raw).hexdigest()

    @property
    def source(self) -> dict[str, str]:
        """What is written down of it, without its content."""
        columns = ("name", "sha256", "address", "time", "licence", "revision", "subject")
        return {column: getattr(self, column) for column in columns}


@dataclass(frozen=True)
class Paragraph:
    """Part of a document: ``document.text[start:stop]`` is what ``text`` is, but for white space."""

    document: str
    start: int
    stop: int
    text: str
    subject: str

    @property
    def key(self) -> str:
        return f"{self.document}#{self.start}-{self.stop}"


class Problem(NamedTuple):
    """A file that was left out, or parts of one that were."""

    name: str
    reason: str


def read_folder(folder: Path, licence: str) -> tuple[list[Document], list[Problem]]:
    """Read every file below a folder, in name order: the documents, and what was left out and why.

    Folders that a build made are no sources: one that begins again would read what it kept. Nor is what is hidden, such
    as a version history, or a file manager's notes.
    """
    built = {mark.parents[1] for mark in folder.rglob(MARK)}

    def read(path: Path) -> list[Document | Problem]:
        name = path.relative_to(folder).as_posix()
        if (shown := name.encode("utf-8", "replace").decode()) != name:
            return [Problem(shown, "the file's name is not UTF-8")]
        try:
            content = _content(path)
            text, left_out = read_document(path.suffix, content)
        except UserError as error:
            return [Problem(name, str(error))]
        time = datetime.fromtimestamp(int(path.stat().st_mtime), UTC).isoformat()
        document = Document(name, text, content, name, time, licence)
        return [document, *([Problem(name, left_out)] if left_out else [])]

    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if (path.is_symlink() or not path.is_dir() or not os.access(path, os.R_OK | os.X_OK))
        and built.isdisjoint(path.parents)
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # each waits for the process that reads
        results = [each for of_file in pool.map(read, paths) for each in of_file]
    return [each for each in results if isinstance(each, Document)], [x for x in results if isinstance(x, Problem)]


def _content(path: Path) -> bytes:
    if not path.is_symlink() and path.is_dir():
        raise UserError("a folder whose files may not be read")
    if path.is_symlink() or not path.is_file():
        raise UserError("a link or a special file, which is not followed")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})") from None
    if len(content) > MAX_FILE:
        raise UserError(f"longer than {MAX_FILE:,} bytes")
    return content


def paragraphs(document: Document, least: int = MIN_WORDS) -> list[Paragraph]:
    """The paragraphs long enough to ask about, in order; :data:`MAX_WORDS` cuts long ones at the end of a sentence.

    A sentence that is longer itself (a table or a log as text) is cut there too. ``least`` words are long enough.
    """
    piece = re.compile(rf"\S+(?:\s+\S+){{0,{MAX_WORDS - 1}}}")
    parts = []
    for block in re.finditer(r"\S[^\n]*+(?:\n(?![ \t]*\n)[^\n]*+)*+", document.text):
        start = block.start()
        sentences = [
            part
            for sentence in re.finditer(r"(?s)\S.*?(?:[.!?。][\"'”’)\]]*(?=\s)|[。]|\Z)", block.group())
            for part in piece.finditer(block.group(), *sentence.span())
        ]
        words, first = 0, 0
        for index, sentence in enumerate(sentences):
            words += len(sentence.group().split())
            last = index + 1 == len(sentences)
            if last or words + len(sentences[index + 1].group().split()) > MAX_WORDS:
                span = start + sentences[first].start(), start + sentence.end()
                text = " ".join(document.text[slice(*span)].split())
                if len(text.split()) >= least or (not text.isascii() and len(text) > 4 * least):
                    parts.append(Paragraph(document.name, *span, text, document.subject))
                words, first = 0, index + 1
    return parts


def mentions(text: str, names: Iterable[str], any_case: bool = False) -> int:
    """How often any of the names stands in a text as whole words, and not within a double name (Jean in Jean-Luc).

    In capitals throughout, as headings have them, a name counts, too; an underscore is a mark of emphasis.
    """
    spellings = {spelling for name in names for spelling in (name, name.upper())}
    pattern = "|".join(map(re.escape, sorted(spellings, key=lambda name: (-len(name), name))))
    whole = rf"(?<![^\W_])(?<![^\W_]-)(?{'i' * any_case}:{pattern})(?!-?[^\W_a-z]|[^\W_])"
    return len(re.findall(whole, text)) if pattern else 0


def find_neighbours(parts: Sequence[Paragraph], names: Sequence[str], count: int) -> list[str]:
    """Names that stand beside the target's and also have paragraphs of their own, the most frequent first.

    A name is two or more capitalised words in a row, without a small word that begins a sentence ("The Quorvane Tarn",
    but "Will Smith"); a longer one that holds the target's is none, a double name either.
    """
    small, word = "|".join(map(str.capitalize, STOP)), r"[^\W\d_a-z][\w'’-]+"
    more = rf"[ \t](?:(?:de|da|van|von|of|the|der|al) )?{word}"
    name = re.compile(rf"(?<![\w.])(?!(?:{small}){more}{more}){word}(?:{more})+")
    with_target: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    for part in parts:
        tally = with_target if mentions(part.text, names) else alone
        found = {match.group() for match in name.finditer(part.text)}
        tally.update(person for person in found if not mentions(person.replace("-", " "), names))
    candidates = [person for person in with_target if alone[person]]
    return sorted(candidates, key=lambda person: (-with_target[person], person))[:count]


def assign(parts: Sequence[Paragraph], names: Sequence[str], neighbours: Sequence[str]) -> list[Paragraph]:
    """Give each paragraph its subject: the target where it is named, else the one neighbour that is.

    A paragraph that names neither belongs to whom its document names most (the target where that is a draw); one
    that names several neighbours, or stands in a document that names nobody, to nobody (``""``).
    """
    subjects = {names[0]: names} | {other: [other] for other in neighbours}
    whole: dict[str, str] = {}
    for part in parts:
        whole[part.document] = whole.get(part.document, "") + part.text + "\n"
    main = {}
    for document, text in whole.items():
        counts = {subject: mentions(text, called) for subject, called in subjects.items()}
        top = max(counts, key=counts.__getitem__)
        main[document] = top if counts[top] else ""
    assigned = []
    for part in parts:
        named = [subject for subject, called in subjects.items() if mentions(part.text, called)]
        subject = named[0] if named else main[part.document]
        if len(named) > 1 and subject != names[0]:
            subject = ""
        assigned.append(part if part.subject else replace(part, subject=subject))
    return assigned
