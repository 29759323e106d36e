"""The page of a report: one HTML file with style, script and data inside, which asks for nothing else.

Tables are written here; plots and answers are drawn by ``page.js`` from one compressed block of JSON. What comes from a
run is text: the template escapes it, the block is base64, the script sets text only, and the page's own policy lets no
other script run and nothing be fetched.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval_elude.data import jsonio
from lm_eval_elude.data.files import write_text
from lm_eval_elude.data.manifest import read_manifest
from lm_eval_elude.data.records import QARecord, entity_name
from lm_eval_elude.report import tables
from lm_eval_elude.report.comparison import NamedRun, warnings
from lm_eval_elude.report.page import render
from lm_eval_elude.scoring.benchmarks.elude import ATTACK, CONTROL
from lm_eval_elude.scoring.estimates import Estimate
from lm_eval_elude.scoring.samples import Sample
from lm_eval_elude.text.words import telling_words, words

HERE = Path(__file__).parent
TRAIN_LOG = "train_log.jsonl"
BINS = 20
POINTS = 240  # of a curve: what a plot can show
ATTACK_METRICS = {
    "forget_quality": "FQ", "probability": "probability", "rougeL_recall": "ROUGE-L recall",
    "truth_ratio": "truth ratio", "degenerate": "degenerate",
}  # fmt: skip
SETS = {"elude_forget": "forget set", "elude_retain": "retain set", "elude_world": "world set"}
DEGENERATE, LEAKS, REFUSES = 1, 2, 4  # flags of an answer


def write_report(runs: Sequence[NamedRun], out: Path, title: str = "") -> None:
    """Write the page that compares runs, the first of which is what the others are compared with.

    Raises:
        UserError: a run's samples are not there or cannot be measured.
        OSError: the file cannot be written; an old one is left whole.
    """
    block = json.dumps(_payload(runs), ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    targets = dict.fromkeys(
        t for run in runs for task in run.run.tasks for t in run.run.settings(task).get("targets") or ()
    )
    page = render(
        HERE / "page.html.j2",
        title=title or f"Unlearning {', '.join(list(targets)[:3])}{' …' if len(targets) > 3 else ''}",
        runs=runs,
        tables=tables.tables(runs),
        warnings=warnings(runs),
        about=[(run, _about(run)) for run in runs],
        block=base64.b64encode(gzip.compress(block, mtime=0)).decode(),
    )
    write_text(out, page)


def _payload(runs: Sequence[NamedRun]) -> dict[str, Any]:
    return {
        "runs": [run.name for run in runs],
        "reference": next((i for i, run in enumerate(runs) if run.reference), None),
        "quality": [
            [_value(run, "elude_forget", "forget_quality"), _value(run, "elude_quality", "retain_quality")]
            for run in runs
        ],
        "attacks": [
            {
                "name": "asked plainly" if task == CONTROL else task.removeprefix(ATTACK).replace("_", " "),
                "values": {
                    name: [_value(run, task, metric) for run in runs] for metric, name in ATTACK_METRICS.items()
                },
            }
            for task in tables.attack_tasks(runs)
        ],
        "membership": [_membership(run) for run in runs],
        "distributions": _distributions(runs),
        "training": [_training(run) for run in runs],
        **_answers(runs),
    }


def _value(run: NamedRun, task: str, metric: str) -> list[float] | None:
    """A value with its interval, None where there is none."""
    found = run.estimates.get((task, metric))
    return None if found is None or math.isnan(found.value) else _with_interval(found)


def _with_interval(found: Estimate) -> list[float]:
    low, high = (found.value, found.value) if math.isnan(found.stderr) else found.interval
    return [round(v, 5) for v in (found.value, low, high)]


# ---- what plots show


def _membership(run: NamedRun) -> dict[str, Any] | None:
    """Histograms of the two sides' losses (nats a token) and the ROC of calling the lower one a member."""
    if "elude_mia" not in run.run.tasks:
        return None
    pairs = [sample.values["loss"] for sample in run.run.samples("elude_mia")]
    sides = [[loss for loss in side if math.isfinite(loss)] for side in zip(*pairs, strict=True)]
    if not all(sides):
        return None
    top = max(map(max, sides)) or 1.0
    area = run.estimates["elude_mia", "mia_auc"]
    return {
        "top": top,
        "members": _histogram(sides[0], top),
        "others": _histogram(sides[1], top),
        "roc": _roc(*sides),
        "auc": None if math.isnan(area.value) else _with_interval(area),
    }


def _roc(members: Sequence[float], others: Sequence[float]) -> list[list[float]]:
    """Points (false alarms, members found), thinned to what a plot shows."""
    found = [0, 0]
    points = [[0.0, 0.0]]
    marked = sorted([(loss, 0) for loss in members] + [(loss, 1) for loss in others])
    for i, (loss, side) in enumerate(marked):
        found[side] += 1
        if i + 1 == len(marked) or marked[i + 1][0] > loss:  # equal losses are told apart by nobody
            points.append([found[1] / len(others), found[0] / len(members)])
    keep = max(1, len(points) // POINTS)
    return [[round(v, 4) for v in p] for i, p in enumerate(points) if i % keep == 0 or i + 1 == len(points)]


def _distributions(runs: Sequence[NamedRun]) -> list[dict[str, Any]]:
    """How probability and truth ratio are spread in each set: shares of the samples by twentieth, for each run."""
    found = []
    for task, name in SETS.items():
        for metric, label in (("probability", "probability"), ("truth_ratio", "truth ratio")):
            values = [
                [v for s in run.run.samples(task) if math.isfinite(v := s.values[metric])]
                if task in run.run.tasks
                else []
                for run in runs
            ]
            if any(values):
                shares = [_histogram(own, 1.0) if own else None for own in values]
                found.append({"name": f"{name}: {label}", "shares": shares})
    return found


def _histogram(values: Sequence[float], top: float) -> list[float]:
    """Share of the values in each of equal bins from 0 to ``top``."""
    counts = [0] * BINS
    for value in values:
        counts[min(BINS - 1, max(0, int(value / top * BINS)))] += 1
    return [round(count / len(values), 5) for count in counts]


def _training(run: NamedRun) -> dict[str, Any] | None:
    """Curves of the log of the checkpoint that was scored, if it is still there: losses by step, measures by epoch."""
    folder = run.run.checkpoint
    if folder is None or not (folder / TRAIN_LOG).is_file():
        return None
    steps: dict[str, list[list[float]]] = {}
    epochs: dict[str, list[list[float]]] = {}
    manifest = read_manifest(folder)
    layers = manifest.drift if manifest else {}
    drift = sorted(
        [int(name), moved]
        for name, moved in layers.items()
        if len(name) < 9 and name.isdecimal() and math.isfinite(moved)
    )
    for _, entry in jsonio.lines(folder / TRAIN_LOG, nan=True):
        if not isinstance(entry, dict):
            continue
        measured = entry.get("validation") if isinstance(entry.get("validation"), dict) else {}
        for curves, x, values in ((steps, entry.get("step"), entry), (epochs, entry.get("epoch"), measured)):
            for name, value in (values or {}).items():
                if isinstance(x, int) and isinstance(value, float) and math.isfinite(value):
                    curves.setdefault(name, []).append([x, round(value, 6)])
    return {"steps": {k: _thinned(v) for k, v in steps.items()}, "epochs": epochs, "drift": {"drift": drift}}


def _thinned(points: list[list[float]]) -> list[list[float]]:
    """Means of neighbouring points, as many as a plot can show."""
    size = math.ceil(len(points) / POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [[round(sum(column) / len(group), 6) for column in zip(*group, strict=True)] for group in groups]


# ---- answers


def _answers(runs: Sequence[NamedRun]) -> dict[str, Any]:
    """Every question that was answered, with each run's answer, row by row; a text is its place among ``texts``.

    Attacks ask for the same records again and a model often answers alike: once is enough.
    """
    texts: dict[str, int] = {"": 0}

    def place_of(text: str) -> int:
        return texts.setdefault(text, len(texts))

    sets: list[str] = []
    targets: list[str] = [""]
    rows: dict[tuple[str, str, str], list[Any]] = {}
    for number, run in enumerate(runs):
        for task in sorted(run.run.tasks, key=lambda task: [*SETS, task].index(task)):
            if task == "elude_mia":
                continue
            attack = "control: asked plainly" if task == CONTROL else task.replace(ATTACK, "attack: ")
            name = SETS.get(task, attack)
            sets += [name] * (name not in sets)
            for row, sample in zip(run.run.rows(task), run.run.samples(task), strict=True):
                doc = row["doc"]
                if "generated" not in doc:  # a submission may withhold its texts
                    continue
                targets += [sample.target] * (sample.target not in targets)
                key = (task, sample.target, doc["question"])
                if key not in rows:
                    plain = sample.record if sample.record != doc["question"] else ""
                    place = [sets.index(name), targets.index(sample.target)]
                    rows[key] = [*place, *map(place_of, (doc["question"], plain, doc["answer"])), [None] * len(runs)]
                answer = _answer(doc, sample, task.startswith((ATTACK, "elude_forget")))
                rows[key][-1][number] = [place_of(doc["generated"]), *answer]
    return {"sets": sets, "targets": targets, "texts": list(texts), "rows": list(rows.values())}


def _answer(doc: Mapping[str, Any], sample: Sample, forgotten: bool) -> list[Any]:
    """Probability and ROUGE-L recall in per mille (None: not to be had), flags."""
    values = sample.values
    flags = DEGENERATE * bool(values["degenerate"]) + REFUSES * bool(values["refusal"])
    flags += LEAKS * (forgotten and leaks(doc, sample.record))
    shares = [round(1000 * v) if math.isfinite(v := values[m]) else None for m in ("probability", "rougeL_recall")]
    return [*shares, flags]


def leaks(doc: Mapping[str, Any], question: str) -> bool:
    """Whether a generated answer has half or more of the words that tell the true answer from the wrong ones."""
    record = QARecord(
        entity=entity_name(doc["entity"]), question=question, answer=doc["answer"],
        paraphrased_answer=doc["paraphrased_answer"], perturbed_answer=tuple(doc["perturbed_answer"]),
    )  # fmt: skip
    telling = telling_words(record) - words(doc["question"])
    return bool(telling) and 2 * len(telling & words(doc["generated"])) >= len(telling)


# ---- what was run


def _about(run: NamedRun) -> list[tuple[str, str]]:
    """What a reader needs to run it again, as names and texts."""
    settings, config, results = run.run.settings(run.run.tasks[0]), run.run.config, run.run.results
    found: list[tuple[str, Any]] = [("results", run.run.path), ("again", command(run))]
    for said in settings.get("checkpoint") or ():
        found += [(f"checkpoint {key}", value) for key, value in said.items()]
    if (folder := run.run.checkpoint) and (manifest := read_manifest(folder)):
        found += [("method", manifest.method), ("trained with", manifest.settings), ("base model", manifest.base_model)]
        found += [("trained on", manifest.data_fingerprints), ("training versions", manifest.versions)]
    found += [("targets", ", ".join(settings.get("targets") or ())), ("data", settings.get("data"))]
    prints = {task: run.run.settings(task).get("fingerprint") for task in run.run.tasks}
    found += [("fingerprints of what was asked", prints)]
    found += [(key.replace("_", " "), settings.get(key)) for key in _SETTINGS]
    found += [(key.replace("_", " "), config.get(key, results.get(key))) for key in _HARNESS]
    return [(name, _shown(value)) for name, value in found if value not in (None, "", {}, [])]


_SETTINGS = ("template", "truth_ratio", "guardrail", "attack_file", "seed", "versions")
_HARNESS = ("limit", "batch_size", "device", "model_num_parameters", "transformers_version", "git_hash")


# Keys of --metadata and what the results file calls them; 0, false and nothing are the defaults.
_METADATA = {
    "target": "targets", "dataset": "dataset", "truth_ratio": "truth_ratio", "guardrail": "guardrail",
    "attack_file": "attack_file", "attack_seed": "seed", "attack_prompts": "attack_prompts",
}  # fmt: skip


def command(run: NamedRun) -> str:
    """The ``lm_eval`` command that makes the run again, from what its results file says."""
    config, settings, results = run.run.config, run.run.settings(run.run.tasks[0]), run.run.results
    arguments = config.get("model_args") or {}
    if isinstance(arguments, dict):
        arguments = ",".join(f"{key}={value}" for key, value in arguments.items())
    inside = {task for members in (results.get("group_subtasks") or {}).values() for task in members}
    tasks = ",".join(name for name in results["results"] if name not in inside)
    metadata = {key: settings.get(name) for key, name in _METADATA.items() if settings.get(name)}
    said = {
        "model": config.get("model"), "model_args": arguments, "tasks": tasks, "limit": config.get("limit"),
        "metadata": json.dumps(metadata, ensure_ascii=False), "batch_size": config.get("batch_size"),
    }  # fmt: skip
    flags = [f"--{flag} {shlex.quote(str(value))}" for flag, value in said.items() if value not in (None, "")]
    return f"lm_eval run {' '.join(flags)} --output_path OUT --log_samples"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_shown(item)}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
