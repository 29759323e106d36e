"""The commands that would fill the paper's tables for a model, with an estimate of the GPU hours that each takes.

The estimate scales what was measured on one core (docs/benchmarks.md): a training sample of some 80 tokens took 4.7 ns
a parameter (growth: 112 ns for a step of 24), a scored question with its answers and generation 6.0 ns (9.8 s for the
group's 28 questions, 58.1 M parameters), a utility answer 0.94 ns; each grows linearly with parameters. 80 tokens at 6
operations a parameter in 4.7 ns are 0.1 TFLOP/s, and a GPU is as many times faster as it sustains TFLOP/s more. Start
and loading are not counted, and generation waits for a GPU's memory: an order of magnitude, not a promise.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

CORE = 0.1  # TFLOP/s
TRAINED, SCORED, ANSWERED = 4 / 3 * 4.7e-9, 6.0e-9, 0.94e-9  # core seconds a parameter; activations are made twice
FORGET, RETAIN, WORLD, PROMPTS = 783, 455, 1000, 900  # of a target on average, and its attacks
ELUDE = SCORED * (3 * FORGET + RETAIN + WORLD + PROMPTS)  # the forget set plainly, for membership and as control
UTILITY = ANSWERED * 120_000
EPOCHS, TAUGHT = 3, 5  # of unlearning, and of fine-tuning on TOFU
ALONE = ("ga", "dpo", "npo", "idk")
RT = ("ga+rt", "dpo+rt", "npo+rt", "idk+rt", "opt-out")
DISTANCES = tuple(f"opt-out-{name}" for name in ("manhattan", "euclidean", "chebyshev", "cosine"))


class Command(NamedTuple):
    """A command line and the core seconds a parameter that it is estimated at."""

    line: str
    work: float

    def hours(self, parameters: float, tflops: float) -> float:
        """On a GPU that sustains so much."""
        return self.work * parameters * CORE / tflops / 3600


def parameters(name: str) -> float:
    """How many a model's name says that it has (``-8B-``, ``270m``), 0 where it says nothing."""
    found = re.search(r"(?<![a-zA-Z0-9.])(\d+(?:\.\d+)?)([bBmM])(?![a-zA-Z0-9])", name)
    return float(found[1]) * (1e9 if found[2] in "bB" else 1e6) if found else 0.0


def plan(model: str, targets: Sequence[str], out: str = "runs/paper") -> Iterator[Command]:
    """Every training and scoring behind the tables, in an order in which they can be run.

    Args:
        model: folder or Hub id of the model to unlearn.
        targets: slugs; the paper averages over five.
        out: folder for checkpoints and results.
    """

    def score(folder: str, name: str, task: str, work: float, **told: Any) -> Command:
        said = f" --metadata {shlex.quote(json.dumps(told))}" if told else ""
        model_args = shlex.quote(f"pretrained={folder},dtype=bfloat16")
        where = f"--output_path {out}/scores/{name} --log_samples"
        return Command(f"lm_eval run --model elude --model_args {model_args} --tasks {task}{said} {where}", work)

    def train(name: str, flags: str, samples: int, start: str = model) -> Command:
        kept = "--dtype bfloat16 --gradient-checkpointing --no-score --output-dir"
        line = f"optout-train --model {shlex.quote(start)} {flags} {kept} {out}/{name}"
        return Command(line, TRAINED * samples)

    yield score(model, "original-utility", "elude_utility", UTILITY)
    for target in targets:
        yield score(model, f"{target}-original", "elude", ELUDE, target=target)
        yield score(model, f"{target}-guardrail", "elude", ELUDE, target=target, guardrail=True)
        for method, flag in [*((m, "") for m in (*ALONE, *RT, *DISTANCES)), *((m, " --world-only") for m in RT)]:
            name, sets = (
                f"{target}-{method}{flag.strip().strip('-') and '-world'}",
                1 if method in ALONE else 2 + (not flag),
            )
            yield train(name, f"--target {target} --method {method}{flag}", EPOCHS * sets * FORGET)
            yield score(f"{out}/{name}", name, "elude", ELUDE)
            yield score(f"{out}/{name}", f"{name}-utility", "elude_utility", UTILITY)
    split = "--forget-split forget05 --tofu-evaluator open-unlearning"
    yield train("start", f"{split} --method finetune --epochs {TAUGHT}", TAUGHT * 4000)
    yield train("retained", f"{split} --method finetune --learn retain --epochs {TAUGHT}", TAUGHT * 3800)
    tofu = SCORED * (200 + 400 + 100 + 117)
    yield score(f"{out}/retained", "tofu-retained", "tofu", tofu)
    for method in RT:
        yield train(f"tofu-{method}", f"{split} --method {method}", EPOCHS * 2 * 200, f"{out}/start")
        yield score(f"{out}/tofu-{method}", f"tofu-{method}", "tofu", tofu, reference=f"{out}/scores/tofu-retained")
    yield Command(f"elude tables {out}/scores --out {out}/tables", 0.0)
