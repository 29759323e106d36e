"""Samples to every reported number: pure functions without a model, a harness or a clock.

Each function takes the samples of one or more tasks and returns estimates by metric; :func:`report` gives them, over
all targets and for each, as they stand in a results file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm_eval_elude.core.sets import SetSpec
from lm_eval_elude.metrics import estimates, quality
from lm_eval_elude.metrics.estimates import Estimate, Observation, mean_over_targets
from lm_eval_elude.metrics.membership import MembershipAttack, auc, membership_attack
from lm_eval_elude.results import reference
from lm_eval_elude.results.samples import MEASURES, TEXT_MEASURES, Sample

Estimates = dict[str, Estimate]
# The last only with a reference model.
TOKEN_ATTACKS = ("mia_zlib_auc", "mia_min_k_auc", "mia_min_k_plus_plus_auc", "mia_reference_auc")


def set_numbers(spec: SetSpec, samples: Sequence[Sample]) -> Estimates:
    """Means over targets of a set's measures, and the harmonic mean of the three that make its quality."""
    found = {name: _mean(samples, name) for name in (*MEASURES, *TEXT_MEASURES)}
    three = [found[name] for name in MEASURES]
    if not spec.forgotten:
        return {**found, "set_quality": estimates.harmonic(three)}
    found["forget_quality"] = quality.forget_quality(*three)
    if reference.referenced(samples):
        other = set_numbers(spec, reference.of_reference(samples))
        found |= {f"{name}_gap": estimates.difference(found[name], other[name]) for name in reference.GAPS}
        found["ks_p_value"] = reference.ks_p_value(samples)
        if all("reference_divergence" in sample.values for sample in samples):
            found["reference_divergence"] = reference.divergence(samples)
    return found


def quality_numbers(forget: Sequence[Sample], retain: Sequence[Sample], world: Sequence[Sample]) -> Estimates:
    """FQ and RQ: each value is averaged over targets first, then the harmonic means are formed."""
    return {
        "forget_quality": _forget_quality(forget),
        "retain_quality": quality.retain_quality(*([_mean(s, name) for name in MEASURES] for s in (retain, world))),
    }


def attack_numbers(suites: Sequence[Sequence[Sample]]) -> Estimates:
    """Mean FQ over the attack suites."""
    found = {"forget_quality": quality.attacked_forget_quality([_forget_quality(samples) for samples in suites])}
    if all(map(reference.referenced, suites)):
        found["forget_quality_gap"] = reference.attacked_gap(suites, _forget_quality)
    return found


def membership_numbers(samples: Sequence[Sample], seed: int = 0) -> Estimates:
    """The membership attacks, each made on every target by itself and averaged."""
    attacks = list(membership_attacks(samples, seed).values())
    area = estimates.average([attack.auc for attack in attacks])
    low, high = area.interval
    off = area.value - 0.5
    found = {
        "mia_accuracy": _bare(sum(a.accuracy for a in attacks) / len(attacks), area),
        "mia_accuracy_std": _bare(sum(a.accuracy_std for a in attacks) / len(attacks), area),
        "mia_auc": area,
        "mia_auc_low": _bare(low, area),
        "mia_auc_high": _bare(high, area),
        "mia_auc_distance": estimates.combine(abs(off), [area], [math.copysign(1.0, off)]),
    }
    if reference.referenced(samples):
        other = membership_numbers(reference.of_reference(samples), seed)["mia_auc"]
        found["mia_auc_gap"] = estimates.difference(area, other)
        found["privleak"] = reference.privleak(area, other)
    for name in TOKEN_ATTACKS:
        if all(name in sample.values for sample in samples):
            sides = ([_side(group, name, side) for side in (0, 1)] for group in by_target(samples).values())
            found[name] = estimates.average([auc(*pair) for pair in sides])
    return found


def membership_attacks(samples: Sequence[Sample], seed: int = 0) -> dict[str, MembershipAttack]:
    """The attack on the loss by target, with the reason where it cannot be made."""
    groups = by_target(samples).items()
    return {t: membership_attack(*(_side(group, "loss", side) for side in (0, 1)), seed=seed) for t, group in groups}


def tofu_numbers(spec: SetSpec, samples: Sequence[Sample]) -> Estimates:
    """Means of a TOFU set's measures; on the forget set the KS p-value where a retained model is known."""
    found = {name: _mean(samples, name) for name in (*MEASURES, *TEXT_MEASURES)}
    if spec.forgotten and reference.referenced(samples):
        found["ks_p_value"] = reference.ks_p_value(samples)
    return found


def utility_numbers(sets: Sequence[Sequence[Sample]]) -> Estimates:
    """TOFU's model utility: harmonic mean of probability, ROUGE-L recall and truth ratio of the sets that are kept."""
    return {"model_utility": estimates.harmonic([_mean(samples, name) for samples in sets for name in MEASURES])}


def report(
    numbers: Callable[[Mapping[str, Sequence[Sample]]], Estimates], tasks: Mapping[str, Sequence[Sample]]
) -> dict[str, dict[str, Any]]:
    """Estimates as a results file has them: over all targets and for each target, whether there is one or several.

    Args:
        numbers: from the samples of tasks to estimates by metric.
        tasks: the samples by task; those without a target (the world set) count for every target.

    Returns:
        By metric: ``value``, ``stderr``, ``n`` (samples), ``records`` (distinct ones) and ``per_target`` with the same.
    """
    whole = numbers(tasks)
    found = {metric: _row(estimate) for metric, estimate in whole.items()}
    targets = list(dict.fromkeys(s.target for samples in tasks.values() for s in samples if s.target)) or [""]
    for row in found.values():
        row["per_target"] = {}
    for target in targets:
        own = {task: [s for s in samples if s.target in (target, "")] for task, samples in tasks.items()}
        if all(own.values()):  # a --limit may leave a target without samples
            for metric, estimate in (whole if len(targets) == 1 else numbers(own)).items():
                found[metric]["per_target"][target] = _row(estimate)
    return found


def by_target(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Samples by the target they count for, in the order in which the targets first stand."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.target, []).append(sample)
    return groups


def _row(estimate: Estimate) -> dict[str, Any]:
    return {"value": estimate.value, "stderr": estimate.stderr, "n": estimate.n, "records": estimate.records}


def _mean(samples: Sequence[Sample], name: str) -> Estimate:
    return mean_over_targets(Observation(s.target, s.record, s.values[name]) for s in samples)


def _forget_quality(samples: Sequence[Sample]) -> Estimate:
    return quality.forget_quality(*(_mean(samples, name) for name in MEASURES))


def _side(samples: Sequence[Sample], name: str, side: int) -> list[tuple[str, float]]:
    return [(s.record, s.values[name][side]) for s in samples]


def _bare(value: float, like: Estimate) -> Estimate:
    """A value whose error is not formed, about the records of another."""
    return Estimate(value, dict.fromkeys(like.influence, math.nan), like.n)
