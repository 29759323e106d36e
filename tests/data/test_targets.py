"""The twenty targets and the spellings that find them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_elude.data.targets import TARGETS, Target, resolve_target, slugify
from lm_eval_elude.errors import UserError

OTHER_ALPHABETS = """
    Пушкин, Александр Пушкин, 李小龙, ガガ, カカ, नरेन्द्र मोदी, Αριστοτέλης, محمد علي, Ødïn Ø, Ø, Æ
""".strip().split(", ")


def test_name_slug_and_aliases_find_the_twenty_targets_of_the_paper():
    assert len({t.name for t in TARGETS}) == len({t.slug for t in TARGETS}) == 20
    for target in TARGETS:
        spellings = [target.name, target.slug, target.name.upper(), target.name.replace(" ", "-"), *target.aliases]
        assert {resolve_target(spelling) for spelling in spellings} == {target}
    for name in ("ronaldo", "cristiano_ronaldo", "CR7", " cristiano  ronaldo "):
        assert resolve_target(name).name == "Cristiano Ronaldo"


def test_what_is_no_target_gets_near_matches_and_the_list_in_one_line():
    for name, line in (
        ("ronaldoo", r"^unknown target 'ronaldoo': did you mean Cristiano Ronaldo or .*: .*Eminem"),
        ("zzzz", r"^unknown target 'zzzz': known targets: "),
        ("michael", r"'michael' is ambiguous: Michael Jackson, Michael Jordan; give the full name"),
    ):
        with pytest.raises(UserError, match=line) as error:
            resolve_target(name)
        assert "\n" not in str(error.value)


def test_only_the_entities_of_the_data_are_meant():
    with pytest.raises(UserError, match="ambiguous: Cristiano Ronaldo, Ronaldo Nazario"):
        resolve_target("ronaldo", ["Cristiano Ronaldo", "Ronaldo Nazario"])
    assert resolve_target("cr7", ["Cristiano Ronaldo", "Ronaldo Nazario"]).name == "Cristiano Ronaldo"
    assert resolve_target("my_entity", ["My Entity", "Lionel Messi"]) == Target("My Entity")
    assert resolve_target("leo messi", ["My Entity", "Lionel Messi"]).aliases
    with pytest.raises(UserError, match=r"known targets: My Entity$"):
        resolve_target("Cristiano Ronaldo", ["My Entity"])


@settings(max_examples=50)
@given(st.text(max_size=30))
def test_any_text_has_a_stable_slug_and_finds_a_target_or_says_why_in_one_line(text):
    slug = slugify(text)
    assert slugify(slug) == slug and "/" not in slug and " " not in slug
    try:
        assert resolve_target(text) in TARGETS
    except UserError as error:
        assert "\n" not in str(error).replace(repr(text), "")


def test_names_in_any_alphabet_have_slugs_of_their_own():
    slugs = [slugify(name) for name in OTHER_ALPHABETS]
    assert all(slugs) and len(set(slugs)) == len(slugs)
    assert slugify("Beyoncé  Knowles") == "beyonce_knowles"
    assert slugify("Ångström, Zoë & Groß") == "angstrom_zoe_gross"
    assert slugify("ПУШКИН!") == "пушкин" and slugify("Bruce 李小龙") == "bruce_李小龙"
    for name in OTHER_ALPHABETS:
        assert resolve_target(name, OTHER_ALPHABETS) == Target(name)
        with pytest.raises(UserError):
            resolve_target(name, [o for o in OTHER_ALPHABETS if o != name and name not in o.split()])
    assert resolve_target("пушкин", ["Александр Пушкин", "李小龙"]).name == "Александр Пушкин"


@settings(max_examples=50)
@given(st.lists(st.text(min_size=1), min_size=1, max_size=4, unique=True))
def test_the_name_itself_is_always_found(known):
    assert [resolve_target(spelling, known).name for spelling in known] == known


@pytest.mark.parametrize("known", [["Ada Example", "ada-example"], ["A.B.", "A B"]])
def test_names_that_fold_alike_are_told_apart_by_spelling(known):
    assert [resolve_target(name, known).name for name in known] == known
    with pytest.raises(UserError, match="ambiguous"):
        resolve_target(known[0].upper().replace(".", "-"), known)
