"""Thousands of mutated inputs end in the right result or in a documented error (``make fuzz``: a hundred thousand)."""

import os
import shutil

import pytest

from tests.fuzz.cases import KINDS, run

pytestmark = pytest.mark.usefixtures("plots_drawn_once")
CASES = int(os.environ.get("FUZZ_CASES", "2000"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
PARTS = 5  # of each kind, so that processes can share them


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_input_gives_the_right_result_or_a_documented_error(kind, part, tmp_path, monkeypatch):
    for name in ("ELUDE_TARGET", "ELUDE_DATASET"):
        monkeypatch.delenv(name, raising=False)
    count = -(-CASES // (len(KINDS) * PARTS))
    first = SEED + part * count
    taken = 0
    for seed in range(first, first + count):
        folder = tmp_path / "case"
        folder.mkdir()
        try:
            taken += run(kind, seed, folder)
        except Exception as error:
            raise AssertionError(f"{kind} case {seed}: {type(error).__name__}: {str(error)[:2000]}") from error
        shutil.rmtree(folder)
    assert 0 < taken < count, "a generator whose cases all end alike finds nothing"
