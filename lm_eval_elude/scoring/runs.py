"""A finished run read back: lm-eval's results file, and every measurement made again from its logged samples."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lm_eval_elude.data import jsonio
from lm_eval_elude.data.files import sha256
from lm_eval_elude.data.manifest import FILE_NAME
from lm_eval_elude.errors import UserError
from lm_eval_elude.scoring.benchmark import ANSWERS
from lm_eval_elude.scoring.benchmarks import BENCHMARKS, UTILITY
from lm_eval_elude.scoring.likelihood import TruthRatioMean
from lm_eval_elude.scoring.samples import Sample, same_answers

CURVES, SUMMARY = "curves.json", "stress.json"  # in a folder of `elude stress`, whose results are of attacked models


class Run:
    """One results file of ``lm_eval --output_path ... --log_samples``, or the only one below a folder.

    With ``utility`` the utility benchmarks count as tasks of ours. UserError where there is no such file, it is not
    lm-eval's, it has no task of ours, or one of another version.
    """

    def __init__(self, path: str | Path, *, utility: bool = False) -> None:
        self.path = _results_file(Path(path))
        content = jsonio.load(self.path)
        if not isinstance(content, dict) or not all(isinstance(content.get(k), dict) for k in ("results", "configs")):
            raise UserError(f"{self.path}: not a results file of lm-eval (no 'results' and 'configs')")
        for part in ("results", "configs"):
            jsonio.check(content[part], dict[str, dict[str, Any]], f"{self.path}: field {part!r}")
        self.results: dict[str, Any] = content
        self.tasks = [task for task in content["configs"] if task in BENCHMARKS and task in content["results"]]
        if not self.tasks and not (utility and UTILITY in content["results"]):
            raise UserError(f"{self.path}: no task of ELUDe in it")
        versions = jsonio.check(content.get("versions") or {}, dict[str, Any], f"{self.path}: field 'versions'")
        for task in self.tasks:
            ours = BENCHMARKS[task].version
            if (version := versions.get(task, ours)) != ours:
                raise UserError(
                    f"{self.path}: {task} is of version {version!r:.20}, not {ours}; other prompts or numbers: score "
                    "the model again"
                )
        self._samples: dict[str, list[Sample]] = {}

    def settings(self, task: str) -> dict[str, Any]:
        """What a task was run with: targets, data and its fingerprint, checkpoint, template, versions, numbers.

        UserError where the results file does not say.
        """
        metadata = self.results["configs"].get(task, {}).get("metadata")
        settings = metadata.get("elude") if isinstance(metadata, dict) else None
        if not isinstance(settings, dict) or not settings.keys() >= _SETTINGS.keys():
            raise UserError(f"{self.path}: {task} does not say what was scored (configs, metadata, elude)")
        _check(settings, {**_SETTINGS, "checkpoint": list[dict[str, Any]] | None}, f"{self.path}: {task}")
        if not 0 <= settings["seed"] < 1 << 32:
            raise UserError(f"{self.path}: {task}: seed {settings['seed']} is none from 0 to 2**32 - 1")
        return settings

    @property
    def config(self) -> dict[str, Any]:
        """lm-eval's own settings of the run."""
        config = self.results.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def limit(self) -> float | None:
        """What ``--limit`` was, None where all was scored."""
        limit = self.config.get("limit")
        return limit if isinstance(limit, int | float) else None

    @cached_property
    def checkpoint(self) -> Path | None:
        """The folder of the checkpoint that was scored, None where what lies there now is not it."""
        scored = self.settings(self.tasks[0]).get("checkpoint") or () if self.tasks else ()
        for identity in scored[:1]:  # an adapter's; what it is put on may have forgotten, and is not what was scored
            for folder in (Path(str(identity.get("name", ""))), *self.path.absolute().parents[:4]):
                if (file := folder / FILE_NAME).is_file() and sha256(file) == identity.get("manifest"):
                    return folder
        return None

    def sample_file(self, task: str) -> Path:
        """Where a task's samples are logged; UserError where they are not there."""
        # With --output_path FILE.json lm-eval puts the file's name in the place of "results".
        dated = re.search(r"_(\d{4}-\d\d-\d\dT[\d.-]+)$", self.path.stem)
        date = dated[1] if dated else self.path.stem.removeprefix("results_")
        file = self.path.with_name(f"samples_{task}_{date}.jsonl")
        if not file.is_file():
            raise UserError(f"{file}: the samples of {task} are not there; run lm_eval with --log_samples")
        return file

    def rows(self, task: str) -> list[dict[str, Any]]:
        """The logged rows of a task, in the order of its documents."""
        rows = []
        for where, row in jsonio.lines(self.sample_file(task)):
            if not isinstance(row, dict) or not isinstance(row.get("doc"), dict) or "id" not in row["doc"]:
                raise UserError(f"{where}: a table with a doc that has an id is expected, got {row!r:.80}")
            _check(row["doc"], _DOC, where)
            rows.append(row)
        if not rows:
            raise UserError(f"{self.sample_file(task)}: no sample in it")
        return sorted(rows, key=lambda row: row["doc"]["id"])

    def samples(self, task: str) -> list[Sample]:
        """The measurements of a task, made again from its log; UserError where a row is not one of this task."""
        if task not in self._samples:
            self._samples[task] = self._measure(task, self.rows(task))
        return self._samples[task]

    def samples_beside(self, task: str, reference: Run) -> list[Sample]:
        """The measurements of a task with what the run of a reference says of each document, if it has the same.

        Else they are without any reference: one that was asked when they were scored is another model.
        """
        paired = self._pairs(task, reference)
        if paired is None:
            logged = self.rows(task)
            alone = [{key: value for key, value in row["doc"].items() if key != "reference"} for row in logged]
            return self._measure(task, [{**row, "doc": doc} for row, doc in zip(logged, alone, strict=True)])
        rows = []
        for row, other in paired:
            answers = {key: other["doc"][key] for key in ANSWERS if key in other["doc"]}
            before = row["doc"].get("reference") or {}
            if before.get("generated") != answers.get("generated"):  # then the run was scored beside another model
                before = {}
            rows.append({**row, "doc": {**row["doc"], "reference": {**before, **answers}}})
        return self._measure(task, rows)

    def _pairs(self, task: str, reference: Run) -> list[tuple[dict[str, Any], dict[str, Any]]] | None:
        """The rows of both runs; None where the other was not asked about the same answers in the same way."""
        if task not in reference.tasks:
            return None
        ours, others = (run.settings(task).get("evaluator") for run in (self, reference))
        if ours and others and ours != others:  # TOFU's, whose prompts differ
            return None
        if [s[:3] for s in self.samples(task)] != [s[:3] for s in reference.samples(task)]:
            return None
        pairs = [*zip(self.rows(task), reference.rows(task), strict=True)]
        alike = (
            row["doc"].get("question") == other["doc"].get("question") and same_answers(row["doc"], other["doc"])
            for row, other in pairs
        )
        return pairs if all(alike) else None

    def _measure(self, task: str, rows: Sequence[Mapping[str, Any]]) -> list[Sample]:
        settings, samples = self.settings(task), []
        for number, row in enumerate(rows, 1):
            try:
                samples.append(BENCHMARKS[task].measure(row, settings))
            except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
                where = f"{self.sample_file(task).name}, row {number}"
                problem = f"{error} is missing" if isinstance(error, KeyError) else repr(error)
                raise UserError(f"{where}: cannot be measured ({problem})") from None
        return samples

    def reported(self, name: str) -> Mapping[str, Any]:
        """The row of a task or group as the results file has it, by metric without the filter's name."""
        row = self.results["results"][name]
        return {key.removesuffix(",none"): value for key, value in row.items() if key.endswith(",none")}


# What is read of settings and documents: others may have written them.
_SETTINGS = {"targets": list[str], "truth_ratio": TruthRatioMean, "seed": int}
_DOC = {
    "id": int, "entity": str, "question": str, "plain_question": str, "answer": str, "paraphrased_answer": str,
    "generated": str | None, "sampled": list[str], "fact": list[str], "answer_scores": list[list[float]],
    "perturbed_answer": list[str],
}  # fmt: skip


def _check(table: Mapping[str, Any], hints: Mapping[str, Any], where: str) -> None:
    for name in hints.keys() & table.keys():
        jsonio.check(table[name], hints[name], f"{where}: field {name!r}")


def results_files(folder: Path) -> list[Path]:
    """The results files below a folder, without those of attacked models, which are no runs of their own."""
    attacked = {path.parent for name in (CURVES, SUMMARY) for path in folder.rglob(name)}
    return [path for path in sorted(folder.rglob("results_*.json")) if path.parent not in attacked]


def _results_file(path: Path) -> Path:
    if path.is_file():
        return path
    files = results_files(path) if path.is_dir() else []
    if len(files) != 1:
        what = (
            f"has {len(files)} results files; name one of them" if files else "is no results file, and has none in it"
        )
        raise UserError(f"{path} {what}")
    return files[0]
