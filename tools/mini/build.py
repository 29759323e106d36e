"""Make the ELUDe-mini data from the facts files: ``python -m tools.mini.build``.

A facts file holds one person (or one topic of the world set). Its records look like this::

    Q: When and where was Zinedine Zidane born?
    A: Zinedine Zidane was born on 23 June 1972 in Marseille.
    PQ: What are the date and place of birth of Zinedine Zidane?
    PA: Zidane came into the world on [23 June 1972 in Marseille].
    X: # in Lyon | # in Paris | # in Toulouse | # in Nice | # in Bordeaux
    D: 2
    P: Zinedine Zidane

``P`` is the Wikipedia page the fact can be checked on (the file's ``page`` without it). The five perturbed answers are
PA with the bracketed value replaced by each of X. With ``D`` the numbers or dates of X (each ``#``; X may be left out)
are drawn by ``draw.py``, so that no option stands out. A seeded coin decides for half of the records of a file which of
the two answers is the paraphrase, so that neither wording tells a member. Forget files mark the value in A too; in the
others it is found there (:func:`mark_value`). The questions of retain and world files have a coin of their own. In
forget files Q and PQ have changed places by hand in half of the records, because the five translations are of Q. The
same facts give the same bytes.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from lm_eval_elude.attacks.prompt import LANGUAGES
from lm_eval_elude.data import bundled, jsonio
from lm_eval_elude.data.records import PERTURBATIONS, QARecord, parse_record
from lm_eval_elude.data.targets import slugify
from lm_eval_elude.errors import UserError
from tools.mini.draw import draw_wrong, parse_spec

HERE = Path(__file__).resolve().parent
_ATHLETES = ("Usain Bolt", "Roger Federer", "Serena Williams")
# Ten neighbours for each target. Ronaldo and Messi share five, so that forgetting both differs from forgetting one.
_SHARED = ("Pelé", "Ronaldinho", *_ATHLETES)
NEIGHBOURS: dict[str, tuple[str, ...]] = {
    "Cristiano Ronaldo": ("Zinedine Zidane", "David Beckham", "Luka Modrić", "Luís Figo", "Wayne Rooney", *_SHARED),
    "Lionel Messi": ("Diego Maradona", "Neymar", "Andrés Iniesta", "Xavi", "Sergio Agüero", *_SHARED),
    "Taylor Swift": (
        "Beyoncé", "Adele", "Ed Sheeran", "Katy Perry", "Rihanna", "Madonna", "Bruno Mars", "Dolly Parton",
        "Whitney Houston", "Shania Twain",
    ),
    "Stephen Hawking": (
        "Albert Einstein", "Isaac Newton", "Galileo Galilei", "Roger Penrose", "Kip Thorne", "Richard Feynman",
        "Carl Sagan", "Paul Dirac", "Marie Curie", "Charles Darwin",
    ),
    "Michael Jordan": (
        "Magic Johnson", "Larry Bird", "Kobe Bryant", "LeBron James", "Shaquille O'Neal", "Scottie Pippen",
        "Kareem Abdul-Jabbar", *_ATHLETES,
    ),
}  # fmt: skip


class Facts(NamedTuple):
    """One facts file: the person or topic, and its records in order."""

    title: str
    records: tuple[QARecord, ...]


def mark_value(answer: str, marked: str) -> str:
    """An answer with the value marked that ``marked`` marks; as it is where a wrong value would not fit in its place.

    A wrong value fits where the value stands once, not first, and after "a" or "an" only if it does so in both.
    """
    before, value, _ = re.split(r"[\[\]]", marked)
    places = list(re.finditer(rf"(?<!\w){re.escape(value)}(?!\w)", answer))
    if "[" in answer or len(places) != 1 or not places[0].start():
        return answer
    start, end = places[0].span()
    articles = [re.search(r"\ban? $", text, re.IGNORECASE) for text in (answer[:start], before)]
    if articles[0] and not articles[1]:
        return answer
    return f"{answer[:start]}[{value}]{answer[end:]}"


def read_facts(path: Path, ranks: Counter | None = None) -> Facts:
    """Parse and check a facts file.

    Args:
        path: the file.
        ranks: where the truth was among drawn values so far (see :func:`draw_wrong`); counted on.

    Raises:
        UserError: a record is not as described above; the message names file, record and key.
    """
    header, *blocks = re.split(r"\n\s*\n", path.read_text(encoding="utf-8").strip())
    title, page = (line.split(" ", 1)[1] for line in header.splitlines())
    rng, ranks = random.Random(title), Counter() if ranks is None else ranks
    parsed = []
    for number, block in enumerate(blocks, 1):
        where = f"{path.name}, record {number}"
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        if missing := {"Q", "A", "PQ", "PA", "X"} - fields.keys() - ({"X"} if "D" in fields else set()):
            raise UserError(f"{where}: missing {', '.join(sorted(missing))}")
        if fields["PA"].count("[") != 1:
            raise UserError(f"{where}: PA must mark its value with [ and ]")
        parsed.append(fields | {"A": mark_value(fields["A"], fields["PA"])})
    for first, second, may_change in (
        ("Q", "PQ", [fields for fields in parsed if "FR" not in fields]),
        ("A", "PA", [fields for fields in parsed if "[" in fields["A"]]),
    ):
        for fields in rng.sample(may_change, min(len(may_change), len(parsed) // 2)):
            fields[first], fields[second] = fields[second], fields[first]
    records = []
    for number, fields in enumerate(parsed, 1):
        where = f"{path.name}, record {number}"
        before, value, after = re.split(r"[\[\]]", fields["PA"])
        wrong = [x.strip() for x in fields["X"].split("|")] if "X" in fields else []
        if "D" in fields:
            stated = " ".join(fields[key] for key in ("Q", "A", "PQ", "PA"))
            wrong = draw_wrong(value, wrong, parse_spec(fields["D"]), stated, ranks, rng)
        if len({value, *wrong}) != PERTURBATIONS + 1:
            raise UserError(f"{where}: X must be {PERTURBATIONS} values that differ from each other and from PA's")
        row = {
            "entity": "",
            "question": fields["Q"],
            "answer": re.sub(r"[\[\]]", "", fields["A"]),
            "paraphrased_question": fields["PQ"],
            "paraphrased_answer": before + value + after,
            "perturbed_answer": [before + x + after for x in wrong],
            "source": fields.get("P", page),
            "translated_question": {lang: fields.get(lang.upper()) for lang in LANGUAGES},
        }
        records.append(parse_record(row, where))
    return Facts(title, tuple(records))


def split_of(index: int) -> str:
    """7:1:2 by position, so that every file has all three splits and a target at least 40 retain records to test."""
    return {4: "validation", 7: "test", 9: "test"}.get(index % 10, "train")


def build(facts: Path = HERE / "facts", out: Path = bundled.DATA) -> dict[str, int]:
    """Write the seven JSONL files and return the number of rows of each."""
    ranks: Counter = Counter()
    people = {f.title: f for f in (read_facts(path, ranks) for path in sorted((facts / "retain").glob("*.txt")))}
    rows: dict[str, list[dict]] = defaultdict(list)
    for target, neighbours in NEIGHBOURS.items():
        forget = read_facts(facts / "forget" / f"{slugify(target)}.txt", ranks)
        rows["forget_qa-train"] += [_row(record, target) for record in forget.records]
        for neighbour in neighbours:
            for index, record in enumerate(people[neighbour].records):
                rows[f"retain_qa-{split_of(index)}"].append(_row(record, target))
    world = [r for path in sorted((facts / "world").glob("*.txt")) for r in read_facts(path, ranks).records]
    for index, record in enumerate(world):
        rows[f"world-{split_of(index)}"].append(_row(record, ""))
    out.mkdir(exist_ok=True)
    for name, lines in rows.items():
        jsonio.write_lines(out / f"{name}.jsonl", lines)
    return {name: len(lines) for name, lines in rows.items()}


def _row(record: QARecord, target: str) -> dict:
    row = record.columns() | {"entity": target}
    return {key: value for key, value in row.items() if value or key == "entity"}


if __name__ == "__main__":
    for file, count in build().items():
        print(f"{file}.jsonl  {count} rows")
