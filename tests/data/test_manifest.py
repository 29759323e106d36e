"""``optout.json``: written last and whole, read with clear errors."""

import json

import pytest

from lm_eval_elude.data.manifest import FILE_NAME, Manifest, read_manifest, write_manifest
from lm_eval_elude.errors import UserError

MANIFEST = Manifest(
    targets=("Cristiano Ronaldo", "Lionel Messi"), dataset="mini", method="opt-out", seed=3,
    data_fingerprints={"forget-train": "ab"}, settings={"epochs": 3, "lora": None}, epochs=[{"loss": 0.5}],
)  # fmt: skip
PLAIN = '{"schema_version": 1, "targets": [], "dataset": %s}'


def test_round_trip(tmp_path):
    write_manifest(tmp_path, MANIFEST)
    assert read_manifest(tmp_path) == read_manifest(str(tmp_path)) == MANIFEST
    assert json.loads((tmp_path / FILE_NAME).read_text(encoding="utf-8"))["schema_version"] == 1


@pytest.mark.parametrize("folder", [None, "", "6rightjade/ELUDe", "no/such/folder", "x" * 5_000, "a\0b", "~nobody/x"])
def test_no_manifest_is_none(folder):
    assert read_manifest(folder) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("not json", "not valid JSON"),
        ("[]", "not an Opt-Out manifest"),
        ('{"schema_version": 2}', "schema_version 2, expected 1"),
        (PLAIN % '"mini", "colour": "red"', "field 'colour' is not known"),
        ('{"schema_version": 1, "targets": []}', "field 'dataset' is missing"),
        (PLAIN % '"mini", "epochs": [1]', "field 'epochs[0]'"),
    ],
)
def test_an_unusable_manifest_is_one_line_with_its_path(tmp_path, text, problem):
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(UserError) as error:
        read_manifest(tmp_path)
    line = str(error.value)
    assert problem in line and str(tmp_path / FILE_NAME) in line and "\n" not in line


def test_relative_paths_are_meant_from_above_the_checkpoint(tmp_path, monkeypatch):
    """The project is moved and the manifest read from another folder that has a data set of that name too."""
    project, elsewhere = tmp_path / "moved", tmp_path / "elsewhere"
    for folder in (project / "data/mine", project / "models/base", project / "runs/one", elsewhere / "data/mine"):
        folder.mkdir(parents=True)
    write_manifest(project / "runs/one", Manifest((), "data/mine", base_model={"name": "./models/base", "weights": {}}))
    monkeypatch.chdir(elsewhere)
    moved = read_manifest(project / "runs/one")
    assert moved.dataset == str(project / "data/mine")
    assert moved.base_model == {"name": str(project / "models/base"), "weights": {}}
    assert read_manifest("../moved/runs/one") == moved
    monkeypatch.chdir(project)
    assert read_manifest("runs/one").dataset == "data/mine"


@pytest.mark.parametrize(("name", "is_path"), [
    ("my-model", True), ("./my-model", True), ("mini", True), ("tiny", False), ("gpt2", False), ("", False),
])  # fmt: skip
def test_a_model_in_a_folder_named_without_a_slash_is_found_from_elsewhere(tmp_path, monkeypatch, name, is_path):
    for folder in ("my-model", "mini", "tiny", "elsewhere/gpt2", "elsewhere/run"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    write_manifest(tmp_path / "elsewhere/run", Manifest((), "mini", base_model={"name": name}))
    monkeypatch.chdir(tmp_path / "elsewhere")
    read = read_manifest("run")
    assert read.dataset == "mini" and read.base_model == {"name": str(tmp_path / name) if is_path else name}


def test_paths_are_written_in_full_and_names_as_they_are(tmp_path, monkeypatch):
    for folder in ("mine", "models/base", "hub", "mini", "run"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("hub", "mini", "hub@main", "/no/such/data", "gone/data", "mine", "./mine/"):
        written = Manifest((), name, base_model={"name": "models/base" if "mine" in name else "6rightjade/none"})
        write_manifest(tmp_path / "run", written)
        full = Manifest((), str(tmp_path / "mine"), base_model={"name": str(tmp_path / "models/base")})
        assert read_manifest(tmp_path / "run") == (full if "mine" in name else written)
