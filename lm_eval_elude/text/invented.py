"""Invented names, and a text about one person as one about another: what a model says of somebody it does not know."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from lm_eval_elude.text.words import ENGLISH, STOP

_LATIN = re.compile("[\0-\u024f\u1e00-\u1eff\u2010-\u2019]*")  # scripts without spaces have no whole words


def invented_names(text: str) -> list[str]:
    """Names such as "Marco Hallen" that a text does not have, in a fixed order."""
    return [name for a in ENGLISH["given"] for b in ENGLISH["family"] if (name := f"{a} {b}") not in text]


def renamed(text: str, of: str, to: str, aliases: Sequence[str] = ()) -> str:
    """A text about ``of`` as one about ``to``: the name, its first and last word alone, and the aliases."""
    words_of = to.split()
    first, last = words_of[0], words_of[-1]
    names = (
        dict.fromkeys(aliases, to)
        | {name: last if name == of.split()[-1] else first for name in lone_names(of)}
        | {of: to}
    )
    return any_of(names).sub(lambda match: names[match.group()], text)


def lone_names(name: str) -> list[str]:
    """First and last word of a name where either stands for it alone: no numeral, no initial, no "The"."""
    parts = name.split()
    ends = (parts[0], parts[-1]) if len(parts) > 1 else ()
    return [w for w in ends if len(w) > 2 and w.casefold() not in STOP and not re.fullmatch(r"[IVX]+|[JS]r\.", w)]


def any_of(names: Iterable[str]) -> re.Pattern[str]:
    """A pattern of these names as whole words; the longest that fits is taken."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(
        "|".join(
            rf"(?<!\w){re.escape(name)}(?!\w)" if _LATIN.fullmatch(name) else re.escape(name) for name in longest_first
        )
    )
