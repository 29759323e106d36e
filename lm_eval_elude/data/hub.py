"""Files of the Hub's data repositories and of pinned addresses, from the cache where the network cannot be reached."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from lm_eval_elude.errors import UserError, reason


class HubData(NamedTuple):
    """A data set on the Hub."""

    source: str  # how a user names it, alone or as ``SOURCE@REVISION``
    published: str  # the repository
    always: str  # a file that every copy of it has
    variable: str  # environment variable that names another repository, or a folder laid out alike
    instead: str  # what to give where the Hub cannot be reached

    @property
    def repository(self) -> str:
        """The repository, or the folder that stands in for it."""
        return os.environ.get(self.variable) or self.published

    def revision(self, source: str) -> str | None:
        """What a source asks of this data set: "" for its newest state; None for another source."""
        name, at, revision = source.partition("@")
        return None if name != self.source or (at and not revision) else revision

    def describe(self, source: str) -> dict[str, str]:
        """Where the rows of a source come from: ``dataset``; of the Hub's data also ``repository`` and ``revision``.

        The revision is the commit that is read; a folder that stands in for the repository has none. UserError where
        the Hub cannot be reached and nothing of it is in the cache.
        """
        if (revision := self.revision(source)) is None:
            return {"dataset": source}
        commit = {} if os.path.isdir(self.repository) else {"revision": _commit(self, self.repository, revision)}
        return {"dataset": source, "repository": self.repository, **commit}

    def file(self, name: str, revision: str) -> Path:
        """A file of the repository at a branch, tag or commit, "" for the newest state; errors as of describe()."""
        return _file(self, self.repository, name, _commit(self, self.repository, revision))


def download(address: str, data: HubData) -> Path:
    """The file of a data set at a pinned address, which is downloaded once; UserError where it cannot be had."""
    import datasets

    config = datasets.DownloadConfig(use_etag=False, disable_tqdm=not sys.stderr.isatty())
    with _reaching(data, address):
        return Path(datasets.DownloadManager(download_config=config).download(address))


@lru_cache(maxsize=8)
def _commit(data: HubData, repository: str, revision: str) -> str:
    """The commit that a branch or tag is at. It is asked for once, so that a run reads one state."""
    return _file(data, repository, data.always, revision).parent.name  # the cache has snapshots/COMMIT/FILE


def _file(data: HubData, repository: str, name: str, revision: str) -> Path:
    from huggingface_hub import hf_hub_download

    with _reaching(data, f"{repository}, {name}{f', {revision}' if revision else ''}"):
        return Path(hf_hub_download(repository, name, repo_type="dataset", revision=revision or None))


@contextmanager
def _reaching(data: HubData, name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of whichever library serves the address, or of the disk
        problem = f"data set {data.source!r} cannot be read ({name}: {reason(error)})"
        raise UserError(f"{problem}; give {data.instead} to stay off-line") from None
