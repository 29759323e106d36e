"""The twenty targets and the spellings that find them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_elude.data.targets import TARGETS, Target, resolve_target, slugify
from lm_eval_elude.errors import UserError


def test_the_twenty_targets_of_the_paper():
    assert len({t.name for t in TARGETS}) == len({t.slug for t in TARGETS}) == 20


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.slug)
def test_name_slug_and_aliases_find_their_own_target(target):
    spellings = [target.name, target.slug, target.name.upper(), target.name.replace(" ", "-"), *target.aliases]
    assert {resolve_target(spelling) for spelling in spellings} == {target}


@pytest.mark.parametrize("name", ["ronaldo", "cristiano_ronaldo", "CR7", " cristiano  ronaldo "])
def test_spellings_find_their_target(name):
    assert resolve_target(name).name == "Cristiano Ronaldo"


def test_what_is_no_target_gets_near_matches_and_the_list_in_one_line():
    with pytest.raises(UserError, match=r"^unknown target 'ronaldoo': did you mean Cristiano Ronaldo or ") as error:
        resolve_target("ronaldoo")
    assert all(t.name in str(error.value) for t in TARGETS) and "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"^unknown target 'zzzz': known targets: "):
        resolve_target("zzzz")
    with pytest.raises(UserError, match=r"'michael' is ambiguous: Michael Jackson, Michael Jordan; give the full name"):
        resolve_target("michael")


def test_an_alias_does_not_hide_another_entity_of_the_same_data():
    with pytest.raises(UserError, match="ambiguous: Cristiano Ronaldo, Ronaldo Nazario"):
        resolve_target("ronaldo", ["Cristiano Ronaldo", "Ronaldo Nazario"])
    assert resolve_target("cr7", ["Cristiano Ronaldo", "Ronaldo Nazario"]).name == "Cristiano Ronaldo"


def test_only_the_known_entities_are_meant():
    assert resolve_target("my_entity", ["My Entity", "Lionel Messi"]) == Target("My Entity")
    assert resolve_target("leo messi", ["My Entity", "Lionel Messi"]).aliases
    with pytest.raises(UserError, match=r"known targets: My Entity$"):
        resolve_target("Cristiano Ronaldo", ["My Entity"])


@given(st.text(max_size=12))
def test_any_text_finds_a_target_or_says_why_in_one_line(name):
    try:
        assert resolve_target(name) in TARGETS
    except UserError as error:
        assert "\n" not in str(error).replace(repr(name), "")


@given(st.text(max_size=30))
def test_slugs_are_stable_file_names(text):
    slug = slugify(text)
    assert slugify(slug) == slug and "/" not in slug and " " not in slug


OTHERS = """
    Пушкин, Александр Пушкин, 李小龙, ガガ, カカ, नरेन्द्र मोदी, Αριστοτέλης, محمد علي, Ødïn Ø, Ø, Æ, $$$, 😀
""".strip().split(", ")


def test_names_in_any_alphabet_have_slugs_of_their_own():
    slugs = [slugify(name) for name in OTHERS]
    assert all(slugs) and len(set(slugs)) == len(slugs)
    assert slugify("Beyoncé  Knowles") == "beyonce_knowles"
    assert slugify("ПУШКИН!") == "пушкин" and slugify("Bruce 李小龙") == "bruce_李小龙" and slugify("$") == "u24"


@pytest.mark.parametrize("name", OTHERS)
def test_a_name_in_another_alphabet_finds_its_own_and_no_other(name):
    assert resolve_target(name, OTHERS) == Target(name)
    with pytest.raises(UserError):
        resolve_target(name, [other for other in OTHERS if other != name and name not in other.split()])


def test_part_of_a_name_in_another_alphabet_is_enough():
    assert resolve_target("пушкин", ["Александр Пушкин", "李小龙"]).name == "Александр Пушкин"


@given(st.text(max_size=12), st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=4, unique=True))
def test_the_name_itself_is_always_found_and_blank_never(name, known):
    for spelling in known:
        assert resolve_target(spelling, known).name == spelling
    if not name.strip():
        with pytest.raises(UserError):
            resolve_target(name, known)


@pytest.mark.parametrize("known", [["Ada Example", "ada-example"], ["A.B.", "A B"]])
def test_names_that_fold_alike_are_told_apart_by_spelling(known):
    assert [resolve_target(name, known).name for name in known] == known
    with pytest.raises(UserError, match="ambiguous"):
        resolve_target(known[0].upper().replace(".", "-"), known)
