"""The text of one document; run as a program it reads the document within limits of time and memory.

A document may be made to cost a reader gigabytes or hours. So each is read by a process of its own
(``python -m lm_eval_elude.curate.readers .pdf 60``: bytes on the standard input, text or a reason on its output).
"""

from __future__ import annotations

import io
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from lm_eval_elude.errors import UserError, reason
from lm_eval_elude.text.letters import clean

SECONDS = 60  # of processor time for a document
MEMORY = 1 << 30  # bytes of address space
TEXT, REASON = b"t", b"r"  # what the first byte of the output says of the rest


def read_document(ending: str, content: bytes) -> Read:
    """The text of a document, paragraphs apart by blank lines, read by a process of its own.

    UserError where it is of another kind than :data:`READERS`, broken, without text, or beyond the limits.
    """
    if ending.lower() not in READERS:
        raise UserError(f"not one of {', '.join(READERS)}")
    command = [sys.executable, "-P", "-m", __spec__.name, ending.lower(), str(SECONDS)]
    done = subprocess.run(command, input=content, capture_output=True)
    kind, (left_out, _, text) = done.stdout[:1], done.stdout[1:].decode(errors="replace").partition("\0")
    if done.returncode or kind not in (TEXT, REASON):
        raise UserError(f"cannot be read within {SECONDS} s and {MEMORY >> 30} GB of memory")
    if kind == REASON:
        raise UserError(text)
    return Read(text, left_out)


class Read(NamedTuple):
    """What was read of a document, and which parts of it have nothing that can be read ("" for none)."""

    text: str
    left_out: str = ""


def parse(ending: str, content: bytes) -> tuple[bytes, Read]:
    """Within this process and without limits: whether it is a text or a reason, and that."""
    try:
        read = READERS[ending](content)
        text, left_out = read if isinstance(read, Read) else Read(read)
        text = clean(text)
    except UserError as error:
        return REASON, Read(str(error))
    except ImportError as error:
        return REASON, Read(f"package {error.name!r} is missing: pip install 'lm-eval-elude[build]'")
    except MemoryError:
        raise  # as every end at a limit
    except Exception as error:  # whatever a parser of malformed files may raise
        return REASON, Read(f"cannot be parsed ({type(error).__name__}: {reason(error)[:120]})")
    return (TEXT, Read(text, left_out)) if text.strip() else (REASON, Read("no text in it"))


def _plain(content: bytes) -> str:
    try:
        utf16 = content[:2] in (b"\xff\xfe", b"\xfe\xff")
        text = content.decode("utf-16" if utf16 else "utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 text (byte {error.start})") from None
    if "\0" in text:
        raise UserError("not text (it holds NUL)")
    return text


def _markdown(content: bytes) -> str:
    from markdown_it import MarkdownIt

    # A rule above a blank line opens no front matter.
    text = re.sub(r"(?ms)\A---\n(?!\s*\n).*?^---$", "", _plain(content))
    blocks = []
    for token in MarkdownIt().parse(text):  # fenced blocks are code
        if token.type == "inline":
            blocks.append("".join(_shown(part) for part in token.children or ()))
        elif token.type == "html_block":
            blocks.append(re.sub(r"(?is)<!--.*?-->|<(script|style)\b.*?</\1>|<[^>]*>", " ", token.content))
        elif token.type == "code_block":  # in texts that people write an indent is mostly no code
            blocks.append(token.content)
    return "\n\n".join(blocks)


def _shown(part: Any) -> str:
    """What a page shows of a part of a Markdown paragraph."""
    return "\n" if part.type.endswith("break") else "" if part.type == "html_inline" else part.content


def _html(content: bytes) -> str:
    import trafilatura

    declared = rb"""(?i)<(?:meta\b[^>]*\bcharset|\?xml\b[^>]*\bencoding)\s*=\s*["']?\s*([\w.:-]+)"""
    named = re.search(declared, content[:4096])
    try:
        page = _plain(content)
    except UserError as error:  # an encoding that is guessed makes other letters of some
        if not named:
            raise UserError(f"{error}, and the page names no other encoding") from None
        name = named[1].decode()
        try:
            page = content.decode("cp1252" if name.lower() == "iso-8859-1" else name)  # as browsers read it
        except (LookupError, UnicodeDecodeError):
            raise UserError(f"{error}, nor in {name}, which the page names") from None
    text = trafilatura.extract(page, include_comments=False, include_tables=True, favor_recall=True)
    if not text:
        raise UserError("no article text found in the page")
    return text.replace("\n", "\n\n")


def _pdf(content: bytes) -> Read:
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(content)
    except pypdfium2.PdfiumError as error:
        raise UserError("it is locked by a password" if "assword" in str(error) else f"no PDF ({error})") from None
    pages = [page.get_textpage().get_text_range() for page in document]
    if sum(map(len, map(str.strip, pages))) < 20 * len(pages):
        raise UserError(f"a scanned PDF: {len(pages)} pages of images without text; run OCR on it first")
    images = [
        str(number)
        for number, (page, text) in enumerate(zip(document, pages, strict=True), 1)
        if len(text.strip()) < 20 and next(page.get_objects(), None) is not None
    ]
    left_out = f"no text on page {', '.join(images)}; run OCR on it first" if images else ""
    return Read("\n\n".join(map(_joined, pages)), left_out)


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
    """All text, also that of content controls, text boxes and notes; a table's row is a line of its cells."""
    import docx
    from docx.oxml import parse_xml
    from docx.oxml.ns import qn

    document = docx.Document(io.BytesIO(content))
    others = (each.target_part for each in document.part.rels.values() if not each.is_external)
    roots = [document.element.body]
    roots += [parse_xml(part.blob) for part in others if _DOCX_PART.search(str(part.partname))]
    letters = {qn("w:tab"): "\t", qn("w:br"): "\n", qn("w:cr"): "\n", qn("w:noBreakHyphen"): "-"}
    blocks: dict[Any, dict[Any, dict[Any, str]]] = {}  # by row or else paragraph, then cell, then paragraph
    for mark in (mark for root in roots for mark in root.iter(qn("w:t"), *letters)):
        above = [*mark.iterancestors()]
        # A tabulator's place in a style is no text; what other programs fall back to, or what was moved, stands twice.
        if above[0].tag != qn("w:r") or any(each.tag.endswith(("}Fallback", "}moveFrom")) for each in above):
            continue
        paragraph, cell, row = (next((a for a in above if a.tag == qn(tag)), None) for tag in ("w:p", "w:tc", "w:tr"))
        texts = blocks.setdefault(paragraph if row is None else row, {}).setdefault(cell, {})
        texts[paragraph] = texts.get(paragraph, "") + (letters.get(mark.tag) or mark.text or "")
    return "\n\n".join(" | ".join("\n".join(texts.values()) for texts in cells.values()) for cells in blocks.values())


_DOCX_PART = re.compile(r"/word/(?:header|footer|footnotes|endnotes)\d*\.xml$")

READERS: dict[str, Callable[[bytes], str | Read]] = {
    ".txt": _plain, ".md": _markdown, ".markdown": _markdown, ".html": _html, ".htm": _html, ".pdf": _pdf,
    ".docx": _docx,
}  # fmt: skip

if __name__ == "__main__":
    for limit, most in ((resource.RLIMIT_CPU, int(sys.argv[2])), (resource.RLIMIT_AS, MEMORY)):
        with suppress(ValueError, OSError):  # not every system has each limit
            resource.setrlimit(limit, (most, most))
    kind, read = parse(sys.argv[1], sys.stdin.buffer.read())
    sys.stdout.buffer.write(kind + f"{read.left_out}\0{read.text}".encode(errors="replace"))  # NUL is in no text
