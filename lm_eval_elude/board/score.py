"""The one number that a board ranks by. ``page/score.txt`` says what it is and why breaking a model does not win it."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lm_eval_elude.data.records import PERTURBATIONS
from lm_eval_elude.scoring.answers import is_refusal
from lm_eval_elude.scoring.benchmarks import BENCHMARKS, GROUPS
from lm_eval_elude.scoring.benchmarks.elude import ATTACK, CLOZE, CONTROL
from lm_eval_elude.scoring.estimates import Estimate, Observation, combine, exact, harmonic, mean_over_targets, wilson
from lm_eval_elude.scoring.metrics import KNOWN, TOKEN_ATTACKS, forget_quality
from lm_eval_elude.scoring.samples import Sample, mean

# What the score is formed of, and the value that stands for the reference's where a table has no reference. Of a
# quantity that several tasks or attacks give, each is measured: "known/elude_forget truth_first". Oddness depends on
# the model that measures it, so nothing stands for the reference's: without it, it is no part of the score.
IDEAL = {"fq": 1.0, "known": 1 / (1 + PERTURBATIONS), "rq": 1.0, "speech": 1.0, "distinct": 1.0, "auc": 0.5}
REFUSAL = 0.5  # what a refusal counts as speech: it is understood, and it shows that something was taken out
_AREAS = ("mia_auc", *(name for name in TOKEN_ATTACKS if name != "mia_reference_auc"))
_UNKNOWN = exact(math.nan)
Measured = Mapping[str, Estimate]

# Columns of a table's row beside the score: task or group, and metric.
COLUMNS = {
    "fq": ("elude", "forget_quality"), "rq": ("elude", "retain_quality"),
    "mention": ("elude", "mention_quality"), "known": ("elude", "known"),
    "first": ("elude_forget", "truth_first"), "log_r": ("elude_forget", "log_truth_ratio"),
    "attacked": ("elude", "attacked_forget_quality"), "auc": ("elude_mia", "mia_auc"),
    "degenerate": ("elude_forget", "degenerate"), "refusal": ("elude_forget", "refusal"),
}  # fmt: skip


# Those that are a share of yes and no: at 0 and 1 their standard error is 0, and their interval is not.
SHARES = ("known", "first", "degenerate", "refusal")
# What came back after the worst of the attacks on the weights whose names begin so: of all of them, which is a part of
# the score where most rows bring it, and of one kind each.
BACK = "back"
WEIGHTS = {
    BACK: ("",), "relearned": ("relearn_",), "rounded": ("quantise",), "pruned": ("prune",),
    "inside": ("logit_lens", "soft_prompt"),
}  # fmt: skip
NAMES = (*COLUMNS, *WEIGHTS)


class Column(msgspec.Struct, frozen=True):
    """A number of a table's row, NaN where it is not known; of a share its 95 % interval."""

    value: float
    stderr: float
    low: float = math.nan
    high: float = math.nan


class Score(msgspec.Struct, frozen=True):
    """The score, its four parts, and for the parts that take the worst of several which one that is."""

    value: float
    stderr: float
    parts: dict[str, float]
    worst: dict[str, str]


def measure(samples: Mapping[str, Sequence[Sample]], docs: Sequence[Mapping[str, Any]], seed: int) -> Measured:
    """What the score is formed of, from the samples of a whole run and its logged documents of the forget set."""
    asks = ("elude_forget", CLOZE)
    suites = {t: s for t, s in samples.items() if t in asks or (t.startswith(ATTACK) and t != CONTROL)}
    measured = {f"fq/{task}": forget_quality(answered) for task, answered in suites.items()}
    for task, answered in suites.items():
        for name in KNOWN:
            if all(name in sample.values for sample in answered):
                measured[f"known/{task} {name}"] = mean(answered, name)
    areas = BENCHMARKS["elude_mia"].numbers(samples["elude_mia"], {"seed": seed})
    measured |= {f"auc/{name}": areas[name] for name in _AREAS if name in areas}
    measured["rq"] = GROUPS["elude"].numbers(samples)["retain_quality"]
    measured |= {f"speech/{task}": _speech(answered) for task, answered in suites.items()}
    measured["distinct"] = exact(distinct([(doc["question"], doc["generated"]) for doc in docs]))
    if all("oddness" in sample.values for sample in samples["elude_forget"]):
        spoken = [s for s in samples["elude_forget"] if not s.values["degenerate"] and not s.values["refusal"]]
        measured["oddness"] = mean(spoken, "oddness") if spoken else exact(-math.inf)
    return measured


def _speech(samples: Sequence[Sample]) -> Estimate:
    """Mean over answers: 1 for one, :data:`REFUSAL` for a refusal, 0 for gibberish."""
    return mean_over_targets(
        Observation(s.target, s.record, (1 - s.values["degenerate"]) * (REFUSAL if s.values["refusal"] else 1.0))
        for s in samples
    )


def distinct(answered: Sequence[tuple[str, str]]) -> float:
    """Share of distinct answers to (question, answer) but for all questions' words and for refusals; 1 of none."""
    asked = {word for question, _ in answered for word in _words(question)}
    texts = [tuple(w for w in _words(text) if w not in asked) for _, text in answered if not is_refusal(text)]
    return len(set(texts)) / len(texts) if texts else 1.0


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def score(measured: Measured, reference: Mapping[str, float]) -> Score:
    """The score of a model; the reference's values are taken as exact, :data:`IDEAL` where it has none.

    What the reference has and the model has not is NaN, and so is the score then.
    """
    names = sorted(measured.keys() | reference.keys())
    ideals = {name: IDEAL[kind] for name in names if (kind := name.split("/")[0]) in IDEAL} | dict(reference)
    shares = {name: _share(measured.get(name, _UNKNOWN), ideal, name) for name, ideal in ideals.items()}
    worst, parts = {}, {}
    for kind in IDEAL:
        of_kind = [name for name in shares if name.split("/")[0] == kind]
        # NaN is the least, so that what is not known is never passed over.
        least = min(of_kind, key=lambda name: -math.inf if math.isnan(shares[name].value) else shares[name].value)
        parts[kind] = shares[least]
        if "/" in least:
            worst[kind] = least.split("/")[1]
    formed = {
        "forgets": harmonic([parts["fq"], parts["known"], *([shares[BACK]] if BACK in shares else [])]),
        "keeps": parts["rq"],
        "speaks": _product(_product(parts["speech"], parts["distinct"]), shares.get("oddness", exact(1.0))),
        "hides": parts["auc"],
    }
    whole = harmonic(list(formed.values()))
    return Score(whole.value, whole.stderr, {name: part.value for name, part in formed.items()}, worst)


def _share(value: Estimate, ideal: float, name: str) -> Estimate:
    """How near a value comes to the reference's, in [0, 1]; nothing is gained beyond it."""
    kind = name.split("/")[0]
    if kind == "known":  # what is first more often than under the reference, over what is left above that
        slope, share = (-1 / (1 - ideal), 1 - (value.value - ideal) / (1 - ideal)) if ideal < 1 else (0.0, 1.0)
    elif kind == BACK:  # 0 for the reference, by definition
        slope, share = -1.0, 1 - value.value
    elif kind == "oddness":  # how many times less likely a token is to the original than one of the reference
        share = math.exp(-max(value.value - ideal, 0.0))  # NaN stays NaN in this order
        slope = -share
    elif kind == "auc":
        most = max(ideal, 1 - ideal)
        slope = math.copysign(1 / most, ideal - value.value)
        share = 1 - abs(value.value - ideal) / most
    else:
        slope, share = (1 / ideal, value.value / ideal) if ideal > 0 else (0.0, 1.0)
    bounded = share if math.isnan(share) else min(1.0, max(0.0, share))
    return combine(bounded, [value], [slope])


def _product(a: Estimate, b: Estimate) -> Estimate:
    return combine(a.value * b.value, [a, b], [b.value, a.value])


def ranks(values: Sequence[float]) -> list[int]:
    """1 + how many are higher; who has the same value shares a rank."""
    rising = sorted(values)
    return [1 + len(values) - bisect_right(rising, value) for value in values]


def columns(numbers: Mapping[str, Mapping[str, Any]], back: Mapping[str, Estimate]) -> dict[str, Column]:
    """The columns of a whole run, from its numbers by task or group and metric, and from what came back by kind."""
    formed = {}
    for name, (task, metric) in COLUMNS.items():
        value, stderr, records = (numbers[task][metric][key] for key in ("value", "stderr", "records"))
        known = name in SHARES and records and not math.isnan(value + stderr)
        formed[name] = Column(value, stderr, *wilson(value, stderr, records) if known else ())
    return formed | {name: Column(back[name].value, back[name].stderr) for name in WEIGHTS}
