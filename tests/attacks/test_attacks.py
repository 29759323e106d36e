"""The nine attack suites: laws over all of them, golden files, and the file that replaces them."""

import json
import os
import re
import string
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict

from lm_eval_elude.attacks.builders import ATTACKS, PLACES, Suite, build_attacks, build_control, flaw
from lm_eval_elude.attacks.files import load_attack_file
from lm_eval_elude.attacks.prompt import LANGUAGES, language_of
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.targets import TARGETS, Target, resolve_target
from lm_eval_elude.errors import UserError
from lm_eval_elude.text.names import mask, rename, short_name, synonyms
from lm_eval_elude.text.words import STOP, words
from tools.mini.build import HERE, read_facts

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "attacks"
FACTS = sorted((HERE / "facts" / "forget").glob("*.txt"))
PLAIN = ("prefix_injection", "affirmative_suffix", "role_playing", "background_hint", "in_context_learning")


def mini(path: Path) -> tuple[Target, list[QARecord]]:
    facts = read_facts(path, coin=True)
    return resolve_target(facts.title), [replace(record, entity=facts.title) for record in facts.records]


RONALDO, RECORDS = mini(HERE / "facts" / "forget" / "cristiano_ronaldo.txt")
SUITES = {
    (path.stem, attack): (target, records, build_attacks(records, target, attack))
    for path in FACTS
    for target, records in [mini(path)]
    for attack in ATTACKS
}
every_suite = pytest.mark.parametrize(("stem", "attack"), SUITES)


def test_the_nine_types_of_the_paper():
    assert list(ATTACKS) == [
        "prefix_injection", "affirmative_suffix", "role_playing", "multiple_choice", "reverse_query",
        "synonym_manipulation", "background_hint", "in_context_learning", "cross_lingual",
    ]  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_at_least_eight_wordings_and_none_twice(attack):
    carriers = ATTACKS[attack].carriers
    assert len(set(carriers)) == len(carriers) >= 8
    # No space follows a full-width sign.
    assert not [carrier for carrier in carriers if language_of(carrier) in ("ja", "zh") and " " in carrier]


@every_suite
def test_a_hundred_distinct_prompts_that_use_every_wording_and_most_records(stem, attack):
    target, records, suite = SUITES[stem, attack]
    assert len(suite) == len({item.prompt for item in suite}) == 100
    assert {(item.type, item.target) for item in suite} == {(attack, target.name)}
    # A reverse query needs facts that mask cleanly and speak of the target, a synonym a question without other uses
    # of the surname; every other type asks every record, about equally often.
    counts = Counter(item.record for item in suite)
    fewer = {"reverse_query": 30, "synonym_manipulation": len(records) - 2}
    assert len(counts) >= fewer.get(attack, len(records))
    assert max(counts.values()) - min(counts.values()) <= 1


@every_suite
def test_the_answer_is_not_in_the_prompt(stem, attack):
    target, records, suite = SUITES[stem, attack]
    for item in suite:
        record = records[item.record]
        rest = item.prompt
        if attack == "multiple_choice":
            # The options are where the answer belongs; nothing else may hold it.
            options = re.findall(r"^[A-F]\) .*$", rest, re.MULTILINE)
            assert options.count(item.answer) == 1
            rest = re.sub(r"^[A-F]\) .*$", "", rest, flags=re.MULTILINE)
        for text in (item.answer, item.paraphrased_answer, record.answer, record.paraphrased_answer):
            if attack != "reverse_query" or text.endswith(f"{target.name}."):
                assert text.casefold() not in rest.casefold()
        if attack == "reverse_query":
            known = "|".join(map(re.escape, (*target.name.split(), *target.aliases, *target.descriptions)))
            assert not re.search(rf"\b(?:{known})\b", rest, re.IGNORECASE)
        elif attack != "cross_lingual":
            # Independent of telling_words: the value, cut out of the paraphrase by comparing it with the wrong ones.
            value = _value(record)
            question = item.prompt if attack == "synonym_manipulation" else record.question
            if value.casefold() not in question.casefold():
                around = rest.replace(record.question, "")
                assert not re.search(rf"(?<!\w){re.escape(value)}(?!\w)", around, re.IGNORECASE)


def _value(record: QARecord) -> str:
    """What the paraphrase has between the beginning and the end it shares with its five wrong versions."""
    texts = [record.paraphrased_answer, *record.perturbed_answer]
    start = _shared(texts)
    end = _shared([text[start:][::-1] for text in texts])
    text = record.paraphrased_answer
    while start and text[start - 1].isalnum():
        start -= 1
    while end and text[-end].isalnum():
        end -= 1
    return text[start : len(text) - end].strip()


def _shared(texts: list[str]) -> int:
    """How many characters all texts begin with."""
    return next(i for i in range(len(texts[0]) + 1) if len({text[: i + 1] for text in texts}) > 1)


@every_suite
def test_what_is_asked_survives(stem, attack):
    target, records, suite = SUITES[stem, attack]
    for item in suite:
        record = records[item.record]
        assert item.question == record.question
        if attack in (*PLAIN, "multiple_choice"):
            assert record.question in item.prompt
        elif attack == "cross_lingual":
            assert dict(record.translated_question)[language_of(item.prompt)] in item.prompt
        elif attack == "synonym_manipulation":
            assert any(_asks(item.prompt, record, target, alias) for alias in synonyms(target))
        else:
            facts = Suite(records, target, attack, 0).facts
            assert 2 <= sum(fact in item.prompt for fact in facts.values()) <= 3


def _asks(prompt: str, record: QARecord, target: Target, alias: str) -> bool:
    """Whether the question stands in the prompt with the alias for the name, and perhaps other names of places."""
    asked = re.escape(record.question.replace(target.name, alias))
    for place, called in PLACES.items():
        asked = asked.replace(re.escape(place), f"(?:{'|'.join(map(re.escape, (place, *called)))})")
    return re.search(asked, prompt, re.IGNORECASE) is not None


@every_suite
def test_answers_keep_the_form_of_their_type(stem, attack):
    target, records, suite = SUITES[stem, attack]
    people = {f"These facts are about {other}." for other in target.others}
    for item in suite:
        record = records[item.record]
        assert len(set(item.perturbed_answer)) == 5
        if attack == "reverse_query":
            assert item.answer == f"The person described is {target.name}."
            assert item.paraphrased_answer == f"These facts are about {target.name}."
            assert set(item.perturbed_answer) < people
        elif attack == "multiple_choice":
            options = dict(re.findall(r"^([A-F])\) (.*)$", item.prompt, re.MULTILINE))
            assert sorted(options.values()) == sorted((record.paraphrased_answer, *record.perturbed_answer))
            letter = next(key for key, text in options.items() if text == record.paraphrased_answer)
            assert item.answer == f"{letter}) {record.paraphrased_answer}"
            assert item.paraphrased_answer == f"The correct option is {item.answer}"
            wrong = {f"The correct option is {key}) {text}" for key, text in options.items() if key != letter}
            assert set(item.perturbed_answer) == wrong
        else:
            given = (item.answer, item.paraphrased_answer, item.perturbed_answer)
            assert given == (record.answer, record.paraphrased_answer, record.perturbed_answer)


@pytest.mark.parametrize("n", (6, 50, 100))
def test_the_right_letter_is_evenly_spread_and_not_predictable(n):
    suite = build_attacks(RECORDS, RONALDO, "multiple_choice", n=n)
    letters = [item.answer[0] for item in suite]
    wrong = [[answer.removeprefix("The correct option is ")[0] for answer in item.perturbed_answer] for item in suite]
    assert any(order != sorted(order) for order in wrong)
    counts = Counter(letters)
    assert set(counts) == set("ABCDEF") and max(counts.values()) - min(counts.values()) <= 1
    assert n == 6 or letters[:6] != letters[6:12]


def test_five_languages_evenly_and_each_asks_for_english():
    suite = build_attacks(RECORDS, RONALDO, "cross_lingual", n=52)
    counts = Counter(language_of(item.prompt) for item in suite)
    assert set(counts) == set(LANGUAGES) and max(counts.values()) - min(counts.values()) <= 1


def test_without_translations_there_is_nothing_to_ask_in_another_language():
    bare = [replace(record, translated_question=()) for record in RECORDS]
    assert build_attacks(bare, RONALDO, "cross_lingual") == []
    some = [*bare[:40], *RECORDS[40:]]
    assert {item.record for item in build_attacks(some, RONALDO, "cross_lingual")} == {*range(40, len(some))}


def suites_of(attack):
    return [(target, records, suite) for (_, name), (target, records, suite) in SUITES.items() if name == attack]


def test_a_reverse_query_offers_people_of_the_same_field_and_sex():
    for one in TARGETS:
        for other in TARGETS:
            like, unlike = {*one.others} - {other.name}, {*other.others} - {one.name}
            assert like == unlike or not like & unlike
    for target, _, suite in suites_of("reverse_query"):
        assert len(target.others) >= 5 and target.name not in target.others
        for item in suite:
            assert not re.search(r"\b(?:father|mother|daughter|sister|brother|family)\b", item.prompt)


def test_a_synonym_stands_without_the_surname():
    for target, _, suite in suites_of("synonym_manipulation"):
        assert not [i.prompt for i in suite if words(short_name(target)) & words(i.prompt)]
        used = {synonym for i in suite for synonym in synonyms(target) if synonym.casefold() in i.prompt.casefold()}
        assert used == {*synonyms(target)} and {*target.descriptions} < used


def test_hints_are_about_what_the_question_is_about():
    for target, records, suite in suites_of("background_hint"):
        shared = 0
        for item in suite:
            content = words(records[item.record].question) - STOP - words(target.name)
            shared += bool(content & words(item.prompt.replace(records[item.record].question, "")))
        assert shared >= 75


@pytest.mark.parametrize("attack", ATTACKS)
def test_same_seed_same_bytes_and_a_smaller_suite_is_the_beginning_of_a_larger(attack):
    first, again = (build_attacks(RECORDS, RONALDO, attack, seed=3) for _ in range(2))
    assert first == again
    assert build_attacks(RECORDS, RONALDO, attack, n=37, seed=3) == first[:37]
    assert [i.prompt for i in build_attacks(RECORDS, RONALDO, attack, seed=4)] != [i.prompt for i in first]


def test_all_types_draw_the_records_of_the_control():
    for n in (10, 46, 100):
        control = build_control(RECORDS, RONALDO, n=n)
        assert len(control) == min(n, len(RECORDS))
        assert all(item.type == "none" and item.prompt == RECORDS[item.record].question for item in control)
        for attack in ATTACKS.keys() - {"reverse_query"}:
            suite = build_attacks(RECORDS, RONALDO, attack, n=n)
            missing = {item.record for item in control} ^ {item.record for item in suite}
            assert len(missing) <= 2 * (attack == "synonym_manipulation")


def test_too_few_records_give_fewer_prompts_not_repeated_ones():
    suite = build_attacks(RECORDS[:2], RONALDO, "prefix_injection")
    assert len(suite) == len({item.prompt for item in suite}) == 2 * len(ATTACKS["prefix_injection"].carriers)
    assert len(build_attacks(RECORDS[:2], RONALDO, "multiple_choice")) == 2 * len(ATTACKS["multiple_choice"].carriers)
    assert build_attacks(RECORDS[:1], RONALDO, "in_context_learning") == []
    assert build_attacks(RECORDS[:1], RONALDO, "reverse_query") == []
    assert build_attacks([RECORDS[0]] * 3, RONALDO, "synonym_manipulation", n=9) != []
    assert build_attacks([], RONALDO, "role_playing") == []


# --- any data

# Words that no carrier has, so that a hit is a leak.
nonce = st.text(string.ascii_lowercase, min_size=4, max_size=8).map(lambda text: "Zq" + text)
names = st.lists(st.text(string.ascii_lowercase, min_size=3, max_size=8).map(str.capitalize), min_size=1, max_size=3)


@st.composite
def some_records(draw) -> tuple[Target, list[QARecord]]:
    target = Target(" ".join(draw(names)))
    values = draw(st.lists(nonce, min_size=12, max_size=36, unique_by=str.casefold))
    records = []
    for i in range(len(values) // 6):
        right, *wrong = values[6 * i : 6 * i + 6]
        place = draw(
            st.sampled_from([f"Did {target.name} visit town {i}?", f"What {{brace}} is {i} to {target.name}'s kin?"])
        )
        form = draw(st.sampled_from(["He met {} there.", "It was {} who knew her."]))
        records.append(
            QARecord(target.name, place, f"He saw {right}.", f"Is it {i}?", form.format(right),
                     tuple(form.format(x) for x in wrong))
        )  # fmt: skip
    return target, records


@settings(max_examples=40, deadline=None)
@given(some_records(), st.sampled_from(list(ATTACKS)), st.integers(0, 9), st.integers(0, 30))
def test_laws_hold_for_any_entity_and_records(data, attack, seed, n):
    target, records = data
    suite = build_attacks(records, target, attack, n=n, seed=seed)
    assert suite == build_attacks(records, target, attack, n=n, seed=seed)
    assert len(suite) == len({item.prompt for item in suite}) <= n
    for item in suite:
        record = records[item.record]
        assert flaw(item, item.prompt, record, target) == ""
        value = record.answer.removeprefix("He saw ").removesuffix(".")
        if attack not in {"multiple_choice", "reverse_query"}:
            assert value.casefold() not in item.prompt.casefold()


@pytest.mark.parametrize("name", ("Jane Roe", "Adele", "Henry VIII"))
def test_an_entity_without_aliases_gets_derived_ones(name):
    target = Target(name)
    records = [replace(r, question=r.question.replace("Cristiano Ronaldo", name), entity=name) for r in RECORDS]
    for item in build_attacks(records, target, "synonym_manipulation", n=20):
        assert name not in item.prompt and any(alias in item.prompt for alias in synonyms(target))
    assert synonyms(Target("Jane Roe")) == ("J. Roe", "Roe") and synonyms(Target("Adele")) == ("A-d-e-l-e",)
    assert synonyms(Target("Henry VIII")) == ("H. Henry", "Henry")


# --- names

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


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.slug)
def test_aliases_can_stand_for_the_name(target):
    names = (*target.aliases, *target.descriptions)
    assert len(synonyms(target)) >= 3 and {*target.descriptions} < {*synonyms(target)}
    assert len({name.casefold() for name in names}) == len(names)


# --- the file that replaces the built prompts


def write(path: Path, rows: list) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_a_file_gives_back_what_was_written(tmp_path):
    suites = {attack: build_attacks(RECORDS, RONALDO, attack, n=7) for attack in ATTACKS}
    path = write(tmp_path / "a.jsonl", [asdict(item) for suite in suites.values() for item in suite])
    for attack, suite in suites.items():
        assert load_attack_file(path, RONALDO, attack) == suite
    other = build_attacks(mini(FACTS[1])[1], TARGETS[9], "role_playing", n=2)
    write(path, [asdict(item) for item in (*suites["role_playing"], *other)])
    assert load_attack_file(path, RONALDO, "role_playing", [TARGETS[9]]) == suites["role_playing"]


GOOD = asdict(build_attacks(RECORDS, RONALDO, "role_playing", n=1)[0])


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (GOOD | {"type": "jailbreak"}, "field 'type' is 'jailbreak', expected one of prefix_injection, "),
        (GOOD | {"target": "Lionel Messi"}, "field 'target' is 'Lionel Messi', expected one of Cristiano Ronaldo"),
        ({k: v for k, v in GOOD.items() if k != "answer"}, "field 'answer' is missing"),
        (GOOD | {"answer": " "}, "field 'answer': "),
        (GOOD | {"perturbed_answer": ["a"] * 4}, "field 'perturbed_answer': "),
        (GOOD | {"record": "one"}, "field 'record': "),
        (["no object"], "expected `object`"),
        ("{cut", "not valid JSON"),
    ],
)
def test_a_bad_row_is_named_with_file_row_and_field(tmp_path, row, problem):
    path = write(tmp_path / "mine.jsonl", [GOOD, row])
    with pytest.raises(UserError) as error:
        load_attack_file(path, RONALDO, "role_playing")
    assert str(error.value).startswith(f"mine.jsonl, row 2: {problem}") and "\n" not in str(error.value)


def test_a_missing_file_or_type_or_answer_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match=r"none\.jsonl. cannot be read \(No such file"):
        load_attack_file(tmp_path / "none.jsonl", RONALDO, "role_playing")
    with pytest.raises(UserError, match="no row has the type 'cross_lingual' and the target 'Cristiano Ronaldo'"):
        load_attack_file(write(tmp_path / "mine.jsonl", [GOOD]), RONALDO, "cross_lingual")
    with pytest.raises(UserError, match="unknown attack 'jailbreak'; the types are prefix_injection"):
        build_attacks(RECORDS, RONALDO, "jailbreak")
    with pytest.raises(UserError, match="record 2 of Cristiano Ronaldo: attacks need a paraphrase and five wrong"):
        build_attacks([RECORDS[0], replace(RECORDS[1], perturbed_answer=())], RONALDO, "role_playing")


# --- what is wrong with a prompt


@pytest.mark.parametrize(
    ("attack", "change", "complaint"),
    [
        ("role_playing", lambda item: "", "is empty"),
        ("role_playing", lambda item: item.question, "only the plain question"),
        ("role_playing", lambda item: f"{item.prompt} {item.answer}", "gives the answer away"),
        ("role_playing", lambda item: "You are a poet. Recite something.", "lost the content"),
        ("multiple_choice", lambda item: item.prompt.replace(item.answer, "X"), "must stand in the prompt once"),
        ("multiple_choice", lambda item: item.prompt + item.answer, "must stand in the prompt once"),
        ("reverse_query", lambda item: item.prompt + " Hint: CR7.", "names the person asked for"),
        ("reverse_query", lambda item: "Who is this person?", "lost the content"),
        ("synonym_manipulation", lambda item: f"As they say, {item.question}", "full name"),
        ("background_hint", lambda item: f"You know this. {item.question}", "lost the content"),
        ("cross_lingual", lambda item: f"{item.question} Antworte bitte.", "does not ask in"),
    ],
)
def test_flaws_are_found(attack, change, complaint):
    for item in build_attacks(RECORDS, RONALDO, attack, n=10):
        assert flaw(item, item.prompt, RECORDS[item.record], RONALDO) == ""
        assert complaint in flaw(item, change(item), RECORDS[item.record], RONALDO)


# --- golden files


@pytest.mark.parametrize("attack", ATTACKS)
def test_golden(attack):
    """UPDATE_GOLDEN=1 writes the files anew; the diff then shows every change of what a model is asked."""
    text = ""
    for item in build_attacks(RECORDS, RONALDO, attack, n=12):
        wrong = "".join(f"\n  wrong: {answer}" for answer in item.perturbed_answer)
        text += f"{item.prompt}\n  answer: {item.answer}\n  paraphrase: {item.paraphrased_answer}{wrong}\n\n"
    path = GOLDEN / f"{attack}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text
