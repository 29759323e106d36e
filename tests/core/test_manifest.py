"""``optout.json``: written last and whole, read with clear errors."""

import hashlib
import json
import os

import pytest

from lm_eval_elude.core.manifest import (
    FILE_NAME,
    Manifest,
    ManifestError,
    file_hashes,
    read_manifest,
    write_atomically,
    write_manifest,
)

MANIFEST = Manifest(
    targets=("Cristiano Ronaldo", "Lionel Messi"), dataset="mini", method="opt-out", seed=3,
    data_fingerprints={"forget-train": "ab"}, settings={"epochs": 3, "lora": None}, epochs=[{"loss": 0.5}],
)  # fmt: skip


def test_round_trip(tmp_path):
    write_manifest(tmp_path, MANIFEST)
    assert read_manifest(tmp_path) == read_manifest(str(tmp_path)) == MANIFEST
    assert os.stat(tmp_path / FILE_NAME).st_mode & 0o777 == 0o644


@pytest.mark.parametrize("folder", [None, "", "6rightjade/ELUDe", "no/such/folder"])
def test_no_manifest_is_none(folder):
    assert read_manifest(folder) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not json", "not an Opt-Out manifest"),
        ("[]", "not an Opt-Out manifest"),
        ("{}", "not an Opt-Out manifest"),
        ('{"schema_version": 2}', "schema_version 2, expected 1"),
        ('{"schema_version": 1, "targets": [], "dataset": "mini", "colour": "red"}', "colour"),
        ('{"schema_version": 1, "targets": "Lionel Messi", "dataset": "mini"}', "targets"),
    ],
)
def test_an_unusable_manifest_is_one_line_with_its_path(tmp_path, text, said):
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(ManifestError) as error:
        read_manifest(tmp_path)
    assert said in str(error.value) and str(tmp_path / FILE_NAME) in str(error.value) and "\n" not in str(error.value)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    write_manifest(tmp_path, MANIFEST)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / FILE_NAME, "{}")
    assert read_manifest(tmp_path) == MANIFEST and os.listdir(tmp_path) == [FILE_NAME]


def test_weight_hashes_are_sha256_by_name(tmp_path):
    (tmp_path / "b.safetensors").write_bytes(b"two")
    (tmp_path / "a.safetensors").write_bytes(b"one")
    (tmp_path / "notes.txt").write_bytes(b"no weights")
    expected = {f"{n}.safetensors": hashlib.sha256(t).hexdigest() for n, t in (("a", b"one"), ("b", b"two"))}
    assert file_hashes(tmp_path) == expected and list(file_hashes(tmp_path)) == list(expected)


def test_the_file_is_plain_json_that_a_person_can_read(tmp_path):
    write_manifest(tmp_path, MANIFEST)
    fields = json.loads((tmp_path / FILE_NAME).read_text(encoding="utf-8"))
    assert fields["targets"] == ["Cristiano Ronaldo", "Lionel Messi"] and fields["schema_version"] == 1
