"""What a set of questions is: which split is scored, where it lies, how a record of it is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

COLLAPSE = 0.5  # a model that keeps less than this share of its retain quality is lost
Subset = Literal["forget", "retain", "world"]
Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class SetSpec:
    """One set of questions (section 5.2)."""

    name: str
    split: Split  # the one that is scored
    stems: tuple[str, ...]  # file names without ending, with ``{split}`` in them; the first is the one that is written
    max_new_tokens: int = 128  # of a generated answer
    forgotten: bool = False  # whether low probability and ROUGE are good, and the truth ratio is min(R, 1/R)
    choice: bool = False  # whether the probability is the answer's share among itself and the wrong answers
    of_target: bool = True  # whether its records belong to a target


FORGET = SetSpec("forget", "train", ("forget_qa-{split}",), forgotten=True)
RETAIN = SetSpec("retain", "test", ("retain_qa-{split}",))
WORLD = SetSpec(
    "world", "test", ("world-{split}", "alpaca_gpt4_data_{split}"), max_new_tokens=512, choice=True, of_target=False
)
SETS: dict[Subset, SetSpec] = {"forget": FORGET, "retain": RETAIN, "world": WORLD}
