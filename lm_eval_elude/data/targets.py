"""The 20 target entities of ELUDe and how a user's spelling finds one of them."""

from __future__ import annotations

import difflib
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from lm_eval_elude.errors import UserError

# Letters that Unicode does not take for another with a mark, as a keyboard without them has them.
_PLAIN = str.maketrans({"ł": "l", "ø": "o", "đ": "d", "ð": "d", "þ": "th", "æ": "ae", "œ": "oe", "ı": "i", "ħ": "h"})


class Target(NamedTuple):
    """An entity to forget."""

    name: str  # display name (the data's ``entity`` column)
    aliases: tuple[str, ...] = ()  # other names it is known by
    thing: bool = False  # whether it is no person; attacks then ask for a thing
    others: tuple[str, ...] = ()  # comparable entities (same field and sex): the wrong answers of a reverse query
    descriptions: tuple[str, ...] = ()  # phrases that mean it without a name, for synonym manipulation

    @property
    def slug(self) -> str:
        """File-name form of the display name: ``Cristiano Ronaldo`` -> ``cristiano_ronaldo``."""
        return slugify(self.name)


def slugify(text: str) -> str:
    """Fold case, accents and punctuation: ``Beyoncé  Knowles`` -> ``beyonce_knowles``; other alphabets stay.

    Never "" for a text that is not blank: signs without any letter or digit become their code points.
    """
    folded = unicodedata.normalize("NFKD", text.casefold()).translate(_PLAIN)
    latin = re.sub(r"[^a-z0-9]+", "_", folded.encode("ascii", "ignore").decode().lower()).strip("_")
    if latin and not any(c.isalpha() and not unicodedata.name(c, "").startswith("LATIN") for c in folded):
        return latin
    # Marks are part of a letter in most other alphabets (Devanagari's vowels, the Japanese voicing sign).
    lower = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    kept = "".join(c if unicodedata.category(c)[0] in "LNM" else " " for c in lower)
    return "_".join(kept.split() or [f"u{ord(c):x}" for c in text if not c.isspace()])


_TABLE = tomllib.loads(Path(__file__).with_name("targets.toml").read_text(encoding="utf-8"))
TARGETS: tuple[Target, ...] = tuple(
    Target(
        row["name"],
        tuple(row["aliases"]),
        others=tuple(name for name in _TABLE["alike"][row["alike"]] if name != row["name"]),
        descriptions=tuple(row["descriptions"]),
    )
    for row in _TABLE["target"]
)


def resolve_target(name: str, known: Iterable[str | Target] | None = None) -> Target:
    """Find the target a user means by a display name, slug, alias or part of a name (``ronaldo``).

    ``known`` are the targets or display names that may be meant: those of a data set, or the 20 of ELUDe without it.
    UserError where nothing fits (near matches and the list are named) or several do (all are named).
    """
    by_name = {target.name: target for target in TARGETS}
    named = TARGETS if known is None else (t if isinstance(t, Target) else by_name.get(t, Target(t)) for t in known)
    pool = list(dict.fromkeys(named))
    wanted, shown = slugify(name), repr(name[:80])
    same = [t for t in pool if t.name == name]
    exact = [t for t in pool if t.slug == wanted]
    loose = [t for t in pool if wanted in map(slugify, t.aliases) or {*wanted.split("_")} <= {*t.slug.split("_")}]
    for fitting in (same, exact, loose):
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise UserError(f"target {shown} is ambiguous: {_names(fitting)}; give the full name")
    spellings = {slugify(s): t.name for t in pool for s in (t.name, *t.aliases, *t.name.split())}
    near = dict.fromkeys(spellings[s] for s in difflib.get_close_matches(wanted, spellings, n=3, cutoff=0.6))
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UserError(f"unknown target {shown}: {hint}known targets: {_names(pool)}")


def _names(targets: Sequence[Target]) -> str:
    return ", ".join([*(target.name for target in targets[:50]), "..."][: len(targets)])
