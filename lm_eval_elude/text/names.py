"""A target's names in a sentence: which there are, how one replaces another, how they are masked, where they leak."""

from __future__ import annotations

import re
from functools import lru_cache

from lm_eval_elude.data.targets import Target
from lm_eval_elude.text.words import APOSTROPHES, ENGLISH, STOP, WORD, words


def _any_of(key: str) -> str:
    """A pattern of the words of one key of ``english.toml``."""
    listed = ENGLISH[key] if isinstance(ENGLISH[key], list) else ENGLISH[key].split()
    return f"(?:{'|'.join(re.escape(word) for word in listed)})"


_DETERMINERS = frozenset(ENGLISH["determiners"].split())
_PRONOUN = re.compile(rf"\b{_any_of('pronouns')}\b", re.IGNORECASE)
_RELATIVE = re.compile(rf"\b{_any_of('relatives')}s?\b", re.IGNORECASE)
_POINTER = re.compile(rf"^{_any_of('pointers')}\b|\b{_any_of('prepositions')} {_any_of('pointed_at')}\b", re.IGNORECASE)
_TITLES = rf"(?:{_any_of('titles')} )?".replace(r"\.", r"\.?")


def short_name(target: Target) -> str:
    """The name that stands for the target alone: its last word, or those before a numeral (``John Paul II``).

    What stands in brackets, and ``Jr.`` or ``Sr.``, is no part of it.
    """
    *first, last = _bare_name(target).split()
    return " ".join(first) if first and re.fullmatch(r"[IVX]+|\d+", last) else last


def called(target: Target) -> tuple[str, ...]:
    """What a text may call the target: name, aliases, and a person's last name, alone or after the first initial."""
    first, *more = _bare_name(target).split()
    if target.thing or not more:
        return (target.name, *target.aliases)
    last = short_name(target)
    return (target.name, *target.aliases, last, f"{first[0]}. {last}")


def _bare_name(target: Target) -> str:
    """The target's name without brackets and without ``Jr.`` or ``Sr.``."""
    return re.sub(r",? (?:Jr|Sr)\b\.?$", "", plain_name(target.name))


def plain_name(name: str) -> str:
    """A name without what stands in brackets after it: ``Ronaldo (Brazilian footballer)`` -> ``Ronaldo``."""
    return re.sub(r" \([^)]*\)$", "", name)


def synonyms(target: Target) -> tuple[str, ...]:
    """Aliases without a word of the target's name, and descriptions; for an entity that has none ``C. Ronaldo``.

    A first name alone identifies nobody. A lone name is spelled out.
    """
    short = short_name(target)
    known = (*target.aliases, *target.descriptions)
    if aliases := tuple(a for a in known if not words(short) & words(a) and a not in target.name.split()):
        return aliases
    if aliases := tuple(a for a in known if target.name.casefold() not in a.casefold()):
        return aliases
    if short == target.name:
        return ("-".join(short),)
    return (f"{target.name[0]}. {short}", short)


def rename(question: str, target: Target, alias: str) -> str | None:
    """The question with the alias in the place of the target's name; None where the alias does not fit its grammar.

    The full name is replaced, or where it is lacking the short name that stands alone (not ``James Jordan``). A
    question without either gets the alias in a sentence before it.
    """
    pattern = re.compile(rf"(?<![\w-]){_TITLES}{re.escape(target.name)}(?!\w)")
    if not (spans := [m.span() for m in pattern.finditer(question)]):
        lone = re.compile(rf"(?<![\w-]){re.escape(short_name(target))}(?![\w-])")
        spans = [m.span() for m in lone.finditer(question) if not _in_another_name(question, *m.span())]
    if re.search(rf"(?<!\w){re.escape(alias)}(?!\w)", pattern.sub("", question)):
        return None
    if not spans:
        return f"This is about {alias}. {question}"
    phrase = any(word[0].islower() for word in alias.split())
    for start, stop in reversed(spans):
        # "the young the ..." and "the footballer known as CR7's father" are no English; a plain name fits there.
        if phrase and (question[stop : stop + 1] in set(APOSTROPHES) or _after_determiner(question[:start])):
            return None
        name = alias if question[:start].strip() else alias[0].upper() + alias[1:]
        question = question[:start] + name + question[stop:]
    return question


def mask(sentence: str, target: Target) -> str | None:
    """A sentence with the target's names as ``this person`` or thing; None where it would still tell or read badly."""
    pattern = _all_names(target)
    if target.thing:
        text = re.sub(rf"(?:\b[Tt]he )?{pattern.pattern}", "this thing", sentence)
        return None if name_leak(text, target) or "this thing" not in text else text[0].upper() + text[1:]
    for match in pattern.finditer(sentence):
        start, end = match.span()
        # "the CR7 hotels", "open CR7 hotels": a nickname before a noun names a thing.
        thing = start > 0 and match.group() in target.aliases and re.match(r" [a-z]", sentence[end:])
        # "Taylor Swift, her first album, was ...": the work of that name.
        thing = thing or re.match(r", (?:his|her|its|the|an?) ", sentence[end:])
        if thing or _in_another_name(sentence, start, end) or _after_determiner(sentence[:start]):
            return None
    text = pattern.sub("this person", sentence)
    text = re.sub(r"^(?:He|She)\b", "this person", text)
    text = re.sub(r"^(?:His|Her)\b", "this person's", text)
    # A fact that does not speak of the person (not even as "he") describes nobody; nor does one about a relative.
    if name_leak(text, target) or not _PRONOUN.search(text) or _RELATIVE.search(text) or _POINTER.search(text):
        return None
    return text[0].upper() + text[1:]


def name_leak(text: str, target: Target) -> str:
    """A word of the target's name, or an alias, that stands in the text; "" where there is none."""
    folded = " ".join(WORD.findall(text.casefold()))
    for name in sorted(words(target.name) - STOP):
        if (len(name) > 1 and name in words(text)) or (len(name) > 3 and name in folded):
            return name
    match = _all_names(target).search(text)
    return match.group() if match else ""


@lru_cache(maxsize=64)
def _all_names(target: Target) -> re.Pattern[str]:
    names = sorted(
        {target.name, short_name(target), *target.aliases, *target.descriptions}, key=lambda name: (-len(name), name)
    )
    return re.compile(rf"(?<!\w){_TITLES}(?:{'|'.join(map(re.escape, names))})(?!\w)")


def _in_another_name(text: str, start: int, end: int) -> bool:
    """Whether the name there is part of a longer one: ``James Jordan``, ``Jordan Brand``, ``Anti-Trump``."""
    before = text[:start].split(" ")[-2:]
    if start and not text[start - 1].isspace() and text[start - 1] not in '("\u201c\u2018':
        return True
    if len(before) == 2 and before[0][:1].isupper() and before[0].casefold() not in STOP:
        return True
    follows = re.match(rf"(?:[{APOSTROPHES}]s)? (\w+)|-", text[end:])
    return follows is not None and (follows[1] is None or follows[1][0].isupper() or follows[1][0].isdigit())


def _after_determiner(before: str) -> bool:
    """Whether an article or the like governs what follows: ``the young ...``, ``his new ...``."""
    near = re.findall(rf"[\w{APOSTROPHES}]+|[.,;:?!]", before)[-2:]
    return any(word.casefold() in _DETERMINERS for word in near) and near[-1].casefold() not in STOP - _DETERMINERS
