"""Where data comes from: the Hub's layout, ELUDe-mini, folders, files; only wanted rows; errors that name the row."""

import json
import unicodedata

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lm_eval_elude.data import dataset, tofu
from lm_eval_elude.data.dataset import describe, entities, load_records, resolve_targets, targets_of
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


def forget(source, *targets: str) -> list:
    return list(load_records(str(source), "forget", "train", targets).records)


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
    """A local copy of the Hub repository's layout that is read in its place."""
    folder = hub_layout(tmp_path / "ELUDe")
    monkeypatch.setenv("ELUDE_HUB_REPOSITORY", str(folder))
    monkeypatch.setenv("ELUDE_WORLD_URL", str(folder / "alpaca_gpt4_data_{split}.json"))
    return folder


def test_the_hub_gives_the_rows_of_the_target_and_the_whole_world_set(hub):
    records = forget("hub", RONALDO)
    assert [r.question for r in records] == [r["question"] for r in published(200) if r["entity"] == RONALDO]
    assert {r.entity for r in records} == {RONALDO} and len(records) == 10
    assert [len(load_records("hub", "retain", split, ["Eminem"]).records) for split in SPLITS] == [16, 2, 2]
    world = load_records("hub", "world", "test", [RONALDO]).records
    assert len(world) == 30 and {r.entity for r in world} == {""}
    assert world[1].question == "Add these (1).\n\n1 and 1" and world[0].question == "Add these (0)."
    for subset, split in (("forget", "train"), ("retain", "test"), ("world", "test")):
        selections = [load_records(source, subset, split, ["Eminem"]) for source in (str(hub), "hub")]
        assert selections[0].fingerprint == selections[1].fingerprint
    assert describe("hub") == {
        "dataset": "hub", "repository": str(hub), "world": str(hub / "alpaca_gpt4_data_{split}.json")
    }  # fmt: skip


@pytest.fixture
def cached_hub(tmp_path, monkeypatch):
    """The Hub's cache after two states of the repository were downloaded; ``main`` is at the second."""
    import huggingface_hub.constants

    monkeypatch.delenv("ELUDE_HUB_REPOSITORY", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "cache" / "datasets--6rightjade--ELUDe"
    commits = ["1" * 40, "2" * 40]
    for number, commit in enumerate(commits, 1):
        hub_layout(repository / "snapshots" / commit, forget=20 * number)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commits[1])
    (repository / "refs" / "v1").write_text(commits[0])
    return commits


def test_the_commit_of_the_hub_is_said_and_can_be_asked_for(cached_hub):
    first, second = cached_hub
    for source, commit, rows in (
        ("hub", second, 40), ("hub@main", second, 40), ("hub@v1", first, 20), (f"hub@{first}", first, 20),
    ):  # fmt: skip
        assert describe(source) == {
            "dataset": source, "repository": "6rightjade/ELUDe", "revision": commit, "world": dataset.HUB_WORLD_URL
        }  # fmt: skip
        assert len(forget(source)) == rows and entities(source) == [t.name for t in TARGETS]
    with pytest.raises(UserError, match=r"data set 'hub' cannot be read \(6rightjade/ELUDe, forget_qa-train") as error:
        forget("hub@gone")
    assert "\n" not in str(error.value)
    assert describe("mini") == {"dataset": "mini"} and describe("a/folder") == {"dataset": "a/folder"}


def test_an_unreachable_hub_is_one_line_that_says_what_takes_its_place(tmp_path, monkeypatch):
    for variable in ("ELUDE_HUB_REPOSITORY", "TOFU_REPOSITORY"):
        monkeypatch.setenv(variable, str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"data set 'hub' cannot be read .*--dataset mini or a folder") as error:
        forget("hub", "Eminem")
    with pytest.raises(UserError, match=r"data set 'tofu' cannot be read .*tofu_data.* a folder of TOFU's") as of_tofu:
        tofu.load("tofu", "forget05")
    assert "\n" not in f"{error.value}{of_tofu.value}" and "mini" not in str(of_tofu.value)


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet", ".json of lines"])
def test_every_ending_gives_the_same(tmp_path, ending):
    rows = published(6, only=1)
    path = tmp_path / f"forget_qa-train{ending.removesuffix(' of lines')}"
    if ending == ".json":
        path.write_text(json.dumps(rows))
    else:
        write_parquet(path, rows) if ending == ".parquet" else write_jsonl(path, rows)
    assert list(read_rows(path)) == [(f"{path.name}, row {n}", row) for n, row in enumerate(rows, 1)]
    assert forget(tmp_path) == forget(path) == forget(write_jsonl(tmp_path / "same.jsonl", rows))


def test_white_space_at_the_ends_is_no_part_of_a_field(tmp_path):
    def padded(value):
        return [padded(text) for text in value] if isinstance(value, list) else f"\u3000 \t{value}\n "

    plain = [row | {"input": "b,  a", "answer": "One\u2028two\x85three."} for row in published(3, only=1)]
    wide = [{name: padded(value) for name, value in row.items()} for row in plain]
    narrow, broad = (forget(write_jsonl(tmp_path / f"{i}.jsonl", rows)) for i, rows in enumerate((plain, wide)))
    assert narrow == broad
    # Within a field all stays, other line separators too.
    assert narrow[0].question.endswith("(0)\n\nb,  a") and narrow[0].answer == "One\u2028two\x85three."


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


def test_sources_that_cannot_be_used_are_one_line(tmp_path):
    row = published(1)[0]
    single = write_jsonl(tmp_path / "single.jsonl", [row])
    for source, subset, problem in [
        *((name, "forget", "neither 'hub', 'mini' nor an existing folder or file") for name in ("", "no/such", "hub@")),
        (single, "retain", "one file, the forget set; a folder is needed for the retain set"),
        (tmp_path, "forget", r"has no forget_qa-train \(\.parquet, \.jsonl, \.json\)"),
        (tmp_path, "world", "has no world-train or alpaca_gpt4_data_train"),
    ]:
        with pytest.raises(UserError, match=problem) as error:
            load_records(str(source), subset, "train")
        assert "\n" not in str(error.value)
    for name, content, problem in [
        ("fake.parquet", b"no parquet", r"fake\.parquet: not a readable parquet file"),
        ("bad.jsonl", f"\n{json.dumps(row)}\n{{oops\n".encode(), r"bad\.jsonl, row 3: not valid JSON"),
        ("latin.jsonl", '{"question": "é"}'.encode("latin-1"), r"latin\.jsonl cannot be read"),
        ("numbers.json", b"[1]", "row 1: an object is expected, got 1"),
        ("text.csv", b"a,b", r"unknown ending '\.csv'"),
        ("nobody.json", json.dumps([{k: v for k, v in row.items() if k != "entity"}]).encode(), None),
        ("answerless.json", b'[{"question": "Who?"}]', "row 1: column 'answer' is missing"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=problem or "column 'entity', whom a row is about, is missing") as error:
            forget(tmp_path / name) if problem else targets_of(str(tmp_path / name))
        assert "\n" not in str(error.value)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_that_a_user_feeds_is_read_or_is_one_line(data, tmp_path):
    """A cell of any type in any column, or bytes cut and changed anywhere."""
    rows = published(3, only=1)
    cell = st.none() | st.integers() | st.text(max_size=5) | st.lists(st.text(max_size=3), max_size=6)
    rows[data.draw(st.integers(0, 2))][data.draw(st.sampled_from(["entity", *COLUMNS]))] = data.draw(cell)
    text = bytearray("".join(json.dumps(row) + "\n" for row in rows).encode())
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(text) - 1))
        text[place : place + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=4))
    path = tmp_path / "forget_qa-train.jsonl"
    path.write_bytes(bytes(text))
    try:
        assert forget(path)
    except UserError as error:
        assert "forget_qa-train.jsonl" in str(error) and "\n" not in str(error)


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
