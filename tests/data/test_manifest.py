"""``optout.json``: written with full paths, read with clear errors."""

import pytest

from lm_eval_elude.data.manifest import FILE_NAME, Manifest, read_manifest, write_manifest
from lm_eval_elude.errors import UserError

MANIFEST = Manifest(
    targets=("Cristiano Ronaldo", "Lionel Messi"), dataset="mini", method="opt-out", seed=3,
    data_fingerprints={"forget-train": "ab"}, settings={"epochs": 3, "lora": None}, epochs=[{"loss": 0.5}],
)  # fmt: skip


def test_round_trip_and_what_is_no_checkpoint(tmp_path):
    assert [read_manifest(folder) for folder in (None, "", "6rightjade/ELUDe", tmp_path)] == [None] * 4
    write_manifest(tmp_path, MANIFEST)
    assert read_manifest(tmp_path) == read_manifest(str(tmp_path)) == MANIFEST


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("not json", "not valid JSON"),
        ('{"schema_version": 2, "targets": [], "dataset": "mini"}', "schema_version 2, expected 1"),
        ('{"schema_version": 1, "targets": []}', "field 'dataset' is missing"),
        ('{"schema_version": 1, "targets": [], "dataset": "mini", "epochs": [1]}', "field 'epochs[0]'"),
    ],
)
def test_an_unusable_manifest_is_one_line_with_its_path(tmp_path, text, problem):
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(UserError) as error:
        read_manifest(tmp_path)
    line = str(error.value)
    assert problem in line and str(tmp_path / FILE_NAME) in line and "\n" not in line


def test_paths_are_written_in_full_and_names_as_they_are(tmp_path, monkeypatch):
    for folder in ("mine", "models/base", "hub", "mini", "run"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("hub", "mini", "hub@main", "/no/such/data", "gone/data", "mine", "./mine/"):
        written = Manifest((), name, base_model={"name": "models/base" if "mine" in name else "6rightjade/none"})
        write_manifest(tmp_path / "run", written)
        full = Manifest((), str(tmp_path / "mine"), base_model={"name": str(tmp_path / "models/base")})
        assert read_manifest(tmp_path / "run") == (full if "mine" in name else written)
