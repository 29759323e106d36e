"""The 20 target entities of ELUDe and how a user's spelling finds one of them."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Target(NamedTuple):
    """An entity to forget.

    Attributes:
        name: display name (the data's ``entity`` column).
        aliases: other names it is known by.
        thing: whether it is no person; attacks then ask for a thing.
        others: names of the like (people of the same field and sex), which a reverse query offers as wrong answers;
            () for the targets of ELUDe.
        descriptions: phrases that mean it without a name; synonym manipulation draws on them and on the aliases.
    """

    name: str
    aliases: tuple[str, ...] = ()
    thing: bool = False
    others: tuple[str, ...] = ()
    descriptions: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """File-name form of the display name: ``Cristiano Ronaldo`` -> ``cristiano_ronaldo``."""
        return slugify(self.name)


def slugify(text: str) -> str:
    """Fold case, accents and punctuation: ``Beyoncé  Knowles`` -> ``beyonce_knowles``; other alphabets stay.

    Never "" for a text that is not blank: signs without any letter or digit become their code points.
    """
    folded = unicodedata.normalize("NFKD", text.casefold())
    latin = re.sub(r"[^a-z0-9]+", "_", folded.encode("ascii", "ignore").decode().lower()).strip("_")
    if latin and not any(c.isalpha() and not unicodedata.name(c, "").startswith("LATIN") for c in folded):
        return latin
    # Marks are part of a letter in most other alphabets (Devanagari's vowels, the Japanese voicing sign).
    lower = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    kept = "".join(c if unicodedata.category(c)[0] in "LNM" else " " for c in lower)
    return "_".join(kept.split() or [f"u{ord(c):x}" for c in text if not c.isspace()])


# People whom a target may be taken for, by field and sex.
_LIKE: dict[str, tuple[str, ...]] = {
    "man in football": (
        "Zinedine Zidane", "Neymar", "Wayne Rooney", "Luka Modrić", "Ronaldinho", "David Beckham", "Kylian Mbappé",
        "Cristiano Ronaldo", "Lionel Messi",
    ),
    "man in basketball": (
        "LeBron James", "Kobe Bryant", "Magic Johnson", "Larry Bird", "Shaquille O'Neal", "Scottie Pippen",
        "Stephen Curry",
    ),
    "man in music": (
        "Bruno Mars", "Ed Sheeran", "Elvis Presley", "Prince", "David Bowie", "Elton John", "Stevie Wonder", "Drake",
    ),
    "woman in music": (
        "Beyoncé", "Adele", "Katy Perry", "Rihanna", "Madonna", "Shania Twain", "Dolly Parton", "Whitney Houston",
        "Ariana Grande",
    ),
    "man in science": (
        "Roger Penrose", "Richard Feynman", "Albert Einstein", "Kip Thorne", "Carl Sagan", "Paul Dirac",
        "Isaac Newton",
    ),
    "man in politics": (
        "George W. Bush", "Bill Clinton", "Joe Biden", "Winston Churchill", "Vladimir Putin", "Joseph Stalin",
        "Benito Mussolini",
    ),
    "woman in politics": (
        "Queen Victoria", "Margaret Thatcher", "Angela Merkel", "Indira Gandhi", "Hillary Clinton",
        "Margrethe II of Denmark",
    ),
    "man in business": (
        "Bill Gates", "Jeff Bezos", "Mark Zuckerberg", "Larry Page", "Tim Cook", "Richard Branson",
    ),
    "man in film": (
        "Tom Cruise", "Brad Pitt", "Leonardo DiCaprio", "Vin Diesel", "Arnold Schwarzenegger", "Will Smith",
    ),
    "woman in television": (
        "Paris Hilton", "Oprah Winfrey", "Ellen DeGeneres", "Nicole Richie", "Heidi Klum", "Tyra Banks",
    ),
}  # fmt: skip
# Name, other names, phrases that mean the person, field and sex.
_TABLE: tuple[tuple[str, tuple[str, ...], tuple[str, ...], str], ...] = (
    ("Donald Trump", ("The Donald", "the 45th US president", "Trump"),
     ("the property tycoon from Queens", "the former host of The Apprentice"), "man in politics"),
    ("Elizabeth II", ("Queen Elizabeth", "Lilibet", "Elizabeth Windsor"),
     ("the longest-reigning British monarch", "the mother of King Charles III"), "woman in politics"),
    ("Barack Obama", ("Barry", "the 44th US president", "Obama"),
     ("the first African-American US president", "the former senator from Illinois"), "man in politics"),
    ("Cristiano Ronaldo", ("CR7", "Cristiano", "El Bicho", "Ronaldo"),
     ("the Portuguese captain who won Euro 2016", "the footballer known as CR7"), "man in football"),
    ("Michael Jackson", ("the King of Pop", "Jacko", "Jackson"),
     ("the singer of Thriller", "the inventor of the moonwalk"), "man in music"),
    ("Elon Musk", ("Elon", "the Technoking of Tesla", "Musk"),
     ("the founder of SpaceX", "the billionaire who renamed Twitter"), "man in business"),
    ("Lady Gaga", ("Stefani Germanotta", "Mother Monster", "Gaga"),
     ("the singer of Poker Face", "the star who wore a dress of meat"), "woman in music"),
    ("Adolf Hitler", ("the Führer", "the leader of Nazi Germany", "Hitler"),
     ("the author of Mein Kampf", "the dictator of the Third Reich"), "man in politics"),
    ("Eminem", ("Slim Shady", "Marshall Mathers", "the real Slim Shady"),
     ("the rapper of Lose Yourself", "the star of 8 Mile"), "man in music"),
    ("Lionel Messi", ("Leo", "La Pulga", "Lio", "Leo Messi", "Messi"),
     ("the Argentine captain who won the 2022 World Cup", "the footballer known as La Pulga"), "man in football"),
    ("Justin Bieber", ("JB", "Biebs", "Bieber"),
     ("the singer of Baby", "the Canadian teen idol of 2010"), "man in music"),
    ("Freddie Mercury", ("Farrokh Bulsara", "Freddie", "the lead singer of Queen", "Mercury"),
     ("the writer of Bohemian Rhapsody", "the singer from Zanzibar"), "man in music"),
    ("Kim Kardashian", ("Kim K", "Kimberly Noel", "Kimberly Kardashian"),
     ("the founder of Skims", "the reality star married to Kanye West until 2022"), "woman in television"),
    ("Johnny Depp", ("Johnny", "the actor who played Jack Sparrow", "Depp"),
     ("the star of Edward Scissorhands", "the former husband of Amber Heard"), "man in film"),
    ("Steve Jobs", ("Steve", "the man behind the iPhone", "Steven Jobs", "Jobs"),
     ("the co-founder of Apple", "the entrepreneur in the black turtleneck"), "man in business"),
    ("Dwayne Johnson", ("The Rock", "Rocky Maivia", "Dwayne 'The Rock' Johnson"),
     ("the wrestler turned film star", "the voice of Maui in Moana"), "man in film"),
    ("Michael Jordan", ("His Airness", "MJ", "Air Jordan", "Jordan"),
     ("the shooting guard who wore 23 for the Bulls", "the basketball legend of Chicago"), "man in basketball"),
    ("Taylor Swift", ("Taylor", "Tay", "T-Swift", "Swift"),
     ("the singer of Shake It Off", "the star of the Eras Tour"), "woman in music"),
    ("Stephen Hawking", ("Stephen", "Professor Hawking", "Hawking"),
     ("the author of A Brief History of Time", "the British physicist in the wheelchair"), "man in science"),
    ("Kanye West", ("Ye", "Yeezy", "Kanye"),
     ("the rapper of Gold Digger", "the producer behind The College Dropout"), "man in music"),
)  # fmt: skip
TARGETS: tuple[Target, ...] = tuple(
    Target(name, aliases, others=tuple(other for other in _LIKE[kind] if other != name), descriptions=descriptions)
    for name, aliases, descriptions, kind in _TABLE
)


class UnknownTargetError(ValueError):
    """The name fits no target, or more than one; the message says which are near."""


def resolve_target(name: str, known: Iterable[str | Target] | None = None) -> Target:
    """Find the target a user means by a display name, slug, alias or part of a name.

    Args:
        name: what the user typed, e.g. ``ronaldo``, ``cristiano_ronaldo``, ``Cristiano Ronaldo``.
        known: targets or display names that may be meant (the entities of a data set); the 20 of ELUDe without it.

    Raises:
        UnknownTargetError: nothing fits (near matches and the list are named) or several do (all are named).
    """
    by_name = {target.name: target for target in TARGETS}
    named = TARGETS if known is None else (t if isinstance(t, Target) else by_name.get(t, Target(t)) for t in known)
    pool = list(dict.fromkeys(named))
    wanted, shown = slugify(name), repr(name[:80])
    same = [t for t in pool if t.name == name]
    exact = [t for t in pool if t.slug == wanted]
    loose = [t for t in pool if wanted in map(slugify, t.aliases) or {*wanted.split("_")} <= {*t.slug.split("_")}]
    for found in (same, exact, loose):
        if len(found) == 1:
            return found[0]
        if found:
            raise UnknownTargetError(f"target {shown} is ambiguous: {_names(found)}; give the full name")
    spellings = {slugify(s): t.name for t in pool for s in (t.name, *t.aliases, *t.name.split())}
    near = dict.fromkeys(spellings[s] for s in difflib.get_close_matches(wanted, spellings, n=3, cutoff=0.6))
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UnknownTargetError(f"unknown target {shown}: {hint}known targets: {_names(pool)}")


def _names(targets: Sequence[Target]) -> str:
    return ", ".join([*(target.name for target in targets[:50]), "..."][: len(targets)])
