"""Every test runs off-line; the number of torch threads (``OMP_NUM_THREADS``) stays what the caller set."""

import logging
import os

import pytest

# Before any library reads them; `datasets` and `transformers` do at import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

FEW = ("board", "fuzz")  # their runs have few attack prompts


@pytest.fixture(autouse=True)
def as_a_new_process(request):
    """What one test of a process leaves behind for the others: our logger's level, the number of attack prompts."""
    logging.getLogger("lm_eval.elude").setLevel(logging.NOTSET)
    if request.node.path.parent.name not in FEW:
        from lm_eval_elude import documents

        documents.ATTACK_PROMPTS = 100
