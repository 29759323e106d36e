"""The 20 target entities of ELUDe and how a user's spelling finds one of them."""

from __future__ import annotations

import difflib
import re
import tomllib
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lm_eval_elude.errors import UserError


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
    """Fold case, accents and punctuation: ``Beyoncé  Knowles`` -> ``beyonce_knowles``; other alphabets stay."""
    plain = re.sub("[\u0300-\u036f]", "", unicodedata.normalize("NFKD", text.casefold()).casefold())
    # Marks are part of a letter in other alphabets (Devanagari's vowels, the Japanese voicing sign).
    kept = (c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in unicodedata.normalize("NFC", plain))
    return "_".join("".join(kept).split())


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
    wanted = slugify(name)
    exact = [t for t in pool if t.name == name] or [t for t in pool if t.slug == wanted]
    parts = set(wanted.split("_"))
    found = exact or [t for t in pool if wanted in map(slugify, t.aliases) or parts <= set(t.slug.split("_"))]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"target {name!r} is ambiguous: {', '.join(t.name for t in found)}; give the full name")
    spellings = {slugify(s): t.name for t in pool for s in (t.name, *t.aliases, *t.name.split())}
    near = dict.fromkeys(spellings[s] for s in difflib.get_close_matches(wanted, spellings, n=3))
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    shown = ", ".join([*(target.name for target in pool[:50]), "..."][: len(pool)])
    raise UserError(f"unknown target {name!r}: {hint}known targets: {shown}")
