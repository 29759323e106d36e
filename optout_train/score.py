"""Before and after: the same lm-eval tasks on the original, the new and the retrained model, and the report's table."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lm_eval_elude import task_folder
from lm_eval_elude.data import bundled
from lm_eval_elude.data.manifest import Manifest


def score(folder: Path, manifest: Manifest, before: dict[str, str], after: dict[str, str], batch: int) -> str:
    """Score the models that have no scores under ``scores/`` yet, by their arguments of ``--model elude``.

    Every process calls it; the first one gets the table, the others "".
    """
    from lm_eval_elude.report.frame import read_models
    from lm_eval_elude.report.text import terminal
    from lm_eval_elude.report.verdicts import judge_models

    split = manifest.settings["forget_split"]
    about = {"tofu_split": split, "tofu_evaluator": manifest.settings["tofu_evaluator"], "tofu_data": manifest.dataset}
    if not split:
        about = {"target": list(manifest.targets), "dataset": manifest.dataset}
    models = {"original": before, manifest.method: after}
    retrained = bundled.reference_of(manifest)
    if retrained:
        models["retrained"] = {"pretrained": retrained}
    first = True
    for name, arguments in models.items():
        place = folder / "scores" / name
        if not list(place.glob("results_*.json")):
            first = evaluate(place, "tofu" if split else "elude_quality", arguments, about, batch)
    if not first:
        return ""
    places = [f"{name}={folder / 'scores' / name}" for name in models]
    scored = read_models(places, original="original", reference="retrained" if retrained else "")
    judge_models(scored)
    return terminal(scored)


def evaluate(place: Path, task: str, arguments: dict[str, str], about: dict[str, Any], batch: int) -> bool:
    """Write lm-eval's results and samples of one model into a folder; whether this is the process that does."""
    import lm_eval
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    from lm_eval_elude.model.backend import default_device
    from lm_eval_elude.tasks.running import quietly

    logging.getLogger("lm_eval.evaluator_utils").setLevel(logging.ERROR)  # a group of rising and falling metrics
    tasks = TaskManager(include_path=task_folder(), include_defaults=False, metadata=arguments | about)
    with quietly():
        results = lm_eval.simple_evaluate(
            model="elude", model_args=arguments, tasks=[task], batch_size=batch, device=default_device(),
            task_manager=tasks, log_samples=True,
        )  # fmt: skip
    if not results:
        return False
    tracker, samples = EvaluationTracker(output_path=str(place / "results.json")), results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for name, logged in samples.items():
        tracker.save_results_samples(task_name=name, samples=logged)
    return True
