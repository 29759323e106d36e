"""Invented names, and a text about one person as one about another: what a model says of somebody it does not know."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lm_eval_elude.text.words import ENGLISH


def invented_names(text: str) -> list[str]:
    """Names such as "Marco Hallen" that a text does not have, in a fixed order."""
    return [name for a in ENGLISH["given"] for b in ENGLISH["family"] if (name := f"{a} {b}") not in text]


def renamed(text: str, of: str, to: str, aliases: Sequence[str] = ()) -> str:
    """A text about ``of`` as one about ``to``: the name, its first and last word alone, and the aliases."""
    new = to.split()
    names = dict.fromkeys(aliases, to) | dict(zip(lone_names(of), (new[0], new[-1]), strict=False)) | {of: to}
    return any_of(sorted(names, key=len, reverse=True)).sub(lambda match: names[match.group()], text)


def lone_names(name: str) -> list[str]:
    """First and last word of a name where either stands for it alone: no numerals, no single word."""
    parts = name.split()
    return [parts[0], parts[-1]] if len(parts) > 1 and len(parts[0]) > 2 and len(parts[-1]) > 2 else []


def any_of(names: Sequence[str]) -> re.Pattern[str]:
    """A pattern of these names as whole words; the first that fits is taken."""
    return re.compile(
        "|".join(rf"(?<!\w){re.escape(name)}(?!\w)" if name.isascii() else re.escape(name) for name in names)
    )
