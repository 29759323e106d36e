"""The company's documents and the data set that a good model makes of them, built once."""

from pathlib import Path

import pytest

from lm_eval_elude.curate.build import Report
from lm_eval_elude.curate.folder import MANIFEST
from tests.curate.company import answer, documents, make, tree
from tests.endpoints import endpoint


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return documents(tmp_path_factory.mktemp("company") / "documents")


@pytest.fixture(scope="session")
def built(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    out = tmp_path_factory.mktemp("built") / "my-lumo"
    with endpoint(answer) as (url, tasks):
        report = make(out, folder, url)
        before, calls = tree(out), len(tasks)
        assert make(out, folder, url) == report and tree(out) == before and len(tasks) == calls
        # Without its manifest it is not finished: it is formed anew from the journal.
        (out / MANIFEST).unlink()
        assert make(out, folder, url) == report and tree(out) == before and len(tasks) == calls
    return out, report
