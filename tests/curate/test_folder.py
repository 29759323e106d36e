"""A data set's folder: what is somebody else's stays, what is ours goes, and what was tampered with is one line."""

import json
import os
import re
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from lm_eval_elude.curate.build import build
from lm_eval_elude.curate.folder import MANIFEST, MARK, PLAN, WIKI_CACHE, begin, finished, purge
from lm_eval_elude.errors import UserError
from tests.curate.company import answer, make, material_of, tree
from tests.endpoints import endpoint
from tests.support import elude

NOWHERE = "http://127.0.0.1:9/v1"


@pytest.fixture
def copy(built, tmp_path) -> Path:
    """A finished data set to spoil."""
    return Path(shutil.copytree(built[0], tmp_path / "my"))


def test_purge_leaves_hashes_and_counts(copy, folder):
    purged = elude("build", copy, "--purge")
    assert purged.code == 0 and {path.name for path in copy.iterdir()} == {MANIFEST}
    text = (copy / MANIFEST).read_text()
    left = json.loads(text)
    assert left["counts"]["forget_qa-train"] == 6 and len(left["sources"]) == 6
    assert not any(word in text for word in ("Lumo", "Quorvane", "tarn", "Drusk", "grams"))
    assert purge(copy) == [] and json.loads((copy / MANIFEST).read_text()) == left
    with pytest.raises(UserError, match="was purged"):
        make(copy, folder, NOWHERE)


def test_purge_names_what_it_leaves_and_ends_with_1(copy, tmp_path):
    foreign = {"notes.txt": "mine", "work/notes.txt": "mine", "known.json": "{}", "audit.html": "my own audit",
           "README.md": "my own card"}  # fmt: skip
    for name, text in foreign.items():
        (copy / name).write_text(text)
    os.link(copy / "world-test.parquet", tmp_path / "kept-elsewhere")
    shutil.move(copy / "work" / "raw", tmp_path / "raw")
    (copy / "work" / "raw").symlink_to(tmp_path / "raw")
    purged = elude("build", copy, "--purge")
    assert purged.code == 1 and "purged, but for" not in purged.out
    assert all((copy / name).read_text() == text and name in purged.err for name, text in foreign.items())
    assert "world-test.parquet (removed here" in purged.err and ", work/raw" in purged.err
    files = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    assert files == {*foreign, MANIFEST}


def test_purge_takes_only_a_folder_that_a_build_made(tmp_path):
    other = tmp_path / "other"
    (other / WIKI_CACHE).mkdir(parents=True)
    for name in ("README.md", "audit.html", "work/notes", f"{WIKI_CACHE}/{'a' * 32}.json"):
        (other / name).write_text("mine")
    before = tree(other)
    assert "no data set of `elude build` is there" in elude("build", other, "--purge").err and tree(other) == before
    (tmp_path / "link").symlink_to(other)
    with pytest.raises(UserError, match="no data set"):
        purge(tmp_path / "link")


def test_a_manifest_that_lists_no_file_is_of_no_finished_data_set(copy):
    manifest = json.loads((copy / MANIFEST).read_text())
    assert finished(copy)
    (copy / MANIFEST).write_text(json.dumps(manifest | {"files": {}}))
    assert finished(copy) is None


def test_a_finished_data_set_takes_another_licence_without_a_call(copy, folder):
    before, material = tree(copy), material_of(folder)
    documents = [replace(document, licence="CC0 1.0") for document in material.documents]
    build(copy, material._replace(documents=documents), url=NOWHERE, model="m", thing=True)
    after = tree(copy)
    changed = {name for name in after if after[name] != before.get(name)}
    assert (
        changed == {"README.md", MANIFEST, "work/sources.jsonl"}
        and "Licence: CC0 1.0" in (copy / "README.md").read_text()
    )


@pytest.mark.parametrize("name", ["README.md", "forget_qa-train.parquet"])
def test_what_somebody_changed_in_a_finished_data_set_is_not_overwritten(name, copy, folder):
    with (copy / name).open("ab") as file:
        file.write(b"mine")
    before = tree(copy)
    with pytest.raises(UserError, match=f"{name} was changed since it was built; move it away, or name another"):
        make(copy, folder, NOWHERE)
    assert tree(copy) == before


def test_a_folder_that_was_begun_otherwise_is_told_what_differs(copy, folder):
    material = material_of(folder)
    documents = [replace(material.documents[0], raw=b"other"), *material.documents[1:]]
    for changed, said in (
        (material._replace(documents=documents), f"other documents (changed, added or removed: {documents[0].name})"),
        (
            material._replace(parts=material.parts[1:]),
            "other paragraphs of these documents",
        ),
    ):
        with pytest.raises(UserError, match=re.escape(f"was begun with {said}")):
            build(copy, changed, url=NOWHERE, model="m", thing=True)
    with pytest.raises(UserError, match="begun with --llm-model 'm', this run has 'n'"):
        build(copy, material, url=NOWHERE, model="n", thing=True)


def test_what_was_killed_before_its_mark_goes_on(tmp_path):
    (tmp_path / "data" / "work" / "raw").mkdir(parents=True)
    begin(tmp_path / "data")
    (tmp_path / "mine" / "work").mkdir(parents=True)
    (tmp_path / "mine" / "work" / "notes.txt").touch()
    with pytest.raises(UserError, match="has files in it"):
        begin(tmp_path / "mine")


def test_an_unfinished_data_set_is_purged_too(folder, tmp_path):
    out = tmp_path / "my"
    with endpoint(answer) as (url, _), pytest.raises(UserError, match="budget"):
        make(out, folder, url, budget=9000)
    (out / "work" / ".pairs.jsonl.ab12cd34").write_text("what a kill left")
    (out / "forget_qa-train.parquet").write_bytes(b"not yet listed")
    assert purge(out) == [] and [path.name for path in out.iterdir()] == [MANIFEST]


def test_a_folder_that_is_not_its_own_or_of_other_settings_is_left_alone(copy, folder, tmp_path):
    other = tmp_path / "other"
    (other / WIKI_CACHE).mkdir(parents=True)
    (other / "a.txt").write_text("mine")
    with pytest.raises(UserError, match="has files in it"):
        make(other, folder, NOWHERE)
    assert [*tree(other)] == ["a.txt"]
    before = tree(copy)
    with pytest.raises(UserError, match="begun with --pairs 4, this run has 5"):
        make(copy, folder, NOWHERE, pairs=5)
    assert tree(copy) == before


@pytest.mark.parametrize(("name", "text", "line"), [
    (PLAN, "[]", "expected `object`"),
    (PLAN, '{"target": 5}', "field 'target': expected `str`"),
    (MANIFEST, '{"files": 5}', "field 'files'"),
    ("work/journal.jsonl", "5\n", "row 1: expected `object`"),
    ("work/journal.jsonl", '{"key": "a", "reply": ["b"], "usage": [1, 2]}\n', "row 1: field 'reply'"),
])  # fmt: skip
def test_files_of_its_own_that_were_tampered_with_are_one_line(copy, folder, name, text, line):
    if name.startswith("work/journal"):
        (copy / MANIFEST).unlink()
    (copy / name).write_text(text)
    with pytest.raises(UserError) as error:
        make(copy, folder, NOWHERE)
    assert line in str(error.value) and "\n" not in str(error.value) and name.split("/")[-1] in str(error.value)


def test_the_page_of_an_audit_lies_in_the_folder_and_goes_with_it(copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = elude("audit", copy, "--sample", 3)
    assert done.code == 0, done
    page = copy / "audit.html"
    assert "grams" in page.read_text() and not (tmp_path / "audit.html").exists()
    assert stat.S_IMODE(copy.stat().st_mode) == 0o700
    page.chmod(0o600)
    assert elude("audit", copy, "--sample", 3).code == 0 and stat.S_IMODE(page.stat().st_mode) == 0o600
    assert purge(copy) == []
    (copy / "audit.html").write_text("mine")
    assert "not a page of" in elude("audit", copy).err and not (copy / MARK).exists()
