"""A finished run read back: lm-eval's results file, and every value measured again from its logged samples."""

from __future__ import annotations

import json
import math
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from lm_eval_elude.data import jsonio
from lm_eval_elude.errors import UserError
from lm_eval_elude.metrics.compare import distances
from lm_eval_elude.metrics.fluency import FLUENCY, Reading, fluency_values, lowest
from lm_eval_elude.metrics.samples import Numbers, Sample, numbers
from lm_eval_elude.tasks import GROUPS, TASKS, leaves


class Run:
    """One run of ``lm_eval --output_path ... --log_samples``: its results file, or the only one below a folder.

    UserError where there is none or several, or it has no task of ours.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = results_file(Path(path))
        self.results: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        self.tasks = [task for task in TASKS if task in self.results.get("configs", {})]
        if not self.tasks:
            raise UserError(f"{self.path}: no task of lm-eval-elude in it")

    def settings(self, task: str) -> dict[str, Any]:
        """What a task was run with: targets, data set, model, template, versions."""
        settings: dict[str, Any] = self.results["configs"][task]["metadata"]["elude"]
        return settings

    @property
    def targets(self) -> list[str]:
        """What was scored, () for TOFU."""
        return list(self.settings(self.tasks[0])["targets"])

    @property
    def limit(self) -> float | None:
        """What ``--limit`` was, None where all was scored."""
        limit: float | None = self.results.get("config", {}).get("limit")
        return limit

    def sample_file(self, task: str) -> Path:
        """Where a task's samples are logged; UserError where they are not."""
        dated = re.search(r"_(\d{4}-\d\d-\d\dT[\d.-]+)$", self.path.stem)
        file = self.path.with_name(f"samples_{task}_{dated[1] if dated else self.path.stem}.jsonl")
        if not file.is_file():
            raise UserError(f"{file}: the samples of {task} are not there; run lm_eval with --log_samples")
        return file

    @property
    def fluency_file(self) -> Path:
        """Where what the original model finds of the answers is kept (:mod:`lm_eval_elude.report.fluency`)."""
        return self.path.with_name("fluency" + self.path.name.removeprefix("results"))

    @cached_property
    def docs(self) -> dict[str, list[dict[str, Any]]]:
        """The logged documents by task, in the order in which they were asked."""
        tables: dict[str, list[dict[str, Any]]] = {}
        for task in self.tasks:
            lines = self.sample_file(task).read_text(encoding="utf-8").splitlines()
            tables[task] = sorted((json.loads(line)["doc"] for line in lines), key=lambda doc: doc["id"])
        return tables

    @cached_property
    def samples(self) -> dict[str, list[Sample]]:
        """The values of every document, measured again; UserError where a row cannot be."""
        tables: dict[str, list[Sample]] = {}
        for task, docs in self.docs.items():
            settings = self.settings(task)
            tables[task] = []
            for number, doc in enumerate(docs, 1):
                try:
                    tables[task].append(TASKS[task].sample(doc, settings))
                except (LookupError, TypeError, ValueError) as error:
                    raise UserError(f"{self.sample_file(task)}, row {number}: cannot be measured ({error!r})") from None
        kept = jsonio.load(self.fluency_file) if self.fluency_file.is_file() else {}
        for task in kept.keys() & tables.keys():
            readings = [Reading(*pair) for pair in kept[task]]
            least, docs = lowest(readings), self.docs[task]
            for i, (doc, reading) in enumerate(zip(docs, readings, strict=True)):
                more = fluency_values(doc["generated"], reading, least)
                tables[task][i] = tables[task][i]._replace(values={**tables[task][i].values, **more})
        return tables

    def of_task(self, task: str, samples: list[Sample]) -> Numbers:
        """The numbers of some samples of a task, those of the original model's pass among them."""
        return TASKS[task].numbers(samples, self.settings(task)) | numbers(samples, FLUENCY)

    @cached_property
    def numbers(self) -> dict[str, Numbers]:
        """Every number by task and group, computed from the samples."""
        found = {task: self.of_task(task, samples) for task, samples in self.samples.items()}
        for name, group in GROUPS.items():
            below = leaves(name)
            if name in self.results.get("results", {}) and all(task in self.samples for task in group_tasks(below)):
                found[name] = group.numbers({task: self.samples[task] for task in below if task in self.samples})
        return found

    def beside(self, reference: Run) -> dict[str, Numbers]:
        """Distances to the run of a retrained model, by task, where both were asked the same."""
        return {
            task: distances(self.samples[task], reference.samples[task], self.settings(task).get("seed", 0))
            for task in self.tasks
            if task in reference.samples and same_questions(self.docs[task], reference.docs[task])
        }

    def mismatches(self, tolerance: float = 1e-6) -> list[str]:
        """Reported values that the samples do not give, a line each: none in a run as lm-eval wrote it."""
        lines = []
        for name, row in self.results["results"].items():
            for key, value in row.items():
                metric = key.removesuffix(",none")
                if name not in self.numbers or not key.endswith(",none") or metric.endswith("_stderr"):
                    continue
                ours = self.numbers[name].get(metric)
                if ours is None or not same(ours.value, value, tolerance):
                    shown = "nothing" if ours is None else f"{ours.value:.6g}"
                    lines.append(f"{name}, {metric}: {value!r} was reported, the samples give {shown}")
        return lines


def group_tasks(below: list[str]) -> list[str]:
    """The tasks that a group's numbers need; those that data may have nothing for are left out with a line."""
    optional = ("elude_retain_named", "elude_cloze", "elude_attack_cross_lingual")
    return [task for task in below if task not in optional]


def same(ours: float, theirs: Any, tolerance: float) -> bool:
    """Whether two values agree; NaN with NaN."""
    if not isinstance(theirs, int | float):
        return False
    return math.isclose(ours, theirs, abs_tol=tolerance) or (math.isnan(ours) and math.isnan(theirs))


def same_questions(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> bool:
    """Whether two logs hold the same questions with the same answers, in the same order."""
    columns = ("entity", "question", "answer", "paraphrased_answer", "perturbed_answer", "named_answers")
    return [[d.get(c) for c in columns] for d in ours] == [[d.get(c) for c in columns] for d in theirs]


def results_file(path: Path) -> Path:
    """A results file by name, or the only one below a folder."""
    if path.is_file():
        return path
    files = sorted(path.rglob("results_*.json")) if path.is_dir() else []
    if len(files) != 1:
        found = f"has {len(files)} results files; name one of them" if files else "has no results file of lm_eval"
        raise UserError(f"{path} {found}")
    return files[0]
