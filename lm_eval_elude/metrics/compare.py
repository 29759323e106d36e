"""Two runs compared, paired by record: gaps, Kolmogorov-Smirnov, McNemar, PrivLeak, and recovery after an attack."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from statistics import fmean

from lm_eval_elude.metrics.estimates import Estimate, combine, complement, difference
from lm_eval_elude.metrics.samples import Numbers, Sample, numbers

COMPARED = ("forget_quality", "probability", "rougeL_recall", "mc_accuracy", "mia_auc")


def distances(ours: Sequence[Sample], theirs: Sequence[Sample], seed: int = 0) -> Numbers:
    """Every number of two runs of one task: how far ``ours`` is from ``theirs``, most often the retrained model's.

    ``ValueError`` where the two were not asked the same.
    """
    if [s[:3] for s in ours] != [s[:3] for s in theirs]:
        raise ValueError("the two runs were asked different questions")
    here, there = numbers(ours, COMPARED, seed), numbers(theirs, COMPARED, seed)
    found = {f"{name}_gap": difference(here[name], there[name]) for name in COMPARED if name in here and name in there}
    if "log_truth_ratio" in ours[0].values and "log_truth_ratio" in theirs[0].values:
        found["ks_p_value"] = Estimate(ks_p_value(ours, theirs), {}, len(ours))
        found["mcnemar_p"] = Estimate(mcnemar_p(ours, theirs), {}, len(ours))
    if "mia_auc" in here and "mia_auc" in there:
        found["privleak"] = privleak(here["mia_auc"], there["mia_auc"])
    return found


def _by_record(samples: Sequence[Sample], name: str) -> dict[tuple[str, str], float]:
    """The mean of a value for each record of a target: several prompts about one record are one draw."""
    values: dict[tuple[str, str], list[float]] = {}
    for sample in samples:
        values.setdefault((sample.target, sample.record), []).append(sample.values[name])
    return {record: fmean(of_record) for record, of_record in values.items()}


def ks_p_value(ours: Sequence[Sample], theirs: Sequence[Sample]) -> float:
    """p-value of the two-sample KS test on the truth ratios R of two runs, all targets' records together."""
    from scipy.stats import ks_2samp

    def ratios(samples: Sequence[Sample]) -> list[float]:
        raw = [s._replace(values={"R": math.exp(min(s.values["log_truth_ratio"], 700.0))}) for s in samples]
        return [*_by_record(raw, "R").values()] if any(s.target for s in raw) else [s.values["R"] for s in raw]

    with warnings.catch_warnings():  # of many draws it says that it takes the asymptotic p-value
        warnings.filterwarnings("ignore", "ks_2samp", RuntimeWarning)
        return float(ks_2samp(ratios(ours), ratios(theirs)).pvalue)


def mcnemar_p(ours: Sequence[Sample], theirs: Sequence[Sample], name: str = "mc_accuracy") -> float:
    """Exact two-sided p-value of McNemar's test: of the records that one run alone has right, whose are more."""
    from scipy.stats import binomtest

    here, there = _by_record(ours, name), _by_record(theirs, name)
    gaps = [here[record] - there[record] for record in here]
    if any(map(math.isnan, gaps)):
        return math.nan
    differing = sum(gap != 0 for gap in gaps)
    return float(binomtest(sum(gap > 0 for gap in gaps), differing).pvalue) if differing else 1.0


def privleak(area: Estimate, reference: Estimate) -> Estimate:
    """(A - A_ref) / A_ref for A = 1 - AUC, paired by record (MUSE, Shi et al. 2024)."""
    ours, theirs = complement(area), complement(reference)
    slope = 1 / theirs.value if theirs.value else math.nan
    value = (ours.value - theirs.value) * slope
    return combine(value, [ours, theirs], [slope, -ours.value * slope**2])._replace(n=area.n)


def recovery(attacked: Estimate, attacked_retrained: Estimate, original: Estimate, retrained: Estimate) -> Estimate:
    """(attacked - attacked retrained) / (original - retrained), of ``mc_accuracy`` on the same records.

    Of what the original model knows beyond the retrained one, the share that the attacked checkpoint knows beyond the
    attacked retrained model. By the delta method, paired by record.
    """
    gain, gap = difference(attacked, attacked_retrained), difference(original, retrained)
    slope = 1 / gap.value if gap.value else math.nan
    return combine(gain.value * slope, [gain, gap], [slope, -gain.value * slope**2])._replace(n=attacked.n)
