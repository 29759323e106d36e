"""A folder of documents (TXT, MD, HTML, PDF, DOCX) to text and paragraphs; what cannot be read is said."""

from __future__ import annotations

import hashlib
import io
import re
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

MAX_FILE = 50 << 20  # bytes of a document
MAX_UNPACKED = 200 << 20  # bytes that a DOCX may unpack to
MAX_PAGES = 5000
MIN_WORDS, MAX_WORDS = (
    8,
    220,
)  # of a paragraph; shorter ones are headings and the like, longer ones are cut at a sentence


class Unreadable(ValueError):
    """A document that cannot be used; the message says why."""


@dataclass(frozen=True)
class Document:
    """One source as it was read.

    Attributes:
        name: file name within the folder, or page title.
        text: what offsets count in (characters).
        sha256: of the raw bytes.
        address: permanent link, or the file name.
        revision: of a page, "" for a file.
        time: when it was retrieved (a file: last changed), UTC.
        licence: as the source or the user states it.
        subject: whom all of it is about; "" where the names in its paragraphs decide.
    """

    name: str
    text: str
    sha256: str
    address: str
    time: str
    licence: str
    revision: str = ""
    subject: str = ""


class Paragraph(NamedTuple):
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
    """A file that was left out."""

    name: str
    reason: str


def read_folder(folder: Path, licence: str) -> tuple[list[Document], list[Problem], dict[str, bytes]]:
    """Read every file below a folder, in name order: documents, what was left out and why, and raw bytes by name."""
    documents, problems, raw = [], [], {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() and not path.is_symlink():
            continue
        try:
            shown = name.encode("utf-8", "replace").decode()
            if shown != name:
                raise Unreadable("the file's name is not UTF-8")
            content = _content(path)
            text = read_document(path.suffix, content)
        except Unreadable as error:
            problems.append(Problem(shown, str(error)))
            continue
        time = datetime.fromtimestamp(int(path.stat().st_mtime), UTC).isoformat()
        raw[name] = content
        documents.append(Document(name, text, hashlib.sha256(content).hexdigest(), name, time, licence))
    return documents, problems, raw


def read_document(ending: str, content: bytes) -> str:
    """The text of a document, paragraphs apart by blank lines.

    Raises:
        Unreadable: of another kind than :data:`READERS`, broken, or without text.
    """
    if ending.lower() not in READERS:
        raise Unreadable(f"not one of {', '.join(READERS)}")
    try:
        text = READERS[ending.lower()](content)
    except Unreadable:
        raise
    except ImportError as error:
        raise Unreadable(f"package {error.name!r} is missing: pip install 'lm-eval-elude[build]'") from None
    except Exception as error:  # whatever a parser of malformed files may raise
        reason = " ".join(str(error).split())[:120]
        raise Unreadable(f"cannot be parsed ({type(error).__name__}{f': {reason}' if reason else ''})") from None
    # Half characters and control characters are nobody's text.
    text = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs"))
    if not text.strip():
        raise Unreadable("no text in it")
    return text


def _content(path: Path) -> bytes:
    if path.is_symlink() or not path.is_file():
        raise Unreadable("a link or a special file, which is not followed")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise Unreadable(f"cannot be read ({error.strerror})") from None
    if len(content) > MAX_FILE:
        raise Unreadable(f"longer than {MAX_FILE:,} bytes")
    return content


def _plain(content: bytes) -> str:
    try:
        utf16 = content[:2] in (b"\xff\xfe", b"\xfe\xff")
        text = content.decode("utf-16" if utf16 else "utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise Unreadable(f"not UTF-8 text (byte {error.start})") from None
    if "\0" in text:
        raise Unreadable("not text (it holds NUL)")
    return text


def _markdown(content: bytes) -> str:
    text = re.sub(r"(?ms)^(```|~~~).*?^\1\s*$|\A---\n.*?^---$", "", _plain(content))
    text = re.sub(r"(?m)^\s{0,3}(?:#{1,6}\s+(.*)|(?:[-*+]|\d+\.)\s+(.*)|>\s?(.*))$", r"\n\1\2\3\n", text)
    text = re.sub(r"!?\[([^\]\n]*)\]\([^)\n]*\)", r"\1", text)
    return re.sub(r"(\*\*|__|`)(\S(?:[^\n]*?\S)?)\1", r"\2", text)


def _html(content: bytes) -> str:
    import trafilatura

    text = trafilatura.extract(content, include_comments=False, include_tables=True, favor_recall=True)
    if not text:
        raise Unreadable("no article text found in the page")
    return text.replace("\n", "\n\n")


def _pdf(content: bytes) -> str:
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(content)
    except pypdfium2.PdfiumError as error:
        reason = str(error)
        raise Unreadable("it is locked by a password" if "assword" in reason else f"no PDF ({reason})") from None
    try:
        if len(document) > MAX_PAGES:
            raise Unreadable(f"more than {MAX_PAGES:,} pages")
        pages = [document[number].get_textpage().get_text_range() for number in range(len(document))]
    finally:
        document.close()
    if sum(map(len, map(str.strip, pages))) < 20 * len(pages):
        raise Unreadable(f"a scanned PDF: {len(pages)} pages of images without text; run OCR on it first")
    return "\n\n".join(map(_joined, pages))


def _joined(page: str) -> str:
    """A page's lines as paragraphs: one ends at a blank line, or where a sentence ends on a line that is not full."""
    lines = page.replace("\r\n", "\n").replace("\ufffe", "-").split("\n")
    full = 0.75 * max(map(len, lines))
    text = ""
    for line in lines:
        ends = len(line) < full and line.rstrip().endswith((".", "!", "?", ":"))
        hyphen = len(line) > full and line.endswith("-") and line[-2:-1].isalpha()
        text += line[:-1] if hyphen else line + ("\n\n" if ends or not line.strip() else "\n")
    return text


def _docx(content: bytes) -> str:
    import docx

    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(info.file_size for info in archive.infolist()) > MAX_UNPACKED:
                raise Unreadable(f"it unpacks to more than {MAX_UNPACKED:,} bytes")
    except zipfile.BadZipFile:
        raise Unreadable("no DOCX file (not a zip archive)") from None
    document = docx.Document(io.BytesIO(content))
    rows = (" | ".join(cell.text for cell in row.cells) for table in document.tables for row in table.rows)
    return "\n\n".join([*(paragraph.text for paragraph in document.paragraphs), *rows])


READERS: dict[str, Callable[[bytes], str]] = {
    ".txt": _plain, ".md": _markdown, ".markdown": _markdown, ".html": _html, ".htm": _html, ".pdf": _pdf,
    ".docx": _docx,
}  # fmt: skip


def paragraphs(document: Document) -> list[Paragraph]:
    """The paragraphs long enough to ask about, in order; :data:`MAX_WORDS` cuts long ones at the end of a sentence."""
    found = []
    for block in re.finditer(r"\S(?:.|\n(?![ \t]*\n))*", document.text):
        start = block.start()
        sentences = list(re.finditer(r"(?s)\S.*?(?:[.!?。][\"'”’)\]]*(?=\s)|[。]|\Z)", block.group()))
        words, first = 0, 0
        for index, sentence in enumerate(sentences):
            words += len(sentence.group().split())
            last = index + 1 == len(sentences)
            if last or words + len(sentences[index + 1].group().split()) > MAX_WORDS:
                span = start + sentences[first].start(), start + sentence.end()
                text = " ".join(document.text[slice(*span)].split())
                if len(text.split()) >= MIN_WORDS or (not text.isascii() and len(text) > 4 * MIN_WORDS):
                    found.append(Paragraph(document.name, *span, text, document.subject))
                words, first = 0, index + 1
    return found


def mentions(text: str, names: Iterable[str]) -> int:
    """How often any of the names stands in a text as whole words."""
    pattern = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return len(re.findall(rf"(?<!\w)(?:{pattern})(?!\w)", text)) if pattern else 0


def neighbours_beside(parts: Sequence[Paragraph], names: Sequence[str], count: int) -> list[str]:
    """Names that stand beside the target's and also have paragraphs of their own, the most frequent first.

    A name is two or more capitalised words in a row; a longer one that holds the target's is none.
    """
    name = re.compile(
        r"(?<![\w.])[^\W\d_a-z][\w'’-]+(?:[ \t](?:(?:de|da|van|von|of|the|der|al) )?[^\W\d_a-z][\w'’-]+)+"
    )
    beside: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    for part in parts:
        tally = beside if mentions(part.text, names) else alone
        tally.update({match.group() for match in name.finditer(part.text) if not mentions(match.group(), names)})
    known = [found for found in beside if alone[found]]
    return sorted(known, key=lambda found: (-beside[found], found))[:count]


def assign(parts: Sequence[Paragraph], names: Sequence[str], neighbours: Sequence[str]) -> list[Paragraph]:
    """Give each paragraph its subject: the target where it is named, else the one neighbour that is.

    A paragraph that names neither belongs to whom its document names most (the target where that is a draw); one
    that names several neighbours, or stands in a document that names nobody, to nobody (``""``).
    """
    whole: dict[str, str] = {}
    for part in parts:
        whole[part.document] = whole.get(part.document, "") + part.text + "\n"
    main = {}
    for document, text in whole.items():
        counts = {names[0]: mentions(text, names)} | {other: mentions(text, [other]) for other in neighbours}
        top = max(counts, key=counts.__getitem__)
        main[document] = top if counts[top] else ""
    result = []
    for part in parts:
        here = [other for other in neighbours if mentions(part.text, [other])]
        if mentions(part.text, names):
            subject = names[0]
        else:
            subject = here[0] if len(here) == 1 else "" if here else main[part.document]
        result.append(part if part.subject else part._replace(subject=subject))
    return result
