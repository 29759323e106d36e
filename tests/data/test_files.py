"""Files and folders are written whole or not at all, where the user said, with the rights that the user chose."""

import hashlib
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lm_eval_elude.data.files import file_hashes, new_folder, write_bytes, write_text
from lm_eval_elude.errors import UserError


def mode(path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_a_new_file_and_folder_have_what_the_umask_allows_and_an_old_file_keeps_its_mode(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a.html", "private")
        with new_folder(tmp_path / "folder") as staged:
            write_text(staged / "within" / "b.txt", "b")
            (staged / "weights").touch(0o600)  # as safetensors writes them
        names = ("a.html", "folder", "folder/within", "folder/within/b.txt", "folder/weights")
        assert [mode(tmp_path / name) for name in names] == [0o640, 0o750, 0o750, 0o640, 0o640]
        for rights in (0o600, 0o644, 0o664):
            (tmp_path / "a.html").chmod(rights)
            write_text(tmp_path / "a.html", "new")
            assert (tmp_path / "a.html").read_text() == "new" and mode(tmp_path / "a.html") == rights
    finally:
        os.umask(before)


def test_a_link_stays_a_link_and_its_file_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to("there/real.json")
    for text in ("first", "second"):
        write_text(link, text)
        assert link.is_symlink() and (tmp_path / "there/real.json").read_text() == text


def test_a_device_a_pipe_and_standard_output_are_written_into_and_stay_what_they_are(tmp_path):
    before = os.stat(os.devnull)
    write_bytes(Path(os.devnull), b"gone")
    after = os.stat(os.devnull)
    assert stat.S_ISCHR(after.st_mode) and (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_text(pipe, "through")
    reader.join(10)
    assert read == [b"through"] and stat.S_ISFIFO(os.stat(pipe).st_mode) and os.listdir(tmp_path) == ["pipe"]
    code = "from pathlib import Path; import lm_eval_elude.data.files as f; f.write_text(Path('/dev/stdout'), 'a,b')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"a,b"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'a'}'$"):
        write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old" and os.listdir(tmp_path) == ["a"]


def test_a_folder_appears_whole_or_not_at_all_and_takes_nobodys_place(tmp_path):
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "out") as staged:
        (staged / "half").write_text("x")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UserError, match=r"--out .*out: exists already"), new_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out").read_text() == "mine"


def test_weight_hashes_are_sha256_by_name(tmp_path):
    for name, content in (("b.safetensors", b"two"), ("a.safetensors", b"one"), ("notes.txt", b"no weights")):
        (tmp_path / name).write_bytes(content)
    expected = {f"{n}.safetensors": hashlib.sha256(t).hexdigest() for n, t in (("a", b"one"), ("b", b"two"))}
    assert file_hashes(tmp_path) == expected and list(file_hashes(tmp_path)) == list(expected)
