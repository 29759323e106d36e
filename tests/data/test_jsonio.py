"""JSON from others: what Python writes is read, and what is wrong is one line that names file, row and field."""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_elude.data import jsonio
from lm_eval_elude.errors import UserError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=50)
@given(VALUES, st.booleans())
def test_what_python_writes_is_read(value, plain):
    assert jsonio.loads(json.dumps(value, ensure_ascii=plain), "x") == value


def test_files_and_their_rows_are_named_and_numbered_as_an_editor_does(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')  # a byte order mark is no content
    assert jsonio.load(tmp_path / "a.json") == {"a": 1}
    (tmp_path / "b.jsonl").write_text('"One\u2028two"\r\n\n3\n{oops\n', encoding="utf-8")
    rows = jsonio.lines(tmp_path / "b.jsonl")
    assert [next(rows), next(rows)] == [("b.jsonl, row 1", "One\u2028two"), ("b.jsonl, row 3", 3)]
    (tmp_path / "latin.json").write_bytes(b'"\xff"')
    for read, said in (
        (lambda: next(rows), "^b.jsonl, row 4: not valid JSON"),
        (lambda: jsonio.load(tmp_path / "latin.json"), "latin.json cannot be read"),
        (lambda: jsonio.load(tmp_path / "none.json"), "none.json cannot be read .*No such file"),
    ):
        with pytest.raises(UserError, match=said) as error:
            read()
        assert "\n" not in str(error.value)


@dataclass(frozen=True)
class Card:
    name: str
    tags: tuple[str, ...]
    sizes: dict[str, int] = field(default_factory=dict)
    rate: float = 0.0
    seed: int | None = None
    notes: list[dict[str, Any]] = field(default_factory=list)
    kind: Literal["a", "b"] = "a"


def test_an_object_becomes_a_dataclass():
    table = {"name": "n", "tags": ["a", "b"], "sizes": {"x": 1}, "rate": 1, "seed": None, "notes": [{"a": None}]}
    assert jsonio.check(table, Card, "x") == Card("n", ("a", "b"), {"x": 1}, 1, None, [{"a": None}])


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"name": None}, "field 'name'"), ({"tags": "ab"}, "field 'tags'"), ({"tags": ["a", 1]}, "field 'tags[1]'"),
        ({"sizes": {"x": True}}, "field 'sizes[...]'"), ({"rate": "1"}, "field 'rate'"),
        ({"seed": 1.5}, "field 'seed'"),
        ({"notes": [[]]}, "field 'notes[0]'"), ({"kind": "c"}, "field 'kind'"),
    ],
)  # fmt: skip
def test_every_field_is_type_checked_and_named(change, place):
    with pytest.raises(UserError) as error:
        jsonio.check({"name": "n", "tags": []} | change, Card, "card.json")
    assert str(error.value).startswith(f"card.json: {place}")
    with pytest.raises(UserError, match=r"^card\.json: field 'tags' is missing$"):
        jsonio.check({"name": "n"}, Card, "card.json")
