"""The rows of the paper's tables: every run of one method with one set of settings on one base model.

The settings are those of the checkpoint's manifest. Values are averaged over a row's targets first, then FQ and RQ are
formed, as in the paper.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lm_eval_elude.data import jsonio
from lm_eval_elude.data.sets import COLLAPSE
from lm_eval_elude.data.targets import slugify
from lm_eval_elude.report.comparison import BEFORE, ORIGINAL, NamedRun
from lm_eval_elude.scoring.benchmarks import BENCHMARKS, GROUPS, UTILITY, UTILITY_BENCHMARKS
from lm_eval_elude.scoring.estimates import Estimate, average, exact
from lm_eval_elude.scoring.units import unit

Key = tuple[str, str]  # task or group, metric
FQ, RQ = ("elude_quality", "forget_quality"), ("elude_quality", "retain_quality")
MIA_AUC = ("elude_mia", "mia_auc")
# What a run took: numbers of the manifest and the results file, not of the samples.
COST = {name: ("cost", name) for name in ("parameters", "epochs", "processor", "scoring")}
# Settings that say what or where, not how: runs that differ in these alone are one row.
IGNORED_SETTINGS = {
    "target", "seed", "model", "revision", "dataset", "strict", "micro_batch_size", "shard", "compile",
    "gradient_checkpointing", "validate",
}  # fmt: skip
# Settings of the scoring that keep runs apart, by the name that a row has for them.
SCORED = {
    **{key: key for key in ("evaluator", "split", "truth_ratio", "guardrail", "attack_file")}, "data set": "dataset",
}  # fmt: skip
WORLD_ONLY = " world only"
COLLAPSED = "collapsed"


class Row(NamedTuple):
    """A line of the tables.

    Attributes:
        method: the paper's name of it where it has one; ``original``, ``guardrail``, ``retrained``, ``retained``.
        base: the model that was unlearned.
        varied: settings in which it differs from other rows of the method.
        numbers: by task or group and metric.
        runs: results files behind it.
        remarks: what a reader must know of a part of it.
        of_seeds: the value of each seed, where they are known; of a p-value that of each run, as its mean is none.
    """

    method: str
    base: str
    varied: Mapping[str, str]
    numbers: Mapping[Key, Estimate]
    runs: int
    remarks: tuple[str, ...] = ()
    of_seeds: Mapping[Key, Sequence[float]] = {}

    @property
    def name(self) -> str:
        """Method and what is special about it."""
        return ", ".join([self.method, *(f"{k.replace('_', '-')} {v}" for k, v in self.varied.items()), *self.remarks])


def rows(runs: Sequence[NamedRun]) -> list[Row]:
    """The rows that the runs make, each base model's in the order in which it was given."""
    groups: dict[tuple[str, str, bool, str], list[NamedRun]] = {}
    bases = {Path(str(run.manifest.first_base)).name for run in runs if run.manifest}
    of_path = {run.model: _weights(run) for run in runs if _weights(run)}
    for run in runs:
        of_tofu = "tofu_forget" in run.run.tasks
        base = run.manifest.first_base if run.manifest else None  # that of the first of several requests
        name = "" if of_tofu else Path(str(base or run.model)).name
        # Models without a manifest are told apart by their weights; a run that does not have these goes by its path.
        identity = "" if run.manifest else _weights(run) or of_path.get(run.model, run.model.rstrip("/"))
        groups.setdefault((name, _method(run, bases), of_tofu, identity), []).append(run)
    made = []
    alike_named = Counter(key[:3] for key in groups)
    for (base, method, of_tofu, identity), members in groups.items():
        if identity and alike_named[base, method, of_tofu] > 1:  # several models of one name, without manifests
            method = members[0].name
        settings = [_settings(run) for run in members]
        keys = sorted({key for of_run in settings for key in of_run} - IGNORED_SETTINGS)
        # A run of the harness's own tasks alone does not say how ours were scored, and goes with any that does.
        known = {key: [s.get(key) for s in settings if key in s or key not in SCORED] for key in keys}
        odd = [key for key in keys if len({str(value) for value in known[key]}) > 1]
        variants: dict[tuple[str, ...], list[NamedRun]] = {}
        for run, of_run in zip(members, settings, strict=True):
            variants.setdefault(tuple(str(of_run.get(key)) for key in odd), []).append(run)
        for values, alike in variants.items():
            varied = dict(zip(odd, values, strict=True))
            p_values = _p_values(alike) if len(alike) > 1 else {}
            remarks = tuple(sorted(_remarks(alike)))
            made.append(Row(method, base, varied, _numbers(alike), len(alike), remarks, p_values))
    return marked(made)


def marked(rows: Sequence[Row]) -> list[Row]:
    """The rows, with a word where less than half of the original's retain quality is left."""
    before = {row.base: row.numbers[RQ].value for row in rows if row.method == ORIGINAL and RQ in row.numbers}
    return [
        row._replace(remarks=(*row.remarks, COLLAPSED))
        if RQ in row.numbers and row.numbers[RQ].value < COLLAPSE * before.get(row.base, 0)
        else row
        for row in rows
    ]


def _weights(run: NamedRun) -> str:
    """The hashes of the scored weights as text; "" where the results do not have them."""
    parts = [part.get("weights") for part in run.settings.get("checkpoint") or ()]
    return str(parts) if any(parts) else ""


def _settings(run: NamedRun) -> dict[str, object]:
    """How a checkpoint was made and how it was scored: runs that differ in one of these are not one row."""
    scored: dict[str, object] = {
        name: Path(str(run.settings[key])).name or "none"  # of a path, wherever it lies
        for name, key in SCORED.items()
        if key in run.settings
    }
    if "tofu_forget" in run.run.tasks and (size := run.run.config.get("model_num_parameters")):
        scored["parameters"] = size
    if not run.manifest:
        return scored
    made = {"targets": len(run.manifest.targets), "requests": len(run.manifest.requests) + 1}
    return {**run.manifest.settings, **scored, **made}


def _remarks(runs: Sequence[NamedRun]) -> set[str]:
    """That only a part of the benchmarks was run."""
    aliases = {str(run.run.results["results"].get(UTILITY, {}).get("alias", "")) for run in runs}
    remarks = {alias.replace("elude_", "") for alias in aliases if "fast" in alias}
    return remarks | {f"--limit {run.run.limit:g}" for run in runs if run.run.limit is not None}


def about(run: NamedRun) -> set[str]:
    """The targets that a run asks about, as slugs."""
    return {slugify(str(name)) for task in run.run.tasks for name in run.run.settings(task).get("targets") or ()}


def _numbers(runs: Sequence[NamedRun]) -> dict[Key, Estimate]:
    """Every number of several runs and what they took, by target first: question sets pooled, the rest averaged."""
    settings = {task: run.run.settings(task) for run in reversed(runs) for task in run.run.tasks}
    pooled = {
        task: [s for run in runs if task in run.run.tasks for s in run.run.samples(task)]
        for task in settings
        if task.startswith("elude_") and task != "elude_mia"
    }
    by_task = {task: BENCHMARKS[task].numbers(samples, settings[task]) for task, samples in pooled.items()}
    if pooled.keys() >= {"elude_forget", "elude_retain", "elude_world"}:
        by_task["elude_quality"] = GROUPS["elude_quality"].numbers(pooled)
    for group in ("elude_attacks", "elude"):
        if any(group in run.run.results["results"] for run in runs):
            by_task[group] = GROUPS[group].numbers(pooled)
    numbers = {(task, metric): estimate for task, of_task in by_task.items() for metric, estimate in of_task.items()}
    others: dict[Key, dict[frozenset[str], list[Estimate]]] = {}  # by targets, which may differ in their seeds
    for run in runs:
        targets = frozenset(about(run))
        over_all = {(task, metric): e for (task, target, metric), e in run.estimates.items() if not target}
        for key, estimate in {**over_all, **_utility(run), **_cost(run)}.items():
            if key not in numbers and key[0] not in pooled:
                others.setdefault(key, {}).setdefault(targets, []).append(estimate)
    numbers |= {key: average([average(seeds) for seeds in of_key.values()]) for key, of_key in others.items()}
    if (area := numbers.get(MIA_AUC)) and len(runs) > 1:  # the ends of the mean, which the mean of the ends is not
        ends = zip(("mia_auc_low", "mia_auc_high"), area.interval, strict=True)
        numbers |= {(MIA_AUC[0], metric): numbers[MIA_AUC[0], metric]._replace(value=end) for metric, end in ends}
    return numbers


def _p_values(runs: Sequence[NamedRun]) -> dict[Key, list[float]]:
    """The p-values of each run: of all together every record would count once for each seed."""
    found: dict[Key, list[float]] = {}
    for run in runs:
        for (task, target, metric), estimate in run.estimates.items():
            if not target and unit(metric) == "p-value":
                found.setdefault((task, metric), []).append(estimate.value)
    return found


def _utility(run: NamedRun) -> dict[Key, Estimate]:
    """Accuracies of the harness's own tasks, whose samples are not ours to measure."""
    results, counts = run.run.results["results"], run.run.results.get("n-samples") or {}
    jsonio.check(counts, dict[str, dict[str, int]], f"{run.run.path}: field 'n-samples'")
    accuracies = {}
    for task in (*UTILITY_BENCHMARKS.values(), UTILITY) if UTILITY in results else ():
        value, error = (results.get(task, {}).get(key) for key in ("acc,none", "acc_stderr,none"))
        if isinstance(value, int | float):
            spread = {task: float(error)} if isinstance(error, int | float) else {}
            accuracies[task, "acc"] = Estimate(float(value), spread, counts.get(task, {}).get("effective", 0))
    return accuracies


def _method(run: NamedRun, bases: Collection[str]) -> str:
    """What a row is called; ``bases`` are the models that checkpoints among the runs were made from, by name."""
    if run.manifest is None:
        unknown = bool(run.run.tasks) and "checkpoint" not in run.settings  # a released log does not say of what it is
        lost = not run.run.tasks and run.model.count("/") > 1 and not Path(run.model).exists()
        scored = run.settings.get("checkpoint") or ()
        other = bases and Path(run.model).name not in bases and run.name not in (ORIGINAL, BEFORE)
        if unknown or lost or other or len(scored) > 1 or any("manifest" in part for part in scored):
            return run.name  # of another model or an adapter, or its checkpoint is not here to say
        return "guardrail" if run.settings.get("guardrail") else ORIGINAL
    kept = run.method.endswith("+rt") or run.method.startswith("opt-out")
    return run.method + (WORLD_ONLY if kept and run.manifest.settings.get("retain_weight") == 0 else "")


def _cost(run: NamedRun) -> dict[Key, Estimate]:
    manifest = run.manifest
    size = run.run.config.get("model_num_parameters")
    seconds = str(run.run.results.get("total_evaluation_time_seconds"))
    epochs = [e["epoch"] for e in manifest.epochs if isinstance(e.get("epoch"), int)] if manifest else []
    cost: dict[Key, float] = {COST["epochs"]: max(epochs)} if epochs else {}
    if manifest and manifest.processor_seconds is not None:
        cost[COST["processor"]] = manifest.processor_seconds
    cost |= {COST["parameters"]: size} if isinstance(size, int) else {}
    cost |= {COST["scoring"]: float(seconds)} if re.fullmatch(r"\d+\.?\d*", seconds) else {}
    return {key: exact(value) for key, value in cost.items()}
