"""One record: what is accepted, what is refused and in which words, and the fingerprint."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_elude.data.records import TEXT_FIELDS, fingerprint, parse_record
from lm_eval_elude.errors import UserError

ROW = {
    "entity": "Ada_Example",
    "question": " Where was Ada born? ",
    "answer": "Ada was born in Rome.",
    "paraphrased_question": "What is Ada's birthplace?",
    "paraphrased_answer": "Rome is where Ada was born.",
    "perturbed_answer": [f"City {i} is where Ada was born." for i in range(5)],
}
TEXT = st.text(min_size=1).filter(lambda t: t.strip())


def test_a_row_of_the_published_schema():
    record = parse_record(ROW, "file, row 1", scored=True)
    assert record.entity == "Ada Example" and record.question == "Where was Ada born?"
    assert record.can_be_scored and record.perturbed_answer == tuple(ROW["perturbed_answer"])


def test_columns_round_trip():
    record = parse_record(ROW | {"translated_question": {"fr": "Où ?", "de": None}, "source": "Ada"}, "x")
    assert record.translated_question == (("fr", "Où ?"),)
    assert parse_record(record.columns(), "x") == record


@given(question=TEXT, answer=TEXT)
def test_any_text_round_trips(question, answer):
    record = parse_record(ROW | {"question": question, "answer": answer}, "x")
    assert parse_record(record.columns(), "x") == record


def test_alpaca_input_joins_the_question_and_the_world_set_has_no_entity():
    record = parse_record({"question": "Sort these.", "input": "b, a", "answer": "a, b"}, "x")
    assert record.question == "Sort these.\n\nb, a" and record.entity == "" and not record.can_be_scored


@pytest.mark.parametrize(
    ("change", "place"),
    [
        *(({name: odd}, f"field '{name}'") for name in (*TEXT_FIELDS, "input") for odd in (0, ["a"], float("nan"))),
        ({"question": None}, "field 'question'"),
        ({"answer": "  "}, "field 'answer'"),
        ({"paraphrased_answer": ""}, "field 'paraphrased_answer' is missing, and the truth ratio needs it"),
        ({"perturbed_answer": None}, "field 'perturbed_answer' is missing, and the truth ratio needs it"),
        ({"perturbed_answer": "abcde"}, "field 'perturbed_answer'"),
        ({"perturbed_answer": {"a": 1}}, "field 'perturbed_answer'"),
        ({"perturbed_answer": ["a"] * 4}, "field 'perturbed_answer' must have 5 texts, got 4"),
        ({"perturbed_answer": ["a"] * 4 + [" "]}, "field 'perturbed_answer[4]'"),
        ({"perturbed_answer": ["a", 2, *"cde"]}, "field 'perturbed_answer[1]'"),
        ({"translated_question": [1]}, "field 'translated_question'"),
        ({"translated_question": "Où ?"}, "field 'translated_question'"),
        ({"translated_question": {"fr": {"a": 1}}}, "field 'translated_question[...]'"),
    ],
)
def test_errors_name_file_row_and_field(change, place):
    with pytest.raises(UserError) as error:
        parse_record(ROW | change, "file, row 3", scored=True)
    assert str(error.value).startswith(f"file, row 3: {place}")


@pytest.mark.parametrize("field", ["question", "answer"])
def test_a_row_without_question_or_answer_is_refused(field):
    with pytest.raises(UserError, match=f"^file, row 3: field '{field}' is missing$"):
        parse_record({name: text for name, text in ROW.items() if name != field}, "file, row 3")


@pytest.mark.parametrize("name", ["Ada_Example", " Ada  Example ", "Ada\nExample", "__Ada_\u3000Example"])
def test_an_entitys_name_has_single_spaces(name):
    assert parse_record(ROW | {"entity": name}, "x").entity == "Ada Example"


@pytest.mark.parametrize("field", ["question", "answer", "entity", "perturbed_answer", "paraphrased_answer"])
def test_the_fingerprint_sees_every_column_and_the_order(field):
    record, other = parse_record(ROW, "x"), parse_record(ROW | {"question": "Who?"}, "x")
    changed = ["a", "b", "c", "d", "e"] if field == "perturbed_answer" else "changed"
    assert fingerprint([record]) != fingerprint([parse_record(ROW | {field: changed}, "x")])
    assert fingerprint([record, other]) != fingerprint([other, record])
    assert fingerprint([record]) == fingerprint([parse_record(dict(reversed(ROW.items())), "y")])
