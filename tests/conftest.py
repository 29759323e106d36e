"""Every test runs off-line; the number of torch threads (``OMP_NUM_THREADS``) stays what the caller set."""

import os
from functools import lru_cache

import pytest

# Before any library reads them; `datasets` and `transformers` do at import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Folders with the files that take longest: they come first, so that two processes end together.
_LONG = ("e2e", "train", "build", "leaderboard", "stress", "model", "tests")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: _LONG.index(name) if (name := item.path.parent.name) in _LONG else len(_LONG))


@pytest.fixture(scope="session", autouse=True)
def one_look_at_the_machine():
    """What the harness writes of the machine in each run: asking a dozen programs once is enough."""
    from torch.utils import collect_env

    collect_env.get_pretty_env_info = lru_cache(collect_env.get_pretty_env_info)
