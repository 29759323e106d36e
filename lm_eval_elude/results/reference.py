"""How far a model is from one that never knew: distances to a reference, paired by record, from logged samples.

A sample's ``reference`` is what the reference says of the same document, measured alike. The two-sample
Kolmogorov-Smirnov p-value on the truth ratios is TOFU's forget quality (Maini et al. 2024), PrivLeak is MUSE's (Shi et
al. 2024), with the AUC of the same attack on both models. Gaps are this model's value less the reference's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from lm_eval_elude.metrics.estimates import (
    Estimate,
    Observation,
    average,
    combine,
    difference,
    exact,
    mean_over_targets,
)
from lm_eval_elude.results.samples import Sample

GAPS = ("forget_quality", "probability", "rougeL_recall")


def is_distance(metric: str) -> bool:
    """Whether a number (or its error) says how far a reference is."""
    name = metric.removesuffix("_stderr")
    return name.endswith("_gap") or name in ("ks_p_value", "privleak", "reference_divergence")


def beside(samples: Sequence[Sample], other: Sequence[Sample]) -> list[Sample] | None:
    """Samples with what the reference's, of the same documents, say; None where it was asked something else."""
    if [s[:3] for s in samples] != [s[:3] for s in other]:
        return None
    return [s._replace(values={**s.values, "reference": o.values}) for s, o in zip(samples, other, strict=True)]


def referenced(samples: Sequence[Sample]) -> bool:
    """Whether every sample says what a reference says."""
    return bool(samples) and all("reference" in sample.values for sample in samples)


def of_reference(samples: Sequence[Sample]) -> list[Sample]:
    """The same samples as the reference model's."""
    return [sample._replace(values=sample.values["reference"]) for sample in samples]


def ks_p_value(samples: Sequence[Sample]) -> Estimate:
    """p-value of the two-sample KS test on R of this model and of the reference, averaged over targets."""
    from scipy.stats import ks_2samp

    by_target: dict[str, tuple[list[float], list[float]]] = {}
    for sample in samples:
        own, other = by_target.setdefault(sample.target, ([], []))
        own.append(sample.values["truth_ratio_raw"])
        other.append(sample.values["reference"]["truth_ratio_raw"])
    return exact(fmean(float(ks_2samp(*sides).pvalue) for sides in by_target.values()))._replace(n=len(samples))


def divergence(samples: Sequence[Sample]) -> Estimate:
    """Symmetric divergence in nats per token on each other's answers, averaged over targets.

    Half the mean of log p - log p_ref on this model's answers plus half that of log p_ref - log p on the reference's.
    """
    return mean_over_targets(Observation(s.target, s.record, s.values["reference_divergence"]) for s in samples)


def privleak(own: Estimate, other: Estimate) -> Estimate:
    """(AUC - AUC_ref) / AUC_ref, paired by record; 0 where membership leaks as it does without training."""
    value = (own.value - other.value) / other.value if other.value else float("nan")
    slope = 1 / other.value if other.value else float("nan")
    return combine(value, [own, other], [slope, -own.value * slope**2])._replace(n=own.n)


def attacked_gap(suites: Sequence[Sequence[Sample]], quality: Callable[[Sequence[Sample]], Estimate]) -> Estimate:
    """Mean over the attack suites of the gap in FQ."""
    return average([difference(quality(own), quality(of_reference(own))) for own in suites])
