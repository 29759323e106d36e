"""A target's names in a sentence: how an alias takes a name's place, how names are masked, which aliases there are."""

from dataclasses import replace

import pytest

from lm_eval_elude.attacks.builders import build_attacks
from lm_eval_elude.data.dataset import load_records
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.targets import TARGETS, Target
from lm_eval_elude.text.invented import renamed
from lm_eval_elude.text.names import mask, rename, synonyms
from lm_eval_elude.text.words import fact_in, words

POP = Target("Michael Jackson", ("the King of Pop", "Jacko"))


@pytest.mark.parametrize(
    ("question", "alias", "expected"),
    [
        ("When was Michael Jackson born?", "the King of Pop", "When was the King of Pop born?"),
        ("Michael Jackson's sister sang what?", "Jacko", "Jacko's sister sang what?"),
        ("Michael Jackson sang what?", "the King of Pop", "The King of Pop sang what?"),
        ("What did the young Michael Jackson sing?", "the King of Pop", None),
        ("What did the young Michael Jackson sing?", "Jacko", "What did the young Jacko sing?"),
        ("Whose son is Michael Jackson's father?", "the King of Pop", None),
        ("When did Jackson go solo?", "Jacko", "When did Jacko go solo?"),
        ("Who is Janet Jackson?", "Jacko", "This is about Jacko. Who is Janet Jackson?"),
        ("Where was he born?", "the King of Pop", "This is about the King of Pop. Where was he born?"),
        ("Why is Michael Jackson called Jacko?", "Jacko", None),
    ],
)
def test_rename(question, alias, expected):
    assert rename(question, POP, alias) == expected


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("Michael Jackson's first song was Ben.", "This person's first song was Ben."),
        ("In 1972 Jackson's song reached the top.", "In 1972 this person's song reached the top."),
        ("He danced, and crowds loved him.", "This person danced, and crowds loved him."),
        ("Her first song was Ben.", "This person's first song was Ben."),
        ("Her sister is Janet.", None),
        ("On both of these songs he plays the drums.", None),
        ("Quincy Jones worked with the King of Pop.", "Quincy Jones worked with this person."),
        ("Janet Jackson is his sister.", None),
        ("The Jackson Five were his group.", None),
        ("He answered to Michael at home.", None),
        ("Ben is a song about a rat.", None),
        ("The young Jackson sang.", None),
    ],
)
def test_mask(sentence, expected):
    assert mask(sentence, POP) == expected


@pytest.mark.parametrize(
    ("text", "of", "expected"),
    [
        ("The first album of The Beatles. The band.", "The Beatles", "The first album of Marco Hallen. The band."),
        ("Who founded The Who? They did.", "The Who", "Who founded Marco Hallen? They did."),
        ("The Beatles: Beatles fans.", "The Beatles", "Marco Hallen: Hallen fans."),
        ("Ada Quinte, or Ada, or Quinte.", "Ada Quinte", "Marco Hallen, or Marco, or Hallen."),
        ("Elizabeth II. Elizabeth and World War II.", "Elizabeth II", "Marco Hallen. Marco and World War II."),
        ("J. K. Rowling: Rowling wrote.", "J. K. Rowling", "Marco Hallen: Hallen wrote."),
        ("Renée met René Brûlé or Brûlé at Brûléjour.", "René Brûlé", "Renée met Marco Hallen or Hallen at Brûléjour."),
        ("Đặng Hàm, Hàm of Hàmđào.", "Đặng Hàm", "Marco Hallen, Hallen of Hàmđào."),
    ],
)
def test_a_text_about_another_name_keeps_its_common_words(text, of, expected):
    assert renamed(text, of, "Marco Hallen") == expected
    assert renamed("Marco Hallen, or Hallen.", "Marco Hallen", "Eminem") == "Eminem, or Eminem."


def test_every_published_target_has_aliases_that_can_stand_for_its_name():
    for target in TARGETS:
        names = (*target.aliases, *target.descriptions)
        assert len(synonyms(target)) >= 3 and {*target.descriptions} <= {*synonyms(target)}
        assert len({name.casefold() for name in names}) == len(names)


@pytest.mark.parametrize(
    ("name", "derived"),
    [("Jane Roe", ("J. Roe", "Roe")), ("Adele", ("A-d-e-l-e",)), ("Henry VIII", ("H. Henry", "Henry"))],
)
def test_an_entity_without_aliases_gets_derived_ones(name, derived):
    target = Target(name)
    assert synonyms(target) == derived
    ronaldo = load_records("mini", "forget", "train", ["Cristiano Ronaldo"]).records
    records = [replace(r, question=r.question.replace("Cristiano Ronaldo", name), entity=name) for r in ronaldo]
    for item in build_attacks(records, target, "synonym_manipulation", n=20):
        assert name not in item.prompt and any(alias in item.prompt for alias in synonyms(target))


def test_no_character_of_a_text_is_lost_where_its_fact_is_cut_out():
    true = "His name there is @Foo_Bar, _since_ 2017."
    record = QARecord("A B", "Q?", "A.", "P?", true, tuple(true.replace("2017", str(year)) for year in range(5)))
    assert fact_in(record) == ("His name there is @Foo_Bar, _since_ ", "2017", ".")
    assert words("_Foo_ bar_baz") == {"foo", "bar", "baz"}
