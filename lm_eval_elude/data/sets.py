"""What a set of questions is: which split is scored, where it lies, how a record of it is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

COLLAPSE = 0.5  # a model that keeps less than this share of its retain quality is lost
Subset = Literal["forget", "retain", "world"]
Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class SetSpec:
    """One set of questions (section 5.2).

    Attributes:
        name, split: what the set is called, and which split is scored.
        stems: file names without ending, first the one that is written, with ``{split}`` in them.
        max_new_tokens: of a generated answer.
        forgotten: whether low probability and ROUGE are good, and the truth ratio is min(R, 1/R), not max(0, 1 - R).
        choice: whether the probability is the answer's share among itself and the wrong answers.
        of_target: whether its records belong to a target.
    """

    name: str
    split: Split
    stems: tuple[str, ...]
    max_new_tokens: int = 128
    forgotten: bool = False
    choice: bool = False
    of_target: bool = True


FORGET = SetSpec("forget", "train", ("forget_qa-{split}",), forgotten=True)
RETAIN = SetSpec("retain", "test", ("retain_qa-{split}",))
WORLD = SetSpec(
    "world", "test", ("world-{split}", "alpaca_gpt4_data_{split}"), max_new_tokens=512, choice=True, of_target=False
)
SETS: dict[Subset, SetSpec] = {"forget": FORGET, "retain": RETAIN, "world": WORLD}
