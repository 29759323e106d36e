"""Files of the Hub's data repositories and of pinned addresses, from the cache where the network cannot be reached."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
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
        """The repository, or the folder that is read in its place."""
        return os.environ.get(self.variable) or self.published

    def revision(self, source: str) -> str | None:
        """What a source asks of this data set: "" for its newest state; None for another source."""
        name, at, revision = source.partition("@")
        return None if name != self.source or (at and not revision) else revision

    def describe(self, source: str) -> dict[str, str]:
        """Where the rows of a source come from: ``dataset``; of the Hub's data also ``repository`` and ``revision``.

        The revision is the commit that is read; a folder that is read in its place has none. UserError where the Hub
        cannot be reached and nothing of it is in the cache.
        """
        if (revision := self.revision(source)) is None:
            return {"dataset": source}
        is_folder = os.path.isdir(self.repository)
        commit = {} if is_folder else {"revision": self.file(self.always, revision).parent.name}  # snapshots/COMMIT/
        return {"dataset": source, "repository": self.repository, **commit}

    def file(self, name: str, revision: str) -> Path:
        """A file of the repository at a branch, tag or commit, "" for the newest state; errors as of describe()."""
        if os.path.isdir(self.repository):
            return Path(self.repository) / name
        from huggingface_hub import hf_hub_download

        asked = f"{self.repository}, {name}{f', {revision}' if revision else ''}"
        return self._get(
            lambda: hf_hub_download(self.repository, name, repo_type="dataset", revision=revision or None), asked
        )

    def download(self, address: str) -> Path:
        """The file at a pinned address that belongs to this data set, which is downloaded once; errors likewise."""
        import datasets

        config = datasets.DownloadConfig(use_etag=False, disable_tqdm=not sys.stderr.isatty())
        return self._get(lambda: datasets.DownloadManager(download_config=config).download(address), address)

    def _get(self, fetch: Callable[[], str], name: str) -> Path:
        try:
            return Path(fetch())
        except Exception as error:  # of whichever library serves the address, or of the disk
            problem = f"data set {self.source!r} cannot be read ({name}: {reason(error)})"
            raise UserError(f"{problem}; give {self.instead} to stay off-line") from None
