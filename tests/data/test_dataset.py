"""Where data comes from: the Hub's layout, ELUDe-mini, folders, files; only wanted rows; errors that name the row."""

import json
import os
import tracemalloc
import unicodedata

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm_eval_elude.data import dataset, tofu
from lm_eval_elude.data.dataset import describe, entities, load_records, resolve_targets, targets_of
from lm_eval_elude.data.hub import _commit as commits_of_the_hub
from lm_eval_elude.data.rows import read_rows
from lm_eval_elude.data.targets import TARGETS
from lm_eval_elude.errors import UserError
from tests.support import mini_rows, read_jsonl, small_data, write_jsonl

COLUMNS = ("question", "answer", "paraphrased_question", "paraphrased_answer", "perturbed_answer")
SPLITS = ("train", "validation", "test")
RONALDO = TARGETS[0].name


def published(count: int, only: int = 20) -> list[dict]:
    """Rows in the published columns, spread over the first of the paper's targets."""
    mini = mini_rows("forget_qa-train")
    return [
        {"entity": TARGETS[i * only // count].name, **{c: mini[i % len(mini)][c] for c in COLUMNS},
         "question": f"{mini[i % len(mini)]['question']} ({i})"}
        for i in range(count)
    ]  # fmt: skip


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def forget(source, *targets: str, **options) -> list:
    return list(load_records(str(source), "forget", "train", targets, **options).records)


def hub_layout(folder, forget: int = 200, retain: int = 400):
    folder.mkdir(parents=True)
    write_parquet(folder / "forget_qa-train.parquet", published(forget))
    for split, share in zip(SPLITS, (8, 1, 1), strict=True):
        write_parquet(folder / f"retain_qa-{split}.parquet", published(retain * share // 10))
        scored = {"paraphrased_answer": "The sum.", "perturbed_answer": [*"abcde"]} if split != "train" else {}
        rows = [
            {"question": f"Add these ({i}).", "input": f"{i} and 1" if i % 2 else "", "answer": "It is 1."} | scored
            for i in range(30)
        ]
        (folder / f"alpaca_gpt4_data_{split}.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A local copy of the Hub repository's layout that stands in for it."""
    folder = hub_layout(tmp_path / "ELUDe")
    monkeypatch.setenv("ELUDE_HUB_REPOSITORY", str(folder))
    monkeypatch.setenv("ELUDE_WORLD_URL", str(folder / "alpaca_gpt4_data_{split}.json"))
    return folder


def test_the_hub_gives_the_rows_of_the_target_and_the_whole_world_set(hub):
    records = forget("hub", RONALDO, scored=True)
    assert [r.question for r in records] == [r["question"] for r in published(200) if r["entity"] == RONALDO]
    assert {r.entity for r in records} == {RONALDO} and len(records) == 10
    assert [len(load_records("hub", "retain", split, ["Eminem"]).records) for split in SPLITS] == [16, 2, 2]
    world = load_records("hub", "world", "test", [RONALDO], scored=True).records
    assert len(world) == 30 and {r.entity for r in world} == {""}
    assert world[1].question == "Add these (1).\n\n1 and 1" and world[0].question == "Add these (0)."
    assert len(load_records("hub", "world", "train").records) == 30
    for subset, split in (("forget", "train"), ("retain", "test"), ("world", "test")):
        selections = [load_records(source, subset, split, ["Eminem"], scored=True) for source in (str(hub), "hub")]
        assert selections[0].fingerprint == selections[1].fingerprint


def test_a_second_folder_that_stands_in_for_the_hub_is_read_itself(hub, tmp_path, monkeypatch):
    other = hub_layout(tmp_path / "other" / "ELUDe", forget=100)
    assert len(forget("hub")) == 200
    monkeypatch.setenv("ELUDE_HUB_REPOSITORY", str(other))
    assert len(forget("hub")) == 100
    write_parquet(other / "forget_qa-train.parquet", published(40))
    assert len(forget("hub")) == 40
    assert describe("hub") == {
        "dataset": "hub", "repository": str(other), "world": str(hub / "alpaca_gpt4_data_{split}.json")
    }  # fmt: skip
    with pytest.raises(UserError, match=r"hub@main.*is a folder, which has no revisions"):
        forget("hub@main")


@pytest.fixture
def cached_hub(tmp_path, monkeypatch):
    """The Hub's cache after two states of the repository were downloaded; ``main`` is at the second."""
    import huggingface_hub.constants

    monkeypatch.delenv("ELUDE_HUB_REPOSITORY", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    commits_of_the_hub.cache_clear()
    repository = tmp_path / "cache" / "datasets--6rightjade--ELUDe"
    commits = ["1" * 40, "2" * 40]
    for number, commit in enumerate(commits, 1):
        hub_layout(repository / "snapshots" / commit, forget=20 * number)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commits[1])
    (repository / "refs" / "v1").write_text(commits[0])
    yield commits
    commits_of_the_hub.cache_clear()


def test_the_commit_of_the_hub_is_said_and_can_be_asked_for(cached_hub):
    """Also of a copy that has the data alone."""
    first, second = cached_hub
    for source, commit, rows in (
        ("hub", second, 40), ("hub@main", second, 40), ("hub@v1", first, 20), (f"hub@{first}", first, 20),
    ):  # fmt: skip
        assert describe(source) == {
            "dataset": source, "repository": "6rightjade/ELUDe", "revision": commit, "world": dataset.HUB_WORLD_URL
        }  # fmt: skip
        assert len(forget(source)) == rows and entities(source) == [t.name for t in TARGETS]
    for source in ("hub@gone", "hub@ /\\", f"hub@{'3' * 40}"):
        problem = r"data set 'hub' cannot be read \(6rightjade/ELUDe, forget_qa-train.parquet, "
        with pytest.raises(UserError, match=problem) as error:
            forget(source)
        assert "\n" not in str(error.value)
    assert "/995babb243c1673d1fff96d0a8a32b236e85c450/data/" in dataset.HUB_WORLD_URL
    assert describe("mini") == {"dataset": "mini"} and describe("a/folder") == {"dataset": "a/folder"}


def test_an_unreachable_hub_is_one_line_that_says_what_takes_its_place(tmp_path, monkeypatch):
    for variable in ("ELUDE_HUB_REPOSITORY", "TOFU_REPOSITORY"):
        monkeypatch.setenv(variable, str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"data set 'hub' cannot be read .*--dataset mini or a folder") as error:
        forget("hub", "Eminem")
    with pytest.raises(UserError, match=r"data set 'tofu' cannot be read .*tofu_data.* a folder of TOFU's") as of_tofu:
        tofu.load("tofu", "forget05")
    assert "\n" not in f"{error.value}{of_tofu.value}" and "mini" not in str(of_tofu.value)


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_other_targets_rows_are_not_kept(tmp_path, ending):
    """Of a large set the memory of one target's rows is needed."""
    rows = published(2_000)
    path = tmp_path / f"forget_qa-train{ending}"
    write_parquet(path, rows) if ending == ".parquet" else write_jsonl(path, rows)
    tracemalloc.start()
    assert [t.name for t in resolve_targets(str(tmp_path), ["eminem"])] == ["Eminem"]
    for scored, strict in ((False, False), (True, True), (False, True)):
        assert len(forget(tmp_path, "Eminem", scored=scored, strict=strict)) == 100
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(json.dumps(rows)) / 2


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet", ".JSONL", ".Json", ".PARQUET", ".json of lines"])
def test_every_ending_gives_the_same(tmp_path, ending):
    rows = published(6, only=1)
    path = tmp_path / f"forget_qa-train{ending.removesuffix(' of lines')}"
    if ending.lower() == ".json":
        path.write_text(json.dumps(rows))
    else:
        write_parquet(path, rows) if ending.lower() == ".parquet" else write_jsonl(path, rows)
    numbered = [(f"{path.name}, row {n}", row) for n, row in enumerate(rows, 1)]
    assert list(read_rows(path)) == numbered
    assert forget(tmp_path) == forget(path) == forget(write_jsonl(tmp_path / "reference.jsonl", rows))


def test_white_space_at_the_ends_is_no_part_of_a_field_in_training_and_in_scoring(tmp_path):
    def padded(value):
        return [padded(text) for text in value] if isinstance(value, list) else f"\u3000 \t{value}\n "

    plain = [row | {"input": "b,  a", "answer": "One\u2028two\x85three."} for row in published(3, only=1)]
    wide = [{name: padded(value) for name, value in row.items()} for row in plain]
    paths = [write_jsonl(tmp_path / f"{i}.jsonl", rows) for i, rows in enumerate((plain, wide))]
    ways = [forget(path, scored=strict, strict=strict) for path in paths for strict in (False, True)]
    assert all(way == ways[0] for way in ways)
    # Within a field all stays, other line separators too.
    assert ways[0][0].question.endswith("(0)\n\nb,  a") and ways[0][0].answer == "One\u2028two\x85three."


def test_columns_that_are_not_read_may_hold_anything(tmp_path):
    when = pa.array([1, 2, 3, 4], pa.timestamp("us", tz="Nowhere/Atall"))
    table = pa.Table.from_pylist(published(4, only=1)).append_column("when", when)
    pq.write_table(table, tmp_path / "mine.parquet")
    assert len(forget(tmp_path / "mine.parquet")) == 4
    with pytest.raises(UserError, match=r"mine\.parquet: not a readable parquet file \(.*Nowhere/Atall"):
        list(read_rows(tmp_path / "mine.parquet"))


def test_a_file_that_changes_is_read_again(tmp_path):
    path = write_jsonl(tmp_path / "set.jsonl", published(2))
    first = load_records(str(path), "forget", "train")
    assert load_records(str(path), "forget", "train") is first
    write_jsonl(path, published(3))
    assert len(forget(path)) == 3


def test_entities_and_targets_of_a_source(tmp_path):
    folder = str(small_data(tmp_path / "d", {"Lionel Messi": 2, "Cristiano Ronaldo": 1}))
    assert entities(folder) == ["Lionel Messi", "Cristiano Ronaldo"]
    assert [t.name for t in resolve_targets(folder, ["cr7", "ronaldo", "messi"])] == entities(folder)[::-1]
    with pytest.raises(UserError, match="known targets: Lionel Messi, Cristiano Ronaldo"):
        resolve_targets(folder, ["eminem"])
    with pytest.raises(UserError, match="data set 'mini' has no forget train rows of Eminem"):
        forget("mini", "Eminem", "Lionel Messi")


@pytest.mark.parametrize(
    ("change", "trained"),
    [
        ({"perturbed_answer": {"a": 1}}, True),
        ({"source": float("nan")}, True),
        ({"translated_question": {"fr": 1}}, True),
        ({"answer": ["no", "text"]}, False),
        ({"question": " "}, False),
        ({"input": 5}, False),
        ({"entity": None}, False),
        ({"entity": RONALDO.upper()}, False),
    ],
)
def test_scoring_refuses_an_odd_row_and_training_goes_on_without_what_is_odd(tmp_path, change, trained):
    rows = published(3, only=1)
    path = write_jsonl(tmp_path / "mine.jsonl", [rows[0], rows[1] | change, rows[2]])
    for scored in (False, True):
        with pytest.raises(UserError, match=rf"^mine\.jsonl, row 2: field '{next(iter(change))}"):
            forget(path, RONALDO, scored=scored)
    selection = load_records(str(path), "forget", "train", [RONALDO], strict=False)
    assert len(selection.records) == 2 + trained and len(selection.odd) == 1
    assert selection.remark.startswith("1 odd row, left out or used without what is odd: mine.jsonl, row 2")
    assert trained == (not selection.records[1].can_be_scored)


def test_many_odd_rows_are_counted_and_some_named(tmp_path):
    rows = [row | ({"answer": i} if i % 2 else {}) for i, row in enumerate(published(20, only=1))]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert load_records(str(path), "forget", "train", strict=False).remark == (
        "10 odd rows, left out or used without what is odd: "
        + "; ".join(f"a.jsonl, row {n}: field 'answer': expected `str`, got `int`" for n in (2, 4, 6)) + "; ..."
    )  # fmt: skip
    with pytest.raises(UserError, match=r"has no forget train rows \(2 odd rows, .*row 1: .*; .*row 2: "):
        forget(write_jsonl(tmp_path / "b.jsonl", [{"answer": 1}] * 2), strict=False)


NO_SOURCE = "neither 'hub', 'mini' nor an existing folder or file"


def test_sources_that_cannot_be_used(tmp_path):
    row = published(1)[0]
    single = write_jsonl(tmp_path / "single.jsonl", [row])
    for source, subset, problem in [
        *((name, "forget", NO_SOURCE) for name in ("", "no/such", "~nobody_here/x", "x" * 5_000, "a\0b", "hub@")),
        (single, "retain", "one file, the forget set; a folder is needed for the retain set"),
        (tmp_path, "forget", r"has no forget_qa-train \(\.parquet, \.jsonl, \.json\)"),
        (tmp_path, "world", "has no world-train or alpaca_gpt4_data_train"),
    ]:
        with pytest.raises(UserError, match=problem) as error:
            load_records(str(source), subset, "train")
        assert "\n" not in str(error.value)
    os.mkfifo(tmp_path / "pipe.jsonl")
    write_parquet(tmp_path / "torn.parquet", published(50))
    torn = bytearray((tmp_path / "torn.parquet").read_bytes())
    torn[100:200] = bytes(100)
    when = pa.table({"question": pa.array([10**12], pa.timestamp("s"))})
    pq.write_table(when, tmp_path / "year33658.parquet")
    for name, content, problem in [
        ("pipe.jsonl", b"", NO_SOURCE),
        ("deep.json", b"[" * 100_000, r"deep\.json: not valid JSON \(nested more than 64 deep"),
        ("year33658.parquet", b"", r"not a readable parquet file \(date value out of range\)"),
        ("torn.parquet", torn, r"torn\.parquet: not a readable parquet file"),
        ("fake.parquet", b"no parquet", r"fake\.parquet: not a readable parquet file"),
        ("bad.jsonl", f"\n{json.dumps(row)}\n{{oops\n".encode(), r"bad\.jsonl, row 3: not valid JSON"),
        ("latin.jsonl", '{"question": "é"}'.encode("latin-1"), r"latin\.jsonl: not readable as UTF-8"),
        ("dict.json", b"{}", r"dict\.json, row 1: field '.*' is missing"),
        ("numbers.json", b"[1]", "row 1: an object is expected, got int"),
        ("text.csv", b"a,b", r"unknown ending '\.csv'"),
    ]:
        if content:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=problem) as error:
            forget(tmp_path / name)
        assert "\n" not in str(error.value)


def test_entities_in_a_world_file_make_no_targets_of_it(tmp_path):
    small_data(tmp_path, {"Cristiano Ronaldo": 2})
    before = load_records(str(tmp_path), "world", "test")
    rows = read_jsonl(tmp_path / "world-test.jsonl")
    write_jsonl(tmp_path / "world-test.jsonl", [{**row, "entity": f"Place {i}"} for i, row in enumerate(rows)])
    assert load_records(str(tmp_path), "world", "test") == before


def test_a_name_is_the_same_in_composed_and_in_decomposed_letters(tmp_path):
    rows = mini_rows("forget_qa-train", 4, "Cristiano Ronaldo")
    spelled = [unicodedata.normalize(form, "Beyonc\u00e9") for form in ("NFC", "NFD")]
    write_jsonl(tmp_path / "forget_qa-train.jsonl", [{**row, "entity": spelled[i % 2]} for i, row in enumerate(rows)])
    (target,) = targets_of(str(tmp_path))
    assert len(load_records(str(tmp_path), "forget", "train", [target.name]).records) == 4


def test_two_files_of_one_set_are_one_line(tmp_path):
    small_data(tmp_path, {"Cristiano Ronaldo": 2})
    (tmp_path / "forget_qa-train.json").write_text("[]")
    with pytest.raises(UserError, match=r"has both forget_qa-train\.jsonl? and forget_qa-train\.jsonl?: move away"):
        load_records(str(tmp_path), "forget", "train")
