"""One record: what is accepted, what is refused and in which words, and the fingerprint."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_elude.data.records import fingerprint, parse_record
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


def test_a_row_of_the_published_schema_and_one_of_the_world_set():
    record = parse_record(ROW | {"translated_question": {"fr": "Où ?", "de": None}}, "x")
    assert record.question == "Where was Ada born?" and record.translated_question == (("fr", "Où ?"),)
    assert record.can_be_scored and record.perturbed_answer == tuple(ROW["perturbed_answer"])
    for name in ("Ada_Example", " Ada  Example ", "Ada\nExample", "__Ada_\u3000Example"):
        assert parse_record(ROW | {"entity": name}, "x").entity == "Ada Example"
    about = parse_record(ROW | {"subject": " Bo Example "}, "x")
    assert about.subject == "Bo Example" and about.columns() == parse_record(ROW, "x").columns()
    world = parse_record({"question": "Sort these.", "input": "b, a", "answer": "a, b"}, "x")
    assert world.question == "Sort these.\n\nb, a" and world.entity == "" and not world.can_be_scored


@settings(max_examples=50)
@given(question=TEXT, answer=TEXT, translated=TEXT)
def test_any_text_round_trips(question, answer, translated):
    row = ROW | {"question": question, "answer": answer, "translated_question": {"fr": translated}, "source": "Ada"}
    record = parse_record(row, "x")
    assert parse_record(record.columns(), "x") == record


@pytest.mark.parametrize(
    ("change", "place"),
    [
        *(({name: odd}, f"field '{name}'") for name in ("question", "answer", "source", "input") for odd in (0, ["a"])),
        ({"question": None}, "column 'question' is missing; expected are question and answer, found "),
        ({"answer": "  "}, "field 'answer'"),
        ({"perturbed_answer": ["a"] * 4 + [" "]}, "field 'perturbed_answer[4]'"),
        ({"translated_question": {"fr": {"a": 1}}}, "field 'translated_question[0][1]'"),
    ],
)
def test_errors_name_file_row_and_field(change, place):
    with pytest.raises(UserError) as error:
        parse_record(ROW | change, "file, row 3")
    assert str(error.value).startswith(f"file, row 3: {place}") and "\n" not in str(error.value)


@pytest.mark.parametrize("lacking", [{"paraphrased_answer": ""}, {"perturbed_answer": None}, {"perturbed_answer": []}])
def test_without_paraphrase_or_wrong_answers_less_can_be_scored(lacking):
    assert not parse_record(ROW | lacking, "x").can_be_scored


@pytest.mark.parametrize("field", ["question", "answer", "entity", "perturbed_answer", "paraphrased_answer"])
def test_the_fingerprint_sees_every_column_and_the_order(field):
    record, other = parse_record(ROW, "x"), parse_record(ROW | {"question": "Who?"}, "x")
    changed = ["a", "b", "c", "d", "e"] if field == "perturbed_answer" else "changed"
    assert fingerprint([record]) != fingerprint([parse_record(ROW | {field: changed}, "x")])
    assert fingerprint([record, other]) != fingerprint([other, record])
    assert fingerprint([record]) == fingerprint([parse_record(dict(reversed(ROW.items())), "y")])
