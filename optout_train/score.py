"""Before and after: the same lm-eval tasks on the original and the new checkpoint, one table, the command for it."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_elude import task_folder
from lm_eval_elude.data import bundled, jsonio
from lm_eval_elude.data.hub_metadata import CARD
from lm_eval_elude.data.manifest import Manifest, read_manifest
from lm_eval_elude.data.records import fingerprint
from lm_eval_elude.errors import UserError, printable
from lm_eval_elude.scoring.benchmark import NothingToAskError
from lm_eval_elude.scoring.benchmarks import BENCHMARKS, GROUPS
from lm_eval_elude.scoring.metrics import METRICS, forget_quality
from lm_eval_elude.scoring.runs import Run
from lm_eval_elude.scoring.samples import by_target, mean
from lm_eval_elude.scoring.settings import provenance
from lm_eval_elude.scoring.units import number, unit
from lm_eval_elude.tasks.running import mute_harness
from optout_train.card import CHECKPOINT, REFERENCE, card_files, value_in
from optout_train.config import TrainConfig
from optout_train.run_folder import RunFolder
from optout_train.sources import benchmark_of, source_of

# The columns of the table's two halves: the group's, "" for the half's headline, and its task's.
LEADS = (("known", ""), ("", "mention_quality"))
PARTS = (
    ("truth_first", "log_truth_ratio", "probability", "degenerate", "oddness"),
    ("probability", "rougeL_recall", "degenerate"),
)


class Job(NamedTuple):
    """What is scored: the folder of its results under ``scores/``, its row in the table, lm-eval's model arguments."""

    file: str
    name: str
    arguments: dict[str, str]


def model_args(config: TrainConfig, folder: Path | None) -> dict[str, str]:
    """What ``--model elude`` (and ``hf``) takes for the original (no folder) or for a checkpoint of this run."""
    is_adapter = config.lora and not config.merge
    if folder and not is_adapter:
        return {"pretrained": str(folder), "dtype": config.dtype}
    arguments = {"pretrained": config.model_path} | ({"peft": str(folder)} if folder else {}) | {"dtype": config.dtype}
    return arguments | ({"revision": config.revision} if config.revision else {})


def jobs(config: TrainConfig, folder: Path, beside: Path | None) -> list[Job]:
    """Everything that is scored for a run, in the order of the table.

    ``beside`` is another checkpoint, scored on the same data under its method's name. For the bundled model there may
    be one more that was trained without the target.
    """
    manifest = read_manifest(folder)
    before = "before this request" if manifest and manifest.requests else "original"
    models = [Job("before", before, model_args(config, None))]
    if beside:
        other_manifest = earlier(beside)
        # The model as the manifest names it: the settings have it as it was typed, perhaps in another folder.
        other = TrainConfig.from_json(other_manifest.settings | {"model": other_manifest.base_model["name"]})
        models.append(Job(other.method, other.method, model_args(other, beside)))
    models.append(Job("after", CHECKPOINT, model_args(config, folder)))
    if reference := bundled.reference_of(manifest):
        models.append(Job("retrained", REFERENCE, {"pretrained": reference, "dtype": config.dtype}))
    return models


def is_scored(config: TrainConfig, folder: Path, beside: Path | None) -> bool:
    """Whether nothing is left to score: a kill leaves whole results of some models, and no card."""
    return (folder / CARD).exists() and all(
        kept_results(folder / "scores" / job.file, job) for job in jobs(config, folder, beside)
    )


def must_be_scorable(config: TrainConfig) -> None:
    """UserError where the data set lacks what scoring needs; training does without, and takes long."""
    benchmark, source = benchmark_of(config), source_of(config)
    source.load("forget", "train")  # what training does not do without either is said as it says it
    asked = benchmark.metadata(Manifest(source.targets, config.dataset, settings=config.to_json()))
    for task in GROUPS[benchmark.task].children:
        try:
            BENCHMARKS[task].records(BENCHMARKS[task].resolve(asked))
        except NothingToAskError:  # the group leaves it out
            pass
        except UserError as error:
            raise UserError(f"{error}; --no-score trains without scoring") from None


def kept_results(scores: Path, job: Job) -> dict[str, Any] | None:
    """What lm-eval said of the same model, with the same weights and data, in results that a folder keeps."""
    for path in scores.glob("results_*.json"):
        results = jsonio.load(path)
        if isinstance(results, dict) and results.get("config", {}).get("model_args") == job.arguments:
            scored = [config.get("metadata", {}).get("elude", {}) for config in results.get("configs", {}).values()]
            now, versions = provenance(job.arguments)["checkpoint"], results.get("versions", {})
            of_today = all(versions.get(task) == BENCHMARKS[task].version for task in versions if task in BENCHMARKS)
            if of_today and all(settings.get("checkpoint") == now for settings in scored) and _of_these_data(results):
                return results
    return None


def _of_these_data(results: Mapping[str, Any]) -> bool:
    """Whether the data set has the records still that each task asked."""
    for task, config in results["configs"].items():
        asked = {key: value for key, value in config["metadata"].items() if key != "elude"}
        try:
            rows = BENCHMARKS[task].records(BENCHMARKS[task].resolve(asked))
        except (UserError, NothingToAskError):
            return False
        if fingerprint(record for record, _ in rows) != config["metadata"]["elude"]["fingerprint"]:
            return False
    return True


def take_over(
    job: Job, config: TrainConfig, manifest: Manifest, batch_size: int, place: RunFolder, other: Path
) -> dict[str, Any] | None:
    """What another run keeps of the same model, scored as :func:`evaluate` would, copied into this run; or None."""
    benchmark = benchmark_of(config)
    wanted = json.loads(json.dumps(job.arguments | benchmark.metadata(manifest)))  # as a results file has it
    for scores in sorted((other / "scores").glob("*")):
        if not (results := kept_results(scores, job)):
            continue
        scored = [configured.get("metadata", {}) for configured in results["configs"].values()]
        alike = all(wanted.items() <= metadata.items() for metadata in scored)
        if alike and benchmark.task in results["results"] and results["config"]["batch_size"] == batch_size:
            with place.adding(f"scores/{job.file}") as new:
                shutil.copytree(scores, new, dirs_exist_ok=True)
            return results
    return None


def evaluate(job: Job, config: TrainConfig, manifest: Manifest, batch_size: int, place: RunFolder) -> dict[str, Any]:
    """lm-eval's results of the benchmark's group for one model, with what a manifest forgot and its data.

    Results and samples are added to the run under ``scores/``, named as lm-eval names them, once both are whole.
    """
    import lm_eval.evaluator
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    from lm_eval_elude.model import limits

    metadata = job.arguments | benchmark_of(config).metadata(manifest)
    logging.getLogger("lm_eval.evaluator_utils").setLevel(logging.ERROR)  # a group of rising and falling metrics
    with place.adding(f"scores/{job.file}") as new:
        tracker = EvaluationTracker(output_path=str(new / "results.json"))
        with mute_harness(lm_eval.evaluator):
            results = lm_eval.simple_evaluate(
                model="elude",
                model_args=job.arguments,
                tasks=[benchmark_of(config).task],
                batch_size=batch_size,
                device=limits.device(),
                task_manager=TaskManager(include_path=task_folder(), include_defaults=False, metadata=metadata),
                log_samples=True,
                evaluation_tracker=tracker,
            )
            assert results is not None  # only other ranks get None
            samples = results.pop("samples")
            tracker.save_results_aggregated(results=results, samples=samples)
            for task in results["configs"]:
                tracker.save_results_samples(task_name=task, samples=samples[task])
        if not list(new.glob("results_*.json")) or len(list(new.glob("samples_*.jsonl"))) < len(samples):
            raise OSError(f"{place.output}: lm-eval could not write its results there")  # it only logs that
    return results


def score_run(config: TrainConfig, folder: Path, beside: Path | None = None) -> str:
    """Score all :func:`jobs` that are not scored yet, write the card, and return the table and the command for it.

    What the run of ``beside`` has scored alike is taken over from there.

    UserError where lm-eval could not score one of them, or another process writes to the run.
    """
    manifest = read_manifest(folder)
    assert manifest is not None
    again, size = command(config, folder, manifest), config.micro_batch_size or config.batch_size
    place = RunFolder(folder)
    scored: dict[str, dict[str, Any]] = {}
    try:
        place.lock()
        for job in jobs(config, folder, beside):
            try:
                results = (
                    kept_results(folder / "scores" / job.file, job)
                    or (take_over(job, config, manifest, size, place, beside) if beside else None)
                    or evaluate(job, config, manifest, size, place)
                )
            except (ValueError, AssertionError) as error:  # what lm-eval and its tasks say of settings they cannot take
                why = f"{folder} is complete, but scoring {job.name} failed ({error})"
                raise UserError(f"{why}; again: {again}") from error
            scored[job.name] = results["results"]
        for name, text in card_files(folder, config, manifest, scored, again).items():
            place.add_file(name, text)
    finally:
        place.discard()
    scores = _shown(str(folder / "scores"))
    here = f"Checkpoint: {_shown(str(folder))}, scores and answers in lm-eval's format: {scores}"
    parts = [table(config, scored)]
    if len(manifest.targets) > 1:
        runs = {job.name: Run(folder / "scores" / job.file) for job in jobs(config, folder, beside)}
        parts.append(by_target_table(runs))
    return "\n\n".join([*parts, printable(here), f"Again:\n  {printable(again)}"])


def earlier(folder: Path) -> Manifest:
    """The manifest of a checkpoint that is to be shown beside another; UserError where there is none."""
    if (manifest := read_manifest(folder)) is None or not manifest.settings:
        raise UserError(f"--beside {folder} is no checkpoint of optout-train: it has no optout.json of a run")
    return manifest


def table(config: TrainConfig, scored: Mapping[str, Mapping[str, Any]]) -> str:
    """A plain-text table: forget columns, then retain columns: the headlines, and what a model has a number for.

    Shares are in per cent; ``-`` where lm-eval has no number for a model.
    """
    benchmark = benchmark_of(config)
    titles, heads = " " * 20, f"{'%':20}"
    rows = dict.fromkeys(scored, "")
    for (title, headline, task), leads, parts in zip(benchmark.halves, LEADS, PARTS, strict=True):
        of_group = [(benchmark.task, lead or headline) for lead in leads]
        columns = [
            (place, metric)
            for place, metric in dict.fromkeys([*of_group, *((task, part) for part in parts)])
            if metric == headline or any(f"{metric},none" in results.get(place, {}) for results in scored.values())
        ]
        titles += title.center(9 * len(columns))
        heads += "".join(f"{METRICS[metric].label:>9}" for _, metric in columns)
        for name, results in scored.items():
            rows[name] += "".join(f"{_cell(value_in(results, *column), column[1]):>9}" for column in columns)
    return "\n".join([titles.rstrip(), heads, *(f"{name:20}{cells}" for name, cells in rows.items())])


def _cell(value: float | None, metric: str) -> str:
    return "-" if value is None else number(value, unit(metric))


def by_target_table(runs: Mapping[str, Run]) -> str:
    """FQ and truth first of each target in per cent, a row for each model: what an earlier request lost again."""
    groups = {name: by_target(run.samples("elude_forget")) for name, run in runs.items()}
    targets = list(dict.fromkeys(target for group in groups.values() for target in group))
    width = max(18, *map(len, targets)) + 2
    lines = [" " * 20 + "".join(f"{printable(target):>{width}}" for target in targets)]
    lines.append(f"{'%':20}" + f"{'FQ    first':>{width}}" * len(targets))
    for name, group in groups.items():
        values = [(forget_quality(group[t]).value, mean(group[t], "truth_first").value) for t in targets]
        cells = [f"{100 * fq:.1f}  {100 * first:7.1f}" for fq, first in values]
        lines.append(f"{name:20}" + "".join(f"{cell:>{width}}" for cell in cells))
    return "\n".join(lines)


def command(config: TrainConfig, folder: Path, manifest: Manifest) -> str:
    """The ``lm_eval`` command that repeats the score of a checkpoint (its manifest says what was forgotten)."""
    shown = {key: _shown(value) for key, value in model_args(config, folder).items()}
    arguments = ",".join(f"{key}={value}" for key, value in shown.items())
    what = f"--tasks {benchmark_of(config).task} --batch_size {config.micro_batch_size or config.batch_size}"
    original = "" if bundled.original_of(manifest) else benchmark_of(config).metadata(manifest).get("original")
    if original:  # the tasks know the bundled one
        what += f" --metadata {shlex.quote(json.dumps({'original': _shown(original)}))}"
    return f"lm_eval --model elude --model_args {shlex.quote(arguments)} {what}"


def _shown(value: str) -> str:
    path = Path(value)
    if path.is_absolute() and path.is_relative_to(Path.cwd()) and path != bundled.MODEL:
        return str(path.relative_to(Path.cwd()))
    return value
