"""One spelling for texts of all sources, so that a name that a user types is found where a document has it."""

from __future__ import annotations

import re
import unicodedata

_APOSTROPHE = re.compile("(?<=\\w)[\u2019\u02bc](?=\\w)")
_HYPHEN = re.compile("(?<=\\w)[\u2010\u2011](?=\\w)")


def same_letters(text: str) -> str:
    """A text with composed letters (NFC), and the typewriter's apostrophe and hyphen within words: ``O'Connor``."""
    return _HYPHEN.sub("-", _APOSTROPHE.sub("'", unicodedata.normalize("NFC", text)))


def clean(text: str) -> str:
    """So spelled and without control characters, invisible marks (of writing direction, ...) and half characters."""
    text = re.sub("[\v\f\x85]", "\n", text)  # they part words
    return same_letters("".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs")))
