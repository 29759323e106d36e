"""Wrong numbers and dates for ELUDe-mini: drawn so that nothing about the six values tells which one is true.

The six values form a ladder with random gaps. Which rung the truth is on is settled first, each as often as the others,
so the gaps say nothing about it; wrong values are as round as the truth, and wrong dates share no field with a date.
"""

from __future__ import annotations

import random
import re
from calendar import monthrange
from collections import Counter
from collections.abc import Callable
from itertools import cycle, zip_longest
from typing import NamedTuple

from lm_eval_elude.data.records import PERTURBATIONS
from lm_eval_elude.errors import UserError

MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
# fmt: off
_CARDINALS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]
_ORDINALS = [
    "zeroth", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth",
    "eleventh", "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth",
]
# fmt: on
_DATE = re.compile(rf"(?:(?P<day>\d{{1,2}}) )?(?P<month>{'|'.join(MONTHS)}) (?P<year>\d{{4}})")
_SEASON = re.compile(r"(?P<year>\d{4})–\d{2}")
_NUMBER = re.compile(rf"\d[\d,]*(?:\.\d+)?|\b(?:{'|'.join(_CARDINALS[1:] + _ORDINALS[1:])})\b", re.IGNORECASE)
LAST_YEAR = 2025  # no wrong answer lies in years to come
_TRIES = 400


class Spec(NamedTuple):
    """How to draw, as the line ``D: MEAN [LOWEST..HIGHEST]`` of a facts file says it."""

    mean: float
    lowest: float
    highest: float


def parse_spec(text: str) -> Spec:
    """``4`` or ``4 1..12`` or ``1 2..``: the mean gap, in years for dates, and the values that make sense."""
    mean, _, bounds = text.partition(" ")
    lowest, _, highest = bounds.partition("..")
    return Spec(float(mean), float(lowest or 0), float(highest or "inf"))


def draw_wrong(value: str, forms: list[str], spec: Spec, stated: str, ranks: Counter, rng: random.Random) -> list[str]:
    """Five wrong versions of ``value``, whose number or date is drawn anew.

    Args:
        value: the true value, e.g. ``5 February 1985 in Funchal`` or ``€100 million``.
        forms: five texts with ``#`` where the drawn number or date goes, or none: the value's own.
        spec: mean gap between neighbours, and bounds.
        stated: the record's questions and answers; a number that stands there is never drawn.
        ranks: how often the truth was on which rung so far, by kind; counted on.
        rng: the randomness.

    Raises:
        UserError: no number or date in the value, or bounds that leave no room.
    """
    match = _DATE.search(value) or _SEASON.search(value) or _NUMBER.search(value)
    if not match:
        raise UserError(f"D: there is no number or date in {value!r}")
    forms = forms or [value.replace(match.group(), "#")] * PERTURBATIONS
    taken = set(_NUMBER.findall(stated.replace(value, "").casefold()))
    kind = "date" if match.re is _DATE else "number"
    scale = _scale(match, rng)
    lowest, highest = max(spec.lowest * scale.units, scale.lowest), min(spec.highest * scale.units, scale.highest)
    mean = spec.mean * scale.units
    round_to = [1] if scale.year else [u for k in range(8) for u in (10**k, 5 * 10**k) if scale.truth % u == 0]
    unit = max(u for u in round_to if u <= max(1, mean))
    widest = max(1, round(2 * mean / unit) - 1)
    for rank in sorted(range(PERTURBATIONS + 1), key=lambda r: (ranks[kind, r], rng.random())):
        for _ in range(_TRIES):
            steps = [unit * rng.randint(1, widest) for _ in range(PERTURBATIONS)]
            ladder = [scale.truth + sum(steps[:i]) - sum(steps[:rank]) for i in range(PERTURBATIONS + 1)]
            wrong = ladder[:rank] + ladder[rank + 1 :]
            if min(wrong) < lowest or max(wrong) > highest:
                continue
            if not scale.year and mean >= 5 and any((w % 5 == 0) != (scale.truth % 5 == 0) for w in wrong):
                continue
            texts = [scale.write(w) for w in rng.sample(wrong, len(wrong))]
            if not taken & {text.casefold() for text in texts}:
                ranks[kind, rank] += 1
                return [form.replace("#", text) for form, text in zip(forms, texts, strict=True)]
    raise UserError(f"D: no five values fit beside {value!r}")


class _Scale(NamedTuple):
    """What a text counts: its value in units of its last digit, what values make sense, how another is written."""

    truth: int
    units: int
    year: bool
    lowest: float
    highest: float
    write: Callable[[int], str]


def _scale(match: re.Match[str], rng: random.Random) -> _Scale:
    text = match.group()
    if match.re is _DATE:
        # Days and months of their own for each wrong date; a day that the month has in every year.
        months = rng.sample([m for m in MONTHS if m != match["month"]], PERTURBATIONS)
        days: list[str] = []
        for month in months if match["day"] else ():
            length = monthrange(2001, MONTHS.index(month) + 1)[1]
            free = [f"{day} " for day in range(1, length + 1) if str(day) != match["day"]]
            days.append(rng.choice([day for day in free if day not in days]))
        texts = cycle([f"{day}{month}" for day, month in zip_longest(days, months, fillvalue="")])
        write = lambda year: f"{next(texts)} {year}"  # noqa: E731
        return _Scale(int(match["year"]), 1, True, 1, LAST_YEAR, write)
    if match.re is _SEASON:
        return _Scale(int(match["year"]), 1, True, 1, LAST_YEAR, lambda year: f"{year}–{(year + 1) % 100:02}")
    if (word := text.casefold()) in (*_CARDINALS, *_ORDINALS):
        # Not one: "one goals" is no English.
        names, lowest = (_CARDINALS, 2) if word in _CARDINALS else (_ORDINALS, 1)
        case = str.capitalize if text[0].isupper() else str
        return _Scale(names.index(word), 1, False, lowest, len(names) - 1, lambda n: case(names[n]))
    decimals = len(text.partition(".")[2])
    comma, units = "," * ("," in text), 10**decimals
    truth = round(float(text.replace(",", "")) * units)
    year = len(text) == 4 and 1000 <= truth <= LAST_YEAR and text.isdigit()
    highest = LAST_YEAR if year else float("inf")
    return _Scale(truth, units, year, 1, highest, lambda n: f"{n / units:{comma}.{decimals}f}")
