"""Before and after: the same lm-eval tasks on the original, the new and the retrained model, and their table."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from lm_eval_elude import task_folder
from lm_eval_elude.data import bundled
from lm_eval_elude.data.manifest import Manifest
from lm_eval_elude.errors import mute_harness

# Of the table, in per cent: the label, lm-eval's task or group, and its metric.
COLUMNS = (
    ("FQ", "elude_quality", "forget_quality"), ("mc_acc", "elude_forget", "truth_first"),
    ("cloze", "elude_cloze", "truth_first"), ("P", "elude_forget", "probability"),
    ("repet.", "elude_forget", "degenerate"),
    ("RQ", "elude_quality", "retain_quality"), ("named", "elude_quality", "mention_quality"),
    ("P", "elude_retain", "probability"), ("ROUGE", "elude_retain", "rougeL_recall"),
    ("repet.", "elude_retain", "degenerate"), ("FQ", "tofu", "forget_quality"), ("utility", "tofu", "model_utility"),
    ("P", "tofu_forget", "probability"), ("repet.", "tofu_forget", "degenerate"),
)  # fmt: skip


def score(folder: Path, manifest: Manifest, before: dict[str, str], after: dict[str, str], batch: int) -> str:
    """Score the models that have no scores under ``scores/`` yet, by their arguments of ``--model elude``.

    Every process calls it; the first one gets the table, the others "".
    """
    split = manifest.settings["forget_split"]
    about = {"tofu_split": split, "tofu_evaluator": manifest.settings["tofu_evaluator"], "tofu_data": manifest.dataset}
    if not split:
        about = {"target": list(manifest.targets), "dataset": manifest.dataset, "original": before["pretrained"]}
    models = {"before": before, "after": after}
    if reference := bundled.reference_of(manifest):
        models["retrained"] = {"pretrained": reference}
    rows = {}
    for name, arguments in models.items():
        place = folder / "scores" / name
        if not list(place.glob("results_*.json")):
            evaluate(place, "tofu" if split else "elude_quality", arguments, about, batch)
        for path in place.glob("results_*.json"):
            rows[name] = json.loads(path.read_text(encoding="utf-8"))["results"]
    return table(rows)


def evaluate(place: Path, task: str, arguments: dict[str, str], about: dict[str, Any], batch: int) -> None:
    """Write lm-eval's results and samples of one model into a folder."""
    import lm_eval.evaluator
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    from lm_eval_elude.model.backend import default_device

    logging.getLogger("lm_eval.evaluator_utils").setLevel(logging.ERROR)  # a group of rising and falling metrics
    tasks = TaskManager(include_path=task_folder(), include_defaults=False, metadata=arguments | about)
    with mute_harness(lm_eval.evaluator):
        results = lm_eval.simple_evaluate(
            model="elude", model_args=arguments, tasks=[task], batch_size=batch, device=default_device(),
            task_manager=tasks, log_samples=True,
        )  # fmt: skip
    if results:  # the first process has them
        tracker, samples = EvaluationTracker(output_path=str(place / "results.json")), results.pop("samples")
        tracker.save_results_aggregated(results=results, samples=samples)
        for name, logged in samples.items():
            tracker.save_results_samples(task_name=name, samples=logged)


def table(rows: dict[str, dict[str, dict[str, float]]]) -> str:
    """A line for each model; ``-`` where it has no number."""
    shown = [column for column in COLUMNS if any(f"{column[2]},none" in r.get(column[1], {}) for r in rows.values())]
    lines = ["%         " + "".join(f"{label:>8}" for label, _, _ in shown)] if rows else []
    for name, results in rows.items():
        values = [results.get(task, {}).get(f"{metric},none") for _, task, metric in shown]
        lines.append(f"{name:10}" + "".join(f"{100 * v:8.1f}" if isinstance(v, float) else f"{'-':>8}" for v in values))
    return "\n".join(lines)
