"""Where data comes from: the Hub's layout, ELUDe-mini, folders, files; only wanted rows; errors that name the row."""

import json
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm_eval_elude.core import dataset
from lm_eval_elude.core.dataset import entities, load_records, resolve_targets
from lm_eval_elude.core.records import DataError
from lm_eval_elude.core.targets import TARGETS, UnknownTargetError
from tests.support import mini_rows, small_data, write_jsonl

# The head of the repository's README.md on the Hub: it maps configurations and splits to files.
README = """---
license: cc-by-sa-4.0
configs:
- config_name: forget_qa
  data_files:
  - split: train
    path: forget_qa-train.parquet
- config_name: retain_qa
  data_files:
  - split: train
    path: retain_qa-train.parquet
  - split: validation
    path: retain_qa-validation.parquet
  - split: test
    path: retain_qa-test.parquet
---
"""
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
    folder.mkdir()
    (folder / "README.md").write_text(README)
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
    """A local copy of the Hub repository's layout that the hub source reads through ``datasets``."""
    folder = hub_layout(tmp_path / "ELUDe", forget=1_000, retain=2_000)
    monkeypatch.setenv("ELUDE_HUB_REPOSITORY", str(folder))
    monkeypatch.setenv("ELUDE_WORLD_URL", str(folder / "alpaca_gpt4_data_{split}.json"))
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
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


def test_an_unreachable_hub_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("ELUDE_HUB_REPOSITORY", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"data set 'hub' cannot be read .*--dataset mini or a folder") as error:
        load_records("hub", "forget", "train", ["Eminem"])
    assert "\n" not in str(error.value)


def test_the_world_set_is_pinned_to_a_commit():
    assert "/995babb" in dataset.HUB_WORLD_URL and dataset.HUB_REPOSITORY == "6rightjade/ELUDe"


def test_loading_takes_seconds_at_the_published_size(tmp_path):
    """All 15,651 forget rows and the 9,095 scored retain rows; the 72,763 training rows take three times as long."""
    hub_layout(tmp_path / "full", forget=15_651, retain=20_000)
    start = time.perf_counter()
    everything = load_records(str(tmp_path / "full"), "forget", "train", scored=True)
    one = load_records(str(tmp_path / "full"), "retain", "train", ["Kanye West"])
    assert len(everything.records) == 15_651 and len(one.records) == 800
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet"])
def test_every_ending_gives_the_same(tmp_path, ending):
    rows = published(6, only=1)
    path = tmp_path / f"forget_qa-train{ending}"
    if ending == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif ending == ".json":
        path.write_text(json.dumps(rows))
    else:
        write_jsonl(path, rows)
    reference = write_jsonl(tmp_path / "reference.jsonl", rows)
    assert (
        load_records(str(tmp_path), "forget", "train").fingerprint
        == load_records(str(path), "forget", "train").fingerprint
    )
    assert (
        load_records(str(path), "forget", "train").fingerprint
        == load_records(str(reference), "forget", "train").fingerprint
    )


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
    with pytest.raises(UnknownTargetError, match="known targets: Lionel Messi, Cristiano Ronaldo"):
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
        ({"answer": ""}, "", r"^mine\.jsonl, row 2: field 'answer' is empty$"),
        ({"question": 3}, "", r"^mine\.jsonl, row 2: field 'question' must be text, got int 3$"),
        ({"entity": None}, "", r"^mine\.jsonl, row 2: field 'entity' is missing$"),
        ({}, "answer", r"^mine\.jsonl, row 1: field 'answer' must be text, got nothing$"),
        ({}, "perturbed_answer", r"^mine\.jsonl, row 1: field 'perturbed_answer' is missing"),
    ],
)  # fmt: skip
def test_bad_rows_and_missing_columns_name_file_row_and_field(tmp_path, change, drop, message):
    with pytest.raises(DataError, match=message):
        load_records(broken(tmp_path, change, drop), "forget", "train", [TARGETS[0].name], scored=True)


def test_rows_of_other_targets_are_not_even_validated(tmp_path):
    rows = [*published(2, only=1), {"entity": "Someone Else", "question": None}]
    path = write_jsonl(tmp_path / "mine.jsonl", rows)
    assert len(load_records(str(path), "forget", "train", [TARGETS[0].name]).records) == 2
    with pytest.raises(DataError, match="row 3"):
        load_records(str(path), "forget", "train")


def test_sources_that_cannot_be_used(tmp_path):
    one = write_jsonl(tmp_path / "one.jsonl", published(1))
    (tmp_path / "bad.jsonl").write_text("\n" + json.dumps(published(1)[0]) + "\n{oops\n")
    (tmp_path / "latin.jsonl").write_bytes('{"question": "é"}'.encode("latin-1"))
    (tmp_path / "dict.json").write_text("{}")
    (tmp_path / "numbers.json").write_text("[1]")
    (tmp_path / "text.csv").write_text("a,b")
    (tmp_path / "fake.parquet").write_text("no parquet")
    for source, subset, said in [
        ("no/such/folder", "forget", "neither 'hub', 'mini' nor an existing folder or file"),
        (one, "retain", "one file, the forget set; a folder is needed for the retain set"),
        (tmp_path, "forget", r"has no forget_qa-train \(\.parquet, \.jsonl, \.json\)"),
        (tmp_path, "world", "has no world-train or alpaca_gpt4_data_train"),
        (tmp_path / "bad.jsonl", "forget", r"bad\.jsonl, row 2: not valid JSON"),
        (tmp_path / "latin.jsonl", "forget", r"latin\.jsonl: not readable as UTF-8"),
        (tmp_path / "dict.json", "forget", "a JSON list of rows is expected, got dict"),
        (tmp_path / "numbers.json", "forget", "row 1: an object is expected, got int"),
        (tmp_path / "text.csv", "forget", r"unknown ending '\.csv'"),
        (tmp_path / "fake.parquet", "forget", r"fake\.parquet: not a readable parquet file"),
    ]:
        with pytest.raises(DataError, match=said) as error:
            load_records(str(source), subset, "train")
        assert "\n" not in str(error.value)


def test_a_target_without_rows_is_named():
    with pytest.raises(DataError, match="data set 'mini' has no forget train rows of Eminem"):
        load_records("mini", "forget", "train", ["Eminem", "Lionel Messi"])
