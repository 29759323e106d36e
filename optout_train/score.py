"""Before and after: the same lm-eval tasks on the original and the new checkpoint, one table, the command for it."""

from __future__ import annotations

import io
import logging
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_elude.core.manifest import Manifest, read_manifest
from optout_train.card import write_card
from optout_train.config import BUNDLED, BUNDLED_MODEL, BUNDLED_REFERENCE, ConfigError, TrainConfig
from optout_train.sources import benchmark_of

PARTS = (("P", "probability"), ("ROUGE", "rougeL_recall"), ("TR", "truth_ratio"), ("degen.", "degenerate"))
# By the group that scores: of each half of the table its title, its headline (column, metric of the group), and the
# task whose parts stand beside it; the values are in lm-eval's own results under "metric,none".
SCORES = {
    "elude_quality": (
        ("forget set", ("FQ", "forget_quality"), "elude_forget"),
        ("retain (neighbours)", ("RQ", "retain_quality"), "elude_retain"),
    ),
    "tofu": (
        ("forget set (FQ: KS p)", ("FQ", "forget_quality"), "tofu_forget"),
        ("retain (MU: model utility)", ("MU", "model_utility"), "tofu_retain"),
    ),
}


class ScoreError(RuntimeError):
    """The checkpoint is complete, but lm-eval could not score it."""


class Row(NamedTuple):
    """A line of the table: what was scored and lm-eval's results."""

    name: str
    results: dict[str, Any]


def model_args(config: TrainConfig, folder: Path | None) -> dict[str, str]:
    """What ``--model elude`` (and ``hf``) takes for the original (no folder) or for a checkpoint of this run."""
    arguments = {"dtype": config.dtype}
    if config.revision and (folder is None or (config.lora and not config.merge)):
        arguments["revision"] = config.revision
    if folder is None:
        return {"pretrained": config.model_path, **arguments}
    if config.lora and not config.merge:
        return {"pretrained": config.model_path, "peft": str(folder), **arguments}
    return {"pretrained": str(folder), **arguments}


def evaluate(
    arguments: dict[str, str], config: TrainConfig, manifest: Manifest, batch_size: int, place: Path
) -> dict[str, Any]:
    """lm-eval's results of the benchmark's group for one model, with what a manifest forgot and its data.

    Results and samples are written to the folder ``place``, named as lm-eval names them, once both are whole.
    """
    import lm_eval
    import torch
    from lm_eval.loggers import EvaluationTracker

    new = place.with_name(f".{place.name}.tmp")
    shutil.rmtree(new, ignore_errors=True)
    tracker = EvaluationTracker(output_path=str(new / "results.json"))

    logging.getLogger("lm_eval.evaluator_utils").setLevel(logging.ERROR)  # a group of rising and falling metrics
    # Progress bars are for people: lm-eval draws them wherever it runs.
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
        results = lm_eval.simple_evaluate(
            model="elude",
            model_args=arguments,
            tasks=[benchmark_of(config).task],
            batch_size=batch_size,
            device=str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu",
            metadata=benchmark_of(config).metadata(manifest),
            log_samples=True,
            evaluation_tracker=tracker,
        )
        assert results is not None  # only other ranks get None
        samples = results.pop("samples")
        tracker.save_results_aggregated(results=results, samples=samples)
        for task in results["configs"]:
            tracker.save_results_samples(task_name=task, samples=samples[task])
    if not list(new.glob("results_*.json")) or len(list(new.glob("samples_*.jsonl"))) < len(samples):
        raise OSError(f"{place}: lm-eval could not write its results there")  # it only logs that
    shutil.rmtree(place, ignore_errors=True)
    new.rename(place)
    return results


def score_run(config: TrainConfig, folder: Path, beside: Path | None = None) -> str:
    """Score the original and the new checkpoint, save both under ``scores/`` and return the table and the command.

    The bundled model also has an exact-unlearning reference, trained without the target, for Cristiano Ronaldo.

    Args:
        config: of the run.
        folder: of the checkpoint.
        beside: another checkpoint, scored on the same data under its method's name.

    Raises:
        ScoreError: lm-eval could not score one of them.
    """
    manifest = read_manifest(folder)
    assert manifest is not None
    scores = folder / "scores"
    scores.mkdir(exist_ok=True)
    jobs = [("before", "original", model_args(config, None)), ("after", "this checkpoint", model_args(config, folder))]
    if beside:
        other = TrainConfig.from_json(earlier(beside).settings)
        jobs.insert(1, (other.method, other.method, model_args(other, beside)))
    if config.model == BUNDLED and manifest.targets == ("Cristiano Ronaldo",) and BUNDLED_REFERENCE.is_dir():
        jobs.append(("retrained", "retrained without", {"pretrained": str(BUNDLED_REFERENCE), "dtype": config.dtype}))
    rows = []
    for file, name, arguments in jobs:
        try:
            results = evaluate(arguments, config, manifest, config.micro_batch_size or config.batch_size, scores / file)
        except (ValueError, AssertionError) as error:  # what lm-eval and its tasks say of settings they cannot take
            again = command(config, folder)
            raise ScoreError(f"{folder} is complete, but scoring {name} failed ({error}); again: {again}") from error
        rows.append(Row(name, results["results"]))
    write_card(folder, config, manifest, {row.name: row.results for row in rows}, command(config, folder))
    lies = f"Checkpoint: {_shown(str(folder))}, scores and answers in lm-eval's format: {_shown(str(scores))}"
    return f"{table(benchmark_of(config).task, rows)}\n\n{lies}\n\nAgain:\n  {command(config, folder)}"


def earlier(folder: Path) -> Manifest:
    """The manifest of a checkpoint that is to be shown beside another.

    Raises:
        ConfigError: there is none.
    """
    if (found := read_manifest(folder)) is None or not found.settings:
        raise ConfigError(f"--beside {folder} is no checkpoint of optout-train: it has no optout.json of a run")
    return found


def table(group: str, rows: Sequence[Row]) -> str:
    """A plain-text table in per cent: forget columns, then retain columns; ``-`` where lm-eval has no such number."""
    halves = SCORES[group]
    head = f"{'':20}{''.join(f'{title:^40}' for title, _, _ in halves)}".rstrip()
    columns = [
        column
        for _, (name, headline), task in halves
        for column in ((name, group, headline), *((part, task, metric) for part, metric in PARTS))
    ]
    lines = [head, f"{'%':20}" + "".join(f"{column:>8}" for column, _, _ in columns)]
    for row in rows:
        values = [row.results.get(task, {}).get(f"{metric},none") for _, task, metric in columns]
        cells = [f"{100 * v:8.1f}" if isinstance(v, (int, float)) else f"{'-':>8}" for v in values]
        lines.append(f"{row.name:20}" + "".join(cells))
    return "\n".join(lines)


def command(config: TrainConfig, folder: Path) -> str:
    """The ``lm_eval`` command that repeats the score of a checkpoint (its manifest says what was forgotten)."""
    shown = {key: _shown(value) for key, value in model_args(config, folder).items()}
    arguments = ",".join(f"{key}={value}" for key, value in shown.items())
    task = benchmark_of(config).task
    return f"lm_eval --model elude --model_args {arguments} --tasks {task} --batch_size {config.batch_size}"


def _shown(value: str) -> str:
    path = Path(value)
    if path.is_absolute() and path.is_relative_to(Path.cwd()) and path != BUNDLED_MODEL:
        return str(path.relative_to(Path.cwd()))
    return value


if __name__ == "__main__":  # after a run of several processes: scoring alone, in an interpreter of its own
    target = Path(sys.argv[1])
    found = read_manifest(target)
    assert found is not None
    print(score_run(TrainConfig.from_json(found.settings), target, *map(Path, sys.argv[2:])))
