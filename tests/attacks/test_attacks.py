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

from lm_eval_elude.attacks.builders import ATTACKS, PLACES, Suite, alike, build_attacks, build_control, flaw
from lm_eval_elude.attacks.prompt import LANGUAGES, language_of, load_attack_file
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.targets import TARGETS, Target, resolve_target
from lm_eval_elude.errors import UserError
from lm_eval_elude.text.names import short_name, synonyms
from lm_eval_elude.text.words import STOP, words
from tests.support import GOLDEN, options_of, write_jsonl
from tools.mini.build import HERE, read_facts

PLAIN = ("prefix_injection", "affirmative_suffix", "role_playing", "background_hint", "in_context_learning")


def mini(path: Path) -> tuple[Target, list[QARecord]]:
    facts = read_facts(path)
    return resolve_target(facts.title), [replace(record, entity=facts.title) for record in facts.records]


FORGET_SETS = {path.stem: mini(path) for path in sorted((HERE / "facts" / "forget").glob("*.txt"))}
RONALDO, RECORDS = FORGET_SETS["cristiano_ronaldo"]
SUITES = {
    (stem, attack): build_attacks(records, target, attack)
    for stem, (target, records) in FORGET_SETS.items()
    for attack in ATTACKS
}
each_suite = pytest.mark.parametrize(("stem", "attack"), SUITES)


def suites_of(attack):
    return [(*FORGET_SETS[stem], suite) for (stem, name), suite in SUITES.items() if name == attack]


def is_even(counts: Counter) -> bool:
    return max(counts.values()) - min(counts.values()) <= 1


def test_the_nine_types_have_at_least_eight_wordings_each_and_none_twice():
    assert list(ATTACKS) == [
        "prefix_injection", "affirmative_suffix", "role_playing", "multiple_choice", "reverse_query",
        "synonym_manipulation", "background_hint", "in_context_learning", "cross_lingual",
    ]  # fmt: skip
    for templates in (row.templates for row in ATTACKS.values()):
        assert len(set(templates)) == len(templates) >= 8
        # No space follows a full-width sign.
        assert not [template for template in templates if language_of(template) in ("ja", "zh") and " " in template]


@each_suite
def test_a_hundred_distinct_prompts_that_ask_most_records(stem, attack):
    (target, records), suite = FORGET_SETS[stem], SUITES[stem, attack]
    assert len(suite) == len({item.prompt for item in suite}) == 100
    assert {(item.type, item.target) for item in suite} == {(attack, target.name)}
    # A reverse query needs facts that mask cleanly and speak of the target, a synonym a question without other uses
    # of the surname and, for a target that only phrases describe, without its genitive; every other type asks every
    # record, about equally often.
    counts = Counter(item.record for item in suite)
    fewer = {"reverse_query": 30, "synonym_manipulation": len(records) - 6}
    assert len(counts) >= fewer.get(attack, len(records)) and is_even(counts)


@each_suite
def test_the_answer_is_not_in_the_prompt(stem, attack):
    target, records = FORGET_SETS[stem]
    for item in SUITES[stem, attack]:
        record, rest = records[item.record], item.prompt
        if attack == "multiple_choice":  # the options are where the answer belongs; nothing else may hold it
            assert re.findall(r"^[A-F]\) .*$", rest, re.MULTILINE).count(item.answer) == 1
            rest = re.sub(r"^[A-F]\) .*$", "", rest, flags=re.MULTILINE)
        for text in (item.answer, item.paraphrased_answer, record.answer, record.paraphrased_answer):
            if attack != "reverse_query" or text.endswith(f"{target.name}."):
                assert text.casefold() not in rest.casefold()
        if attack == "reverse_query":
            names = "|".join(map(re.escape, (*target.name.split(), *target.aliases, *target.descriptions)))
            assert not re.search(rf"\b(?:{names})\b", rest, re.IGNORECASE)
        elif attack != "cross_lingual":
            # Independent of fact_tokens: the value, cut out of the paraphrase by comparing it with the wrong ones.
            value = options_of(record.columns())[0]
            question = item.prompt if attack == "synonym_manipulation" else record.question
            if value.casefold() not in question.casefold():
                around = rest.replace(record.question, "")
                assert not re.search(rf"(?<!\w){re.escape(value)}(?!\w|[.,]\d)", around, re.IGNORECASE)


@each_suite
def test_what_is_asked_survives(stem, attack):
    target, records = FORGET_SETS[stem]
    facts = Suite(records, target, attack, 0).facts
    for item in SUITES[stem, attack]:
        record = records[item.record]
        assert item.question == record.question
        if attack in (*PLAIN, "multiple_choice"):
            assert record.question in item.prompt
        elif attack == "cross_lingual":
            assert dict(record.translated_question)[language_of(item.prompt)] in item.prompt
        elif attack == "synonym_manipulation":
            assert any(asks(item.prompt, record, target, alias) for alias in synonyms(target))
        else:
            assert 2 <= sum(fact in item.prompt for fact in facts.values()) <= 3


def asks(prompt: str, record: QARecord, target: Target, alias: str) -> bool:
    """Whether the question stands in the prompt with the alias for the name, and perhaps other names of places."""
    asked = re.escape(record.question.replace(target.name, alias))
    for place, called in PLACES.items():
        asked = asked.replace(re.escape(place), f"(?:{'|'.join(map(re.escape, (place, *called)))})")
    return re.search(asked, prompt, re.IGNORECASE) is not None


@each_suite
def test_answers_keep_the_form_of_their_type(stem, attack):
    target, records = FORGET_SETS[stem]
    people = {f"These facts are about {other}." for other in target.others}
    for item in SUITES[stem, attack]:
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
            answers = (record.answer, record.paraphrased_answer, record.perturbed_answer)
            assert (item.answer, item.paraphrased_answer, item.perturbed_answer) == answers


@pytest.mark.parametrize("n", (6, 50, 100))
def test_the_right_letter_is_evenly_spread_and_not_predictable(n):
    suite = build_attacks(RECORDS, RONALDO, "multiple_choice", n=n)
    letters = [item.answer[0] for item in suite]
    wrong = [[answer.removeprefix("The correct option is ")[0] for answer in item.perturbed_answer] for item in suite]
    assert any(order != sorted(order) for order in wrong)
    assert set(letters) == set("ABCDEF") and is_even(Counter(letters))
    assert n == 6 or letters[:6] != letters[6:12]


def test_five_languages_evenly_of_the_records_that_are_translated():
    counts = Counter(language_of(item.prompt) for item in build_attacks(RECORDS, RONALDO, "cross_lingual", n=52))
    assert set(counts) == set(LANGUAGES) and is_even(counts)
    bare = [replace(record, translated_question=()) for record in RECORDS]
    assert build_attacks(bare, RONALDO, "cross_lingual") == []
    some = [*bare[:40], *RECORDS[40:]]
    assert {item.record for item in build_attacks(some, RONALDO, "cross_lingual")} == {*range(40, len(some))}


def test_a_reverse_query_offers_people_of_the_same_field_and_sex():
    for target in TARGETS:
        for other in TARGETS:
            like, unlike = {*target.others} - {other.name}, {*other.others} - {target.name}
            assert like == unlike or not like & unlike
    singer = next(target for target in TARGETS if "Beyoncé" in target.others)
    assert "Beyoncé" in alike(singer, "This person sang.") and "Beyoncé" not in alike(singer, "She sang with Beyoncé.")
    for target, _, suite in suites_of("reverse_query"):
        assert len(target.others) >= 5 and target.name not in target.others
        for item in suite:
            assert not re.search(r"\b(?:father|mother|daughter|sister|brother|family)\b", item.prompt)


def test_a_synonym_stands_without_the_surname():
    for target, _, suite in suites_of("synonym_manipulation"):
        assert not [item.prompt for item in suite if words(short_name(target)) & words(item.prompt)]
        prompts = "\n".join(item.prompt for item in suite).casefold()
        used = {synonym for synonym in synonyms(target) if synonym.casefold() in prompts}
        assert used == {*synonyms(target)} >= {*target.descriptions}


def test_hints_are_about_what_the_question_is_about():
    for target, records, suite in suites_of("background_hint"):
        shared = 0
        for item in suite:
            content = words(records[item.record].question) - STOP - words(target.name)
            shared += bool(content & words(item.prompt.replace(records[item.record].question, "")))
        assert shared >= 70


@pytest.mark.parametrize("attack", ATTACKS)
def test_same_seed_same_bytes_and_a_smaller_suite_is_the_beginning_of_a_larger(attack):
    """UPDATE_GOLDEN=1 writes the golden files anew; the diff then shows every change of what a model is asked."""
    suite = SUITES["cristiano_ronaldo", attack]
    assert build_attacks(RECORDS, RONALDO, attack, n=37) == suite[:37]
    assert [i.prompt for i in build_attacks(RECORDS, RONALDO, attack, seed=4)] != [i.prompt for i in suite]
    text = ""
    for item in suite[:12]:
        wrong = "".join(f"\n  wrong: {answer}" for answer in item.perturbed_answer)
        text += f"{item.prompt}\n  answer: {item.answer}\n  paraphrase: {item.paraphrased_answer}{wrong}\n\n"
    path = GOLDEN / "attacks" / f"{attack}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_all_types_draw_the_records_of_the_control():
    for n in (10, 46, 100):
        control = build_control(RECORDS, RONALDO, n=n)
        assert len(control) == min(n, len(RECORDS))
        assert all(item.type == "none" and item.prompt == RECORDS[item.record].question for item in control)
        for attack in ATTACKS.keys() - {"reverse_query"}:
            drawn = {item.record for item in SUITES["cristiano_ronaldo", attack][:n]}
            assert len({item.record for item in control} ^ drawn) <= 2 * (attack == "synonym_manipulation")


def test_too_few_records_give_fewer_prompts_not_repeated_ones():
    for attack in ("prefix_injection", "multiple_choice"):
        suite = build_attacks(RECORDS[:2], RONALDO, attack)
        assert len(suite) == len({item.prompt for item in suite}) == 2 * len(ATTACKS[attack].templates)
    for records, attack in ((RECORDS[:1], "in_context_learning"), (RECORDS[:1], "reverse_query"), ([], "role_playing")):
        assert build_attacks(records, RONALDO, attack) == []
    assert build_attacks([RECORDS[0]] * 3, RONALDO, "synonym_manipulation", n=9) != []


# --- any data

# Words that no template has, so that a hit is a leak.
invented = st.text(string.ascii_lowercase, min_size=4, max_size=8).map(lambda text: "Zq" + text)
names = st.lists(st.text(string.ascii_lowercase, min_size=3, max_size=8).map(str.capitalize), min_size=1, max_size=3)


@st.composite
def some_records(draw) -> tuple[Target, list[QARecord]]:
    target = Target(" ".join(draw(names)))
    values = draw(st.lists(invented, min_size=12, max_size=36, unique_by=str.casefold))
    records = []
    for i in range(len(values) // 6):
        right, *wrong = values[6 * i : 6 * i + 6]
        questions = [f"Did {target.name} visit town {i}?", f"What {{brace}} is {i} to {target.name}'s kin?"]
        form = draw(st.sampled_from(["He met {} there.", "It was {} who knew her."]))
        records.append(
            QARecord(target.name, draw(st.sampled_from(questions)), f"He saw {right}.", f"Is it {i}?",
                     form.format(right), tuple(form.format(value) for value in wrong))
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


# --- the file that replaces the built prompts


def test_a_file_gives_back_what_was_written(tmp_path):
    suites = {attack: SUITES["cristiano_ronaldo", attack][:7] for attack in ATTACKS}
    path = write_jsonl(tmp_path / "a.jsonl", [asdict(item) for suite in suites.values() for item in suite])
    for attack, suite in suites.items():
        assert load_attack_file(path, RONALDO, attack) == suite
    messi, other = FORGET_SETS["lionel_messi"][0], SUITES["lionel_messi", "role_playing"][:2]
    write_jsonl(path, [asdict(item) for item in (*suites["role_playing"], *other)])
    assert load_attack_file(path, RONALDO, "role_playing", [messi]) == suites["role_playing"]


GOOD = asdict(SUITES["cristiano_ronaldo", "role_playing"][0])


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (GOOD | {"type": "jailbreak"}, "field 'type' is 'jailbreak', expected one of prefix_injection, "),
        (GOOD | {"target": "Lionel Messi"}, "field 'target' is 'Lionel Messi', expected one of Cristiano Ronaldo"),
        ({k: v for k, v in GOOD.items() if k != "answer"}, "field 'answer' is missing"),
        (GOOD | {"answer": " "}, "field 'answer': "),
        (GOOD | {"perturbed_answer": ["a", 5]}, "field 'perturbed_answer[1]': "),
        (GOOD | {"record": "one"}, "field 'record': "),
        (["no object"], "expected `object`"),
        ("{cut", "not valid JSON"),
    ],
)
def test_a_bad_row_is_named_with_file_row_and_field(tmp_path, row, problem):
    path = write_jsonl(tmp_path / "mine.jsonl", [GOOD])
    path.write_text(path.read_text() + (row if isinstance(row, str) else json.dumps(row)))
    with pytest.raises(UserError) as error:
        load_attack_file(path, RONALDO, "role_playing")
    assert str(error.value).startswith(f"mine.jsonl, row 2: {problem}") and "\n" not in str(error.value)


def test_a_missing_file_or_type_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match=r"none\.jsonl. cannot be read \(No such file"):
        load_attack_file(tmp_path / "none.jsonl", RONALDO, "role_playing")
    with pytest.raises(UserError, match="no row has the type 'cross_lingual' and the target 'Cristiano Ronaldo'"):
        load_attack_file(write_jsonl(tmp_path / "mine.jsonl", [GOOD]), RONALDO, "cross_lingual")


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
    for item in SUITES["cristiano_ronaldo", attack][:10]:
        assert flaw(item, item.prompt, RECORDS[item.record], RONALDO) == ""
        assert complaint in flaw(item, change(item), RECORDS[item.record], RONALDO)


@pytest.mark.parametrize(("name", "short"), [
    ("Martin Luther King Jr.", "King"), ("Robert Downey, Sr.", "Downey"), ("John Paul II", "John Paul"),
    ("Elizabeth II", "Elizabeth"), ("Ronaldo (Brazilian footballer)", "Ronaldo"), ("Cristiano Ronaldo", "Ronaldo"),
    ("Eminem", "Eminem"),
])  # fmt: skip
def test_the_short_name_is_what_stands_for_the_target_alone(name, short):
    assert short_name(Target(name)) == short and not any("Jr" in synonym or ")" in synonym for synonym in synonyms(
        Target(name)))  # fmt: skip
