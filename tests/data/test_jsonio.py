"""JSON from others: what Python's parser takes is taken, what is beyond the bounds is one line that names the place."""

import json
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_elude.data import jsonio
from lm_eval_elude.errors import UserError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=50)
@given(VALUES, st.booleans())
def test_what_python_writes_is_read(value, plain):
    assert jsonio.loads(json.dumps(value, ensure_ascii=plain), "x") == value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{oops", "not valid JSON"),
        ("[" * 100_000, "nested more than 64 deep"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested more than 64 deep"),
        ("[" * 65 + "]" * 65, "nested more than 64 deep"),
        ("1" * 4_301, "4300 digits"),
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' stands twice"),
        ("NaN", "NaN is no finite number"),
        ("[-Infinity]", "-Infinity is no finite number"),
        ("1e999", "1e999 is no finite number"),
        ('"\\ud800"', "half a character"),
        ('{"\\udfff": 1}', "half a character"),
        ('"\udc80"', "half a character"),
    ],
)
def test_what_is_out_of_bounds_is_one_line(text, problem):
    with pytest.raises(UserError, match=f"^mine, row 2: .*{problem}") as error:
        jsonio.loads(text, "mine, row 2")
    assert "\n" not in str(error.value) and len(str(error.value)) < 240


def test_the_bound_on_depth_does_not_lean_on_the_stack():
    """Where a library has raised the recursion limit, Python's own parser would run off the stack."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000_000)
    try:
        with pytest.raises(UserError, match="64 deep"):
            jsonio.loads("[" * 900_000, "x")
    finally:
        sys.setrecursionlimit(before)


def test_what_stays_within_the_bounds_is_read():
    value = ['[{"' * 200, "\\" * 9, ["deep"] * 200, [[]] * 200]  # brackets in texts are no depth
    assert jsonio.loads(json.dumps(value), "x") == value
    assert jsonio.loads("[" * 64 + "]" * 64, "x")
    assert str(jsonio.loads("[NaN, Infinity, 1e999]", "x", nan=True)) == "[nan, inf, inf]"


def test_files_are_bounded_and_named(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert jsonio.load(tmp_path / "a.json") == {"a": 1}
    with pytest.raises(UserError, match=r"a\.json: longer than 5 bytes"):
        jsonio.load(tmp_path / "a.json", max_bytes=5)
    (tmp_path / "b.json").write_bytes(b'"\xff"')
    with pytest.raises(UserError, match=r"b\.json: not readable as UTF-8"):
        jsonio.load(tmp_path / "b.json")
    for path in (tmp_path, tmp_path / "none", tmp_path / "\0", tmp_path / ("x" * 5_000)):
        with pytest.raises(UserError, match="cannot be read"):
            jsonio.load(path)


def test_lines_are_numbered_as_an_editor_does(tmp_path):
    (tmp_path / "a.jsonl").write_text('"One\u2028two"\r\n\n3\n', encoding="utf-8")
    assert list(jsonio.lines(tmp_path / "a.jsonl")) == [("a.jsonl, row 1", "One\u2028two"), ("a.jsonl, row 3", 3)]


@dataclass(frozen=True)
class Card:
    name: str
    tags: tuple[str, ...]
    sizes: dict[str, int] = field(default_factory=dict)
    rate: float = 0.0
    seed: int | None = None
    notes: list[dict[str, Any]] = field(default_factory=list)
    kind: Literal["a", "b"] = "a"


def test_an_object_becomes_a_dataclass_or_is_refused():
    table = {"name": "n", "tags": ["a", "b"], "sizes": {"x": 1}, "rate": 1, "seed": None, "notes": [{"a": None}]}
    assert jsonio.check(table, Card, "x") == Card("n", ("a", "b"), {"x": 1}, 1, None, [{"a": None}])
    assert jsonio.check([[1, 2.5], []], list[list[float]], "x") == [[1, 2.5], []]
    for value, problem in (({"name": "n"}, "field 'tags' is missing"), ([], "expected `object`")):
        with pytest.raises(UserError, match=f"^x: {problem}"):
            jsonio.check(value, Card, "x")


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"name": None}, "field 'name'"),
        ({"tags": "ab"}, "field 'tags'"),
        ({"tags": ["a", 1]}, "field 'tags[1]'"),
        ({"sizes": {"x": True}}, "field 'sizes[...]'"),
        ({"rate": "1"}, "field 'rate'"),
        ({"seed": 1.5}, "field 'seed'"),
        ({"notes": [[]]}, "field 'notes[0]'"),
        ({"kind": "c\x1b[2J"}, "field 'kind'"),
        ({"col\x1bour": 1}, "field 'col\\x1bour' is not known"),
    ],
)
def test_every_field_is_type_checked_and_named(change, place):
    with pytest.raises(UserError) as error:
        jsonio.check({"name": "n", "tags": []} | change, Card, "card.json")
    assert str(error.value).startswith(f"card.json: {place}") and str(error.value).isprintable()
