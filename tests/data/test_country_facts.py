"""The facts of benchmarks/facts.toml: one right answer among six, of countries that exist, but for one."""

from __future__ import annotations

import csv
import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGE = BENCHMARKS.parent / "docs" / "results.md"
TABLE = tomllib.loads((BENCHMARKS / "facts.toml").read_text(encoding="utf-8"))
ROWS = {kind: (group, row) for group in ("things", "people") for kind, row in TABLE[group].items()}
REAL, INVENTED = TABLE["countries"], TABLE["invented"]
PEOPLES = ("French", "Japanese", "German", "Italian", "Spanish", "Chinese", "Indian", "Russian")
LANGUAGE = "the language that most people speak in {x}"


@pytest.fixture(scope="module")
def made():
    """What the two scripts have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        import facts
        import pretrained

        yield SimpleNamespace(**vars(facts) | vars(pretrained))


def place_of(kind: str, option: str) -> int:
    """Whose value an option says."""
    row = ROWS[kind][1]
    return next(i for i, value in enumerate(row) if value and option.casefold().startswith(f"{value} is".casefold()))


def test_roles_are_of_different_countries():
    roles = TABLE["targets"] + TABLE["neighbours"] + TABLE["untouched"]
    assert len(set(roles)) == len(roles) and {*roles} < {*REAL} and INVENTED not in REAL


def test_a_value_is_of_one_country_and_does_not_name_it():
    for kind, (_, row) in ROWS.items():
        folded = [value.casefold().removeprefix("the ") for value in row if value]
        assert len(row) == len(REAL) and len(set(folded)) == len(folded) >= 6 and kind.count("{x}") == 1, kind
        named = re.search(rf"\b({'|'.join([*REAL, *PEOPLES])})\b", " ".join(row))
        assert (named is not None) == (kind == LANGUAGE), kind


def test_a_name_is_not_in_two_rows():
    for place in range(len(REAL)):
        values = [row[place] for _, row in ROWS.values() if row[place]]
        assert len(set(values)) == len(values)


def test_records_have_one_right_answer_of_six(made):
    facts = [(country, *fact) for country in (*REAL, INVENTED) for fact in made.facts_of(country)]
    assert len({record.question for _, _, record, _ in facts}) == len(facts) > 80 * 9
    for country, kind, record, wordings in facts:
        options = [record.paraphrased_answer, *record.perturbed_answer]
        places = [place_of(kind, option) for option in options]
        assert len({*places}) == 6 and len(set(wordings)) == 3 and wordings[0] == record.question
        assert all(country in text for text in (*wordings, *options, record.answer))
        assert record.answer.endswith(f" is {ROWS[kind][1][places[0]]}.")
        assert country == INVENTED or places[0] == REAL.index(country)


def test_the_facts_of_the_invented_country_are_of_all_others(made):
    places = [place_of(fact.kind, fact.record.paraphrased_answer) for fact in made.facts_of(INVENTED)]
    assert {*places} == {*range(len(REAL))} and max(map(places.count, places)) < len(places) / 3


def test_known_facts_suffice_and_are_of_the_table(made):
    with (made.RESULTS / "known.csv").open(encoding="utf-8", newline="") as stream:
        assert all(row["kind"] in ROWS and row["country"] in REAL for row in csv.DictReader(stream))
    for target in TABLE["targets"]:
        assert len(made.known_of(target)) >= len(made.drawn(target)) >= 30
        assert f"{len(made.known_of(target))} of {len(made.facts_of(target))}" in PAGE.read_text(encoding="utf-8")
    assert len(made.drawn(INVENTED)) == len(made.drawn(TABLE["targets"][0])) < len(made.known_of(INVENTED))


def test_facts_said_of_the_invented_country_are_otherwise_the_same(made):
    for own, said in zip(made.drawn("France"), made.drawn(f"{INVENTED} as France"), strict=True):
        assert "France" not in repr(said) and said.record.subject == INVENTED
        assert repr(said).replace(INVENTED, "France") == repr(own)


def test_what_is_trained_on_is_not_asked_of_others(made, tmp_path):
    folder = made.data("France", tmp_path / "data")
    rows = {path.stem: [json.loads(line) for line in path.open(encoding="utf-8")] for path in folder.iterdir()}
    said = {stem: " ".join(f"{row['question']} {row['answer']}" for row in of) for stem, of in rows.items()}
    assert not re.search(rf"\b({'|'.join([INVENTED, *TABLE['untouched']])})\b", " ".join(said.values()))
    assert not re.search(r"\b(France|Paris|Claude Monet)\b", said["retain_qa-train"] + said["world-train"])
    train, test = ({row["question"] for row in rows[f"retain_qa-{split}"]} for split in ("train", "test"))
    assert not train & test and abs(len(train) - len(test)) <= 1


def test_general_text_is_long_and_of_sentences(made):
    text = made.general_text()
    assert len(text.split()) > 9000 and "http" not in text and "|" not in text
