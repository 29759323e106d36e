"""Folders that are filled, and weights that are known again."""

import hashlib

import pytest

from lm_eval_elude.data.files import file_hashes, new_folder
from lm_eval_elude.errors import UserError


def test_a_folder_appears_whole_or_not_at_all_and_takes_nobodys_place(tmp_path):
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "out") as staged:
        (staged / "half").write_text("x")
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UserError, match=r"--out .*out: exists already"), new_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out").read_text() == "mine"


def test_weight_hashes_are_sha256_by_name(tmp_path):
    for name, content in (("b.safetensors", b"two"), ("a.safetensors", b"one"), ("notes.txt", b"no weights")):
        (tmp_path / name).write_bytes(content)
    expected = {f"{n}.safetensors": hashlib.sha256(t).hexdigest() for n, t in (("a", b"one"), ("b", b"two"))}
    assert file_hashes(tmp_path) == expected and list(file_hashes(tmp_path)) == list(expected)
