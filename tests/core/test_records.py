"""One record: what is accepted, what is refused and in which words, and the fingerprint."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_elude.core.records import DataError, fingerprint, parse_record

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
    ("change", "message"),
    [
        ({"question": None}, "field 'question' must be text, got nothing"),
        ({"question": 7}, "field 'question' must be text, got int 7"),
        ({"answer": "  "}, "field 'answer' is empty"),
        ({"entity": 5}, "field 'entity' must be text, got int 5"),
        ({"source": 5}, "field 'source' must be text, got int 5"),
        ({"paraphrased_answer": ["a"]}, "field 'paraphrased_answer' must be text, got list ['a']"),
        ({"paraphrased_answer": ""}, "field 'paraphrased_answer' is missing, and the truth ratio needs it"),
        ({"perturbed_answer": None}, "field 'perturbed_answer' is missing, and the truth ratio needs it"),
        ({"perturbed_answer": "abcde"}, "field 'perturbed_answer' must be a list of 5 texts, got str 'abcde'"),
        ({"perturbed_answer": ["a"] * 4}, "field 'perturbed_answer' must have 5 texts, got 4"),
        ({"perturbed_answer": ["a"] * 4 + [" "]}, "text 5 of field 'perturbed_answer' is empty or no text: str ' '"),
        ({"perturbed_answer": ["a", 2, *"cde"]}, "text 2 of field 'perturbed_answer' is empty or no text: int 2"),
        ({"perturbed_answer": {"a": 1}}, "field 'perturbed_answer' must be a list of 5 texts, got dict {'a': 1}"),
        ({"input": float("nan")}, "field 'input' must be text, got float nan"),
        ({"input": ["a"]}, "field 'input' must be text, got list ['a']"),
        ({"input": 0}, "field 'input' must be text, got int 0"),
        ({"translated_question": [1]}, "field 'translated_question' must be a table by language, got list [1]"),
        ({"translated_question": "Où ?"}, "field 'translated_question' must be a table by language, got str 'Où ?'"),
    ],
)  # fmt: skip
def test_errors_name_file_row_and_field(change, message):
    with pytest.raises(DataError) as error:
        parse_record(ROW | change, "file, row 3", scored=True)
    assert str(error.value) == f"file, row 3: {message}"


@pytest.mark.parametrize("name", ["Ada_Example", " Ada  Example ", "Ada\nExample", "__Ada_\u3000Example"])
def test_an_entitys_name_has_single_spaces(name):
    assert parse_record(ROW | {"entity": name}, "x").entity == "Ada Example"


def test_a_translation_that_is_no_text_is_named_with_its_language():
    with pytest.raises(DataError) as error:
        parse_record(ROW | {"translated_question": {"fr": {"a": 1}}}, "file, row 3")
    assert str(error.value) == "file, row 3, field 'translated_question': field 'fr' must be text, got dict {'a': 1}"


@pytest.mark.parametrize("field", ["question", "answer", "entity", "perturbed_answer", "paraphrased_answer"])
def test_the_fingerprint_sees_every_column_and_the_order(field):
    record, other = parse_record(ROW, "x"), parse_record(ROW | {"question": "Who?"}, "x")
    changed = ["a", "b", "c", "d", "e"] if field == "perturbed_answer" else "changed"
    assert fingerprint([record]) != fingerprint([parse_record(ROW | {field: changed}, "x")])
    assert fingerprint([record, other]) != fingerprint([other, record])
    assert fingerprint([record]) == fingerprint([parse_record(dict(reversed(ROW.items())), "y")])
