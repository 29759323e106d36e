"""Where data comes from: the Hub's layout, ELUDe-mini, folders, files; only wanted rows; errors that name the row."""

import json
import os
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm_eval_elude.data import dataset, jsonio, tofu
from lm_eval_elude.data.dataset import entities, load_records, resolve_targets
from lm_eval_elude.data.hub import _commit as commits_of_the_hub
from lm_eval_elude.data.rows import read_rows
from lm_eval_elude.data.targets import TARGETS
from lm_eval_elude.errors import UserError
from tests.support import mini_rows, small_data, write_jsonl

COLUMNS = ("question", "answer", "paraphrased_question", "paraphrased_answer", "perturbed_answer")


def published(count: int, only: int = 20) -> list[dict]:
    """Rows in the published columns, spread over the paper's targets."""
    mini = mini_rows("forget_qa-train")
    return [
        {"entity": TARGETS[i * only // count].name, **{c: mini[i % len(mini)][c] for c in COLUMNS},
         "question": f"{mini[i % len(mini)]['question']} ({i})"}
        for i in range(count)
    ]  # fmt: skip


def hub_layout(folder, forget: int, retain: int):
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("ELUDe")
    pq.write_table(pa.Table.from_pylist(published(forget)), folder / "forget_qa-train.parquet")
    for split, share in (("train", 8), ("validation", 1), ("test", 1)):
        pq.write_table(pa.Table.from_pylist(published(retain * share // 10)), folder / f"retain_qa-{split}.parquet")
    for split, scored in (("train", False), ("validation", True), ("test", True)):
        rows = [
            {"question": f"Add these ({i}).", "input": f"{i} and 1" if i % 2 else "", "answer": f"It is {i + 1}."}
            | (
                {"paraphrased_answer": f"The sum is {i + 1}.", "perturbed_answer": [f"Sum: {i + k}." for k in range(5)]}
                if scored else {}
            )
            for i in range(30)
        ]  # fmt: skip
        (folder / f"alpaca_gpt4_data_{split}.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A local copy of the Hub repository's layout that stands in for it."""
    folder = hub_layout(tmp_path / "ELUDe", forget=1_000, retain=2_000)
    monkeypatch.setenv("ELUDE_HUB_REPOSITORY", str(folder))
    monkeypatch.setenv("ELUDE_WORLD_URL", str(folder / "alpaca_gpt4_data_{split}.json"))
    return folder


def test_the_hub_gives_the_rows_of_the_target_and_nothing_else(hub):
    forget = load_records("hub", "forget", "train", ["Cristiano Ronaldo"], scored=True)
    assert [r.columns()["question"] for r in forget.records] == [
        r["question"] for r in published(1_000) if r["entity"] == "Cristiano Ronaldo"
    ]
    assert {r.entity for r in forget.records} == {"Cristiano Ronaldo"} and len(forget.records) == 50
    counts = {s: len(load_records("hub", "retain", s, ["Eminem"]).records) for s in ("train", "validation", "test")}
    assert counts == {"train": 80, "validation": 10, "test": 10}


def test_the_hub_world_set_belongs_to_no_target(hub):
    world = load_records("hub", "world", "test", ["Cristiano Ronaldo"], scored=True)
    assert len(world.records) == 30 and {r.entity for r in world.records} == {""}
    assert world.records[1].question == "Add these (1).\n\n1 and 1" and world.records[0].question == "Add these (0)."
    assert len(load_records("hub", "world", "train").records) == 30


def test_a_folder_with_the_same_files_gives_the_same_records(hub):
    for subset, split in (("forget", "train"), ("retain", "test"), ("world", "test")):
        ours = load_records(str(hub), subset, split, ["Eminem"], scored=True)
        assert ours.fingerprint == load_records("hub", subset, split, ["Eminem"], scored=True).fingerprint


def test_a_second_folder_that_stands_in_for_the_hub_is_read_itself(hub, tmp_path, monkeypatch):
    other = hub_layout(tmp_path / "other" / "ELUDe", forget=400, retain=800)
    assert len(load_records("hub", "forget", "train").records) == 1_000
    monkeypatch.setenv("ELUDE_HUB_REPOSITORY", str(other))
    assert len(load_records("hub", "forget", "train").records) == 400
    pq.write_table(pa.Table.from_pylist(published(40)), other / "forget_qa-train.parquet")
    assert len(load_records("hub", "forget", "train").records) == 40
    assert dataset.describe("hub") == {
        "dataset": "hub", "repository": str(other), "world": str(hub / "alpaca_gpt4_data_{split}.json")
    }  # fmt: skip
    with pytest.raises(UserError, match=r"hub@main.*is a folder, which has no revisions"):
        load_records("hub@main", "forget", "train")


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
        hub_layout(repository / "snapshots" / commit, forget=200 * number, retain=400)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commits[1])
    (repository / "refs" / "v1").write_text(commits[0])
    yield commits
    commits_of_the_hub.cache_clear()


def test_the_commit_of_the_hub_is_said_and_can_be_asked_for(cached_hub):
    first, second = cached_hub
    for source, commit, rows in (
        ("hub", second, 400), ("hub@main", second, 400), ("hub@v1", first, 200), (f"hub@{first}", first, 200),
    ):  # fmt: skip
        assert dataset.describe(source)["revision"] == commit
        assert dataset.describe(source)["repository"] == "6rightjade/ELUDe"
        assert len(load_records(source, "forget", "train").records) == rows
        assert entities(source) == [t.name for t in TARGETS]
    assert len(load_records("hub", "retain", "test", ["Eminem"]).records) == 2
    for source in ("hub@gone", "hub@ /\\", f"hub@{'3' * 40}"):
        with pytest.raises(UserError, match=r"data set 'hub' cannot be read \(6rightjade/ELUDe, README.md, ") as error:
            load_records(source, "forget", "train")
        assert "\n" not in str(error.value)


def test_other_sources_describe_themselves(tmp_path):
    assert dataset.describe("mini") == {"dataset": "mini"}
    assert dataset.describe(str(tmp_path)) == {"dataset": str(tmp_path)}


def test_an_unreachable_hub_is_one_line_that_says_what_takes_its_place(tmp_path, monkeypatch):
    for variable in ("ELUDE_HUB_REPOSITORY", "TOFU_REPOSITORY"):
        monkeypatch.setenv(variable, str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"data set 'hub' cannot be read .*--dataset mini or a folder") as error:
        load_records("hub", "forget", "train", ["Eminem"])
    with pytest.raises(UserError, match=r"data set 'tofu' cannot be read .*tofu_data.* a folder of TOFU's") as of_tofu:
        tofu.load("tofu", "forget05")
    assert "\n" not in f"{error.value}{of_tofu.value}" and "mini" not in str(of_tofu.value)


def test_the_world_set_is_pinned_to_a_commit():
    assert "/995babb243c1673d1fff96d0a8a32b236e85c450/data/" in dataset.HUB_WORLD_URL
    assert dataset.HUB.published == "6rightjade/ELUDe"


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_other_targets_rows_are_parsed_once_and_not_kept(tmp_path, monkeypatch, ending):
    """Of a large set the memory of one target's rows is needed, and each line is parsed in the first pass alone."""
    (tmp_path / "d").mkdir()
    rows = published(4_000)
    path = tmp_path / "d" / f"forget_qa-train{ending}"
    pq.write_table(pa.Table.from_pylist(rows), path) if ending == ".parquet" else write_jsonl(path, rows)
    parsed = []
    loads = jsonio.loads
    monkeypatch.setattr(
        "lm_eval_elude.data.jsonio.loads", lambda *args, **more: parsed.append(1) or loads(*args, **more)
    )
    tracemalloc.start()
    assert [t.name for t in resolve_targets(str(tmp_path / "d"), ["eminem"])] == ["Eminem"]
    for scored, strict in ((False, False), (True, True), (False, True)):
        assert (
            len(load_records(str(tmp_path / "d"), "forget", "train", ["Eminem"], scored=scored, strict=strict)[0])
            == 200
        )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(parsed) <= 4_000 + 3 * 200
    assert peak < len(json.dumps(rows)) / 2


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet", ".JSONL", ".Json", ".PARQUET", ".json of lines"])
def test_every_ending_gives_the_same(tmp_path, ending):
    rows = published(6, only=1)
    path = tmp_path / f"forget_qa-train{ending.removesuffix(' of lines')}"
    if ending.lower() == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif ending.lower() == ".json":
        path.write_text(json.dumps(rows))
    else:
        write_jsonl(path, rows)
    sources = (tmp_path, path, write_jsonl(tmp_path / "reference.jsonl", rows))
    assert len({load_records(str(source), "forget", "train").fingerprint for source in sources}) == 1


def test_white_space_at_the_ends_is_no_part_of_a_field_in_training_and_in_scoring(tmp_path):
    def padded(value):
        if isinstance(value, list):
            return [padded(text) for text in value]
        return f"\u3000 \t{value}\n "

    plain = [row | {"input": "b,  a"} for row in published(3, only=1)]
    wide = [{name: padded(value) for name, value in row.items()} for row in plain]
    sources = [str(write_jsonl(tmp_path / f"{i}.jsonl", rows)) for i, rows in enumerate((plain, wide))]
    found = [load_records(s, "forget", "train", scored=scored, strict=scored) for s in sources for scored in (0, 1)]
    assert len({selection.fingerprint for selection in found}) == 1 and not any(s.odd for s in found)
    assert found[-1].records[0].question.endswith("(0)\n\nb,  a")  # within a field it stays


def test_columns_that_are_not_read_may_hold_anything(tmp_path):
    table = pa.Table.from_pylist(published(4, only=1))
    when = pa.array([1, 2, 3, 4], pa.timestamp("us", tz="Nowhere/Atall"))
    pq.write_table(table.append_column("when", when), tmp_path / "mine.parquet")
    assert len(load_records(str(tmp_path / "mine.parquet"), "forget", "train").records) == 4
    with pytest.raises(UserError, match=r"mine\.parquet: not a readable parquet file \(.*Nowhere/Atall"):
        list(read_rows(tmp_path / "mine.parquet"))


def test_rows_of_any_columns_are_read_by_the_same_readers(tmp_path):
    rows = [{"author": "Nobody", "score": 1.5, "tags": ["a"]}, {"author": "Noone", "score": 2.5, "tags": []}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    write_jsonl(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    for name in ("a.parquet", "a.jsonl", "a.json"):
        numbered = [(f"{name}, row {n}", row) for n, row in enumerate(rows, 1)]
        assert list(read_rows(tmp_path / name)) == numbered
        assert list(read_rows(tmp_path / name, only={1})) == numbered[1:]


def test_texts_with_other_line_separators_stay_whole(tmp_path):
    row = published(1)[0] | {"answer": "One\u2028two\x85three."}
    path = write_jsonl(tmp_path / "set.jsonl", [row])
    assert load_records(str(path), "forget", "train").records[0].answer == "One\u2028two\x85three."


def test_a_file_that_changes_is_read_again(tmp_path):
    path = write_jsonl(tmp_path / "set.jsonl", published(2))
    first = load_records(str(path), "forget", "train")
    assert load_records(str(path), "forget", "train") is first
    write_jsonl(path, published(3))
    assert len(load_records(str(path), "forget", "train").records) == 3


def test_entities_and_targets_of_a_source(tmp_path):
    folder = small_data(tmp_path / "d", {"Lionel Messi": 2, "Cristiano Ronaldo": 1})
    assert entities(str(folder)) == ["Lionel Messi", "Cristiano Ronaldo"]
    assert [t.name for t in resolve_targets(str(folder), ["cr7", "ronaldo", "messi"])] == [
        "Cristiano Ronaldo",
        "Lionel Messi",
    ]
    assert entities("hub") == [t.name for t in TARGETS]
    with pytest.raises(UserError, match="known targets: Lionel Messi, Cristiano Ronaldo"):
        resolve_targets(str(folder), ["eminem"])


def broken(tmp_path, change: dict, drop: str = ""):
    rows = published(3, only=1)
    rows[1] |= change
    for row in rows:
        row.pop(drop, None)
    return str(write_jsonl(tmp_path / "mine.jsonl", rows))


@pytest.mark.parametrize(
    ("change", "drop", "message"),
    [
        ({"answer": ""}, "", r"^mine\.jsonl, row 2: field 'answer': .* not blank$"),
        ({"question": 3}, "", r"^mine\.jsonl, row 2: field 'question': "),
        ({"entity": None}, "", r"^mine\.jsonl, row 2: field 'entity' must be text, got nothing$"),
        ({}, "answer", r"^mine\.jsonl, row 1: field 'answer' is missing$"),
        ({}, "perturbed_answer", r"^mine\.jsonl, row 1: field 'perturbed_answer' is missing"),
    ],
)  # fmt: skip
def test_bad_rows_and_missing_columns_name_file_row_and_field(tmp_path, change, drop, message):
    with pytest.raises(UserError, match=message):
        load_records(broken(tmp_path, change, drop), "forget", "train", [TARGETS[0].name], scored=True)


ODD = [
    ({"perturbed_answer": {"a": 1}}, True),
    ({"source": float("nan")}, True),
    ({"translated_question": {"fr": 1}}, True),
    ({"answer": ["no", "text"]}, False),
    ({"question": " "}, False),
    ({"input": 5}, False),
    ({"entity": 5}, False),
]


@pytest.mark.parametrize(("change", "trained"), ODD)
def test_training_goes_on_without_what_is_odd_and_says_so(tmp_path, change, trained):
    source = broken(tmp_path, change)
    with pytest.raises(UserError, match=rf"mine\.jsonl, row 2.*field '{next(iter(change))}"):
        load_records(source, "forget", "train", [TARGETS[0].name])
    found = load_records(source, "forget", "train", [TARGETS[0].name], strict=False)
    assert len(found.records) == 2 + trained and len(found.odd) == 1
    assert found.remark.startswith(
        "1 odd row, left out or used without what is odd: mine.jsonl, row 2"
    ) and trained == (not found.records[1].can_be_scored)
    with pytest.raises(UserError, match=r"row 2"):
        load_records(source, "forget", "train", [TARGETS[0].name], scored=True)


def test_many_odd_rows_are_counted_and_some_named(tmp_path):
    rows = [row | ({"answer": i} if i % 2 else {}) for i, row in enumerate(published(20, only=1))]
    found = load_records(str(write_jsonl(tmp_path / "a.jsonl", rows)), "forget", "train", strict=False)
    assert found.remark == (
        "10 odd rows, left out or used without what is odd: "
        + "; ".join(f"a.jsonl, row {n}: field 'answer': expected `str`, got `int`" for n in (2, 4, 6)) + "; ..."
    )  # fmt: skip
    with pytest.raises(UserError, match=r"has no forget train rows \(2 odd rows, .*row 1: .*; .*row 2: "):
        load_records(str(write_jsonl(tmp_path / "b.jsonl", [{"answer": 1}] * 2)), "forget", "train", strict=False)


def test_rows_of_other_targets_are_not_even_validated(tmp_path):
    rows = [*published(2, only=1), {"entity": "Someone Else", "question": None}]
    path = write_jsonl(tmp_path / "mine.jsonl", rows)
    assert len(load_records(str(path), "forget", "train", [TARGETS[0].name]).records) == 2
    with pytest.raises(UserError, match="row 3"):
        load_records(str(path), "forget", "train")


def test_sources_that_cannot_be_used(tmp_path):
    one = write_jsonl(tmp_path / "one.jsonl", published(1))
    (tmp_path / "bad.jsonl").write_text("\n" + json.dumps(published(1)[0]) + "\n{oops\n")
    (tmp_path / "latin.jsonl").write_bytes('{"question": "é"}'.encode("latin-1"))
    (tmp_path / "dict.json").write_text("{}")
    (tmp_path / "numbers.json").write_text("[1]")
    (tmp_path / "text.csv").write_text("a,b")
    (tmp_path / "fake.parquet").write_text("no parquet")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "long.jsonl").write_text('{"question": ' + "1" * 4_301 + "}")
    (tmp_path / "half.jsonl").write_text('{"question": "\\ud800"}')
    pq.write_table(pa.Table.from_pylist(published(50)), tmp_path / "torn.parquet")
    when = pa.table({"question": pa.array([10**12], pa.timestamp("s"))})
    pq.write_table(when, tmp_path / "year33658.parquet")
    content = bytearray((tmp_path / "torn.parquet").read_bytes())
    content[100:200] = bytes(100)
    (tmp_path / "torn.parquet").write_bytes(content)
    for source, subset, said in [
        ("no/such/folder", "forget", "neither 'hub', 'mini' nor an existing folder or file"),
        ("~nobody_here/x", "forget", "neither 'hub', 'mini' nor"),
        ("x" * 5_000, "forget", "neither 'hub', 'mini' nor"),
        ("a\0b", "forget", "neither 'hub', 'mini' nor"),
        ("hub@", "forget", "neither 'hub', 'mini' nor"),
        (tmp_path / "pipe.jsonl", "forget", "neither 'hub', 'mini' nor"),
        (tmp_path / "deep.json", "forget", r"deep\.json: not valid JSON \(nested more than 64 deep"),
        (tmp_path / "long.jsonl", "forget", r"long\.jsonl, row 1: not valid JSON \(.*4300 digits"),
        (tmp_path / "half.jsonl", "forget", r"half\.jsonl, row 1: a text has half a character"),
        (tmp_path / "year33658.parquet", "forget", r"not a readable parquet file \(date value out of range\)"),
        (tmp_path / "torn.parquet", "forget", r"torn\.parquet: not a readable parquet file"),
        (one, "retain", "one file, the forget set; a folder is needed for the retain set"),
        (tmp_path, "forget", r"has no forget_qa-train \(\.parquet, \.jsonl, \.json\)"),
        (tmp_path, "world", "has no world-train or alpaca_gpt4_data_train"),
        (tmp_path / "bad.jsonl", "forget", r"bad\.jsonl, row 3: not valid JSON"),
        (tmp_path / "latin.jsonl", "forget", r"latin\.jsonl: not readable as UTF-8"),
        (tmp_path / "dict.json", "forget", r"dict\.json, row 1: field '.*' is missing"),
        (tmp_path / "numbers.json", "forget", "row 1: an object is expected, got int"),
        (tmp_path / "text.csv", "forget", r"unknown ending '\.csv'"),
        (tmp_path / "fake.parquet", "forget", r"fake\.parquet: not a readable parquet file"),
    ]:
        with pytest.raises(UserError, match=said) as error:
            load_records(str(source), subset, "train")
        assert "\n" not in str(error.value)


def test_a_target_without_rows_is_named():
    with pytest.raises(UserError, match="data set 'mini' has no forget train rows of Eminem"):
        load_records("mini", "forget", "train", ["Eminem", "Lionel Messi"])
