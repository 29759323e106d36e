"""One run of the bundled model on a few records, shared by the tests of submissions."""

import pytest

from tests.board import runs


@pytest.fixture(scope="package")
def data(tmp_path_factory):
    return runs.data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="package")
def original(tmp_path_factory, data):
    return runs.finished(tmp_path_factory.mktemp("original"), runs.TINY, data)


@pytest.fixture(scope="package")
def submitted(tmp_path_factory, original):
    return runs.submission(tmp_path_factory.mktemp("submissions") / "original", original)


@pytest.fixture(scope="package")
def candidate(tmp_path_factory, original):
    """The original model handed in as one that forgot, without the manifest that says what it is."""
    folder = runs.submission(tmp_path_factory.mktemp("submissions") / "candidate", original, role="submission")
    (folder / "optout.json").unlink()
    with runs.changed(folder / "submission.json") as table:
        del table["files"]["optout.json"]
    return folder


@pytest.fixture(scope="package")
def never_knew(tmp_path_factory, data, original):
    """A run that the original's was the reference of."""
    return runs.finished(tmp_path_factory.mktemp("retrained"), runs.WITHOUT, data, reference=str(original.path))


@pytest.fixture(scope="package")
def forgot(tmp_path_factory, data):
    """A run of a model most of the way to the one that never knew."""
    folder = tmp_path_factory.mktemp("forgot")
    return runs.finished(folder / "run", runs.mixed(folder / "model", 0.9), data)


@pytest.fixture(scope="package")
def retrained(tmp_path_factory, never_knew):
    about = {"model": "retrained", "role": "retrained", "method": "edited"}
    return runs.submission(tmp_path_factory.mktemp("submissions") / "retrained", never_knew, **about)
