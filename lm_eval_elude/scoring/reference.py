"""For report and board until they call the benchmarks."""

from typing import Any

from lm_eval_elude.scoring.metrics import METRICS
from lm_eval_elude.scoring.samples import same_documents


def is_distance(metric: str) -> bool:
    name = metric.removesuffix("_stderr")
    return name in METRICS and METRICS[name].is_distance


def beside(samples: Any, other: Any) -> Any:
    if not same_documents(samples, other):
        return None
    compared = {row.name: 0.0 for row in METRICS.values() if row.needs in ("reference", "truth ratios of a reference")}
    return [
        s._replace(values={**s.values, **compared, "reference": o.values}) for s, o in zip(samples, other, strict=True)
    ]
