"""The page of a report: one HTML file with style, script, plots and data inside, which asks for nothing else.

Tables and plots are written here; answers are shown by ``page.js`` from one compressed block of JSON. What comes from a
run is text: the template and the plots escape it, the block is base64, the script sets text only, and the page's own
policy lets no other script run and nothing be fetched.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import roc_curve

from lm_eval_elude.data import jsonio
from lm_eval_elude.data.files import write_text
from lm_eval_elude.data.manifest import read_manifest
from lm_eval_elude.data.records import QARecord, entity_name
from lm_eval_elude.errors import UserError
from lm_eval_elude.report import plots, tables
from lm_eval_elude.report.comparison import NamedRun
from lm_eval_elude.report.frame import FORGET_SETS, SECTIONS, Table, attack_name
from lm_eval_elude.report.page import render
from lm_eval_elude.report.verdict import gibberish, original, verdicts, warnings
from lm_eval_elude.scoring.answers import names
from lm_eval_elude.scoring.benchmarks import BENCHMARKS
from lm_eval_elude.scoring.benchmarks.elude import ATTACK, CLOZE, CONTROL, LEAK
from lm_eval_elude.scoring.metrics import METRICS
from lm_eval_elude.scoring.samples import Sample
from lm_eval_elude.stress.outcome import REFERENCE
from lm_eval_elude.text.words import fact_tokens, words

HERE = Path(__file__).parent
TRAIN_LOG = "train_log.jsonl"
BINS = 20
POINTS = 240  # of a curve: what a plot can show
UNSHOWN = ("elude_mia", LEAK)  # tasks without one answer to a question
SETS = {task: name for task, name in SECTIONS.items() if task in BENCHMARKS and task not in UNSHOWN}
FOLDED = ("Distributions", "Attacks on the weights", "Training")  # parts of the plots that a reader has to open
LABELS = {*SECTIONS.values(), *(metric.label for metric in METRICS.values())}  # by which a table's rows are grouped
DEGENERATE, LEAKS, REFUSES = 1, 2, 4  # flags of an answer
Points = list[list[float]]  # (x, y)


def write_report(runs: Sequence[NamedRun], out: Path, title: str = "", standing: str = "") -> None:
    """Write the page that compares runs, the first of which is what the others are compared with.

    ``standing`` is a line below the title, which a board puts anew where the rank changes. UserError where a run's
    samples are not there or cannot be measured. OSError where the file cannot be written; an old one is left whole.
    """
    answers = _answers(runs)
    chosen_by, samples = _samples(runs, answers)
    block = json.dumps(answers, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    targets = dict.fromkeys(
        t for run in runs for task in run.run.tasks for t in run.run.settings(task).get("targets") or ()
    )
    of = ", ".join(list(targets)[:3]) or "TOFU's authors"
    page = render(
        HERE / "page.html.j2",
        groups=_groups,
        title=title or f"Unlearning {of}{' …' if len(targets) > 3 else ''}",
        standing=standing,
        runs=runs,
        colors=plots.COLORS[: len(runs)],
        verdicts=verdicts(runs),
        chosen_by=chosen_by,
        samples=samples,
        tables=tables.tables(runs),
        folded=FOLDED,
        warnings=warnings(runs),
        plots=_plots(runs),
        about=[(run, _about(run)) for run in runs],
        block=base64.b64encode(gzip.compress(block, mtime=0)).decode(),
    )
    write_text(out, page)


def _groups(table: Table) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """The rows of a table, label and cells, under the set or the metric that their labels begin with."""
    groups: dict[str, list[tuple[str, list[str]]]] = {}
    for name, *cells in table.cells.itertuples(name=None):
        group, _, label = name.partition(": ")
        group, label = (group, label) if label and group in LABELS else ("", name)
        groups.setdefault(group, []).append((label, cells))
    return list(groups.items())


# ---- plots
def _plots(runs: Sequence[NamedRun]) -> dict[str, list[tuple[str, str]]]:
    """The plots that the runs have numbers for, title and drawing, by the part of the page."""
    parts = {
        "Quality": _quality, "Attacks": _attacks, "Membership inference": _membership, "Distributions": _distributions,
        "Attacks on the weights": _weights, "Training": _training,
    }  # fmt: skip
    # A drawing stands within the page without the head of a file.
    drawn = {name: [(title, svg[svg.index("<svg") :]) for title, svg in part(runs)] for name, part in parts.items()}
    return {name: part for name, part in drawn.items() if part}


def _quality(runs: Sequence[NamedRun]) -> Iterator[tuple[str, str]]:
    """What is forgotten against what is kept, of ELUDe and of TOFU."""
    for task, forgotten, kept, *labels in (
        ("elude_forget", ("elude_forget", "forget_quality"), ("elude_quality", "retain_quality"), "FQ, %", "RQ, %"),
        ("tofu_forget", ("tofu", "forget_quality"), ("tofu", "model_utility"), "KS p, %", "utility, %"),
    ):
        points = []
        for place, run in enumerate(runs):
            x, y = run.estimate(*forgotten), run.estimate(*kept)
            if x and y and not math.isnan(x.value + y.value):
                points.append(plots.Point(place, run.name, x, y, gibberish(run).get(task, 0.0), run.reference))
        if points:
            title = "Forgotten against kept, with 95 % intervals; a cross answers gibberish"
            yield title, plots.quality(points, *labels)


def _attacks(runs: Sequence[NamedRun]) -> Iterator[tuple[str, str]]:
    """A plot for each share that is measured under the attacks, with the plain questions first."""
    tasks = tables.attack_tasks([task for run in runs for task in run.run.tasks])
    for metric in METRICS.values():
        series = {run.name: [run.estimate(task, metric.name) for task in tasks] for run in runs}
        of_all = [values for values in series.values() if sum(value is not None for value in values) > 1]
        if metric.unit == "share" and of_all:
            yield f"{metric.label}, in per cent", plots.bars("", list(map(attack_name, tasks)), series)


def _membership(runs: Sequence[NamedRun]) -> Iterator[tuple[str, str]]:
    """The ROC of calling the lower loss a member, and histograms of the two sides' losses (nats per token)."""
    losses = []
    for place, run in enumerate(runs):
        measured = run.run.samples("elude_mia") if "elude_mia" in run.run.tasks else []
        pairs = [sample.values["loss"] for sample in measured]
        sides = [[loss for loss in side if math.isfinite(loss)] for side in zip(*pairs, strict=True)]
        if sides and all(sides):
            losses.append((place, run, sides))
    if losses:
        curves = [plots.Line(place, roc(*sides), run.reference) for place, run, sides in losses]
        yield "ROC of the loss", plots.roc(curves)
    for place, run, (members, others) in losses:
        top = max(*members, *others) or 1.0
        shares = [plots.Line(place, histogram(members, top)), plots.Line(place, histogram(others, top), dashed=True)]
        title = f"{run.name}: losses of the forget set and its paraphrase (dashed)"
        yield title, plots.histograms(shares, top, "loss, nats per token")


def roc(members: Sequence[float], others: Sequence[float]) -> Points:
    """Points (false alarms, members found), thinned to what a plot shows."""
    sides = np.repeat([1, 0], [len(members), len(others)])
    rates = roc_curve(sides, -np.array([*members, *others]), drop_intermediate=False)[:2]
    points = np.stack(rates, axis=1)
    shown = {*range(0, len(points), max(1, len(points) // POINTS)), len(points) - 1}
    return points[sorted(shown)].tolist()


def _distributions(runs: Sequence[NamedRun]) -> Iterator[tuple[str, str]]:
    """How probability and truth ratio are spread in each set: shares of the samples by twentieth, for each run."""
    for task, name in SETS.items():
        for metric, label in (("probability", "probability"), ("truth_ratio", "truth ratio")):
            shares = []
            for place, run in enumerate(runs):
                samples = run.run.samples(task) if task in run.run.tasks else []
                values = [sample.values[metric] for sample in samples if math.isfinite(sample.values[metric])]
                if values:
                    shares.append(plots.Line(place, histogram(values, 1.0), run.reference))
            if shares:
                yield f"{name}: {label}", plots.histograms(shares, 1.0, label)


def histogram(values: Sequence[float], top: float) -> list[float]:
    """Share of the values in each of equal bins from 0 to ``top``; those beyond count in the last."""
    counts, _ = np.histogram(np.clip(values, 0, top), bins=BINS, range=(0, top))
    return (counts / len(values)).tolist()


def _training(runs: Sequence[NamedRun]) -> Iterator[tuple[str, str]]:
    """Curves of the logs of the checkpoints that were scored: losses by step, measures by epoch, drift by layer."""
    names = {"step": "", "epoch": "validation: ", "layer": "weights of a layer, over their norm: "}
    curves = [training(run.run.checkpoint) for run in runs]
    for axis, prefix in names.items():
        for name in dict.fromkeys(name for of_run in curves for name in of_run[axis]):
            lines = [
                plots.Line(place, of_run[axis][name])
                for place, of_run in enumerate(curves)
                if len(of_run[axis].get(name, ())) > 1
            ]
            if lines:
                yield prefix + name.replace("_", " "), plots.curves(lines, axis)


def _weights(runs: Sequence[NamedRun]) -> Iterator[tuple[str, str]]:
    """What is known along each attack on the weights: the highest of its settings, dashed that of the reference."""
    brought = [(place, run.outcome.curves) for place, run in enumerate(runs) if run.outcome]
    for attack in dict.fromkeys(attack for _, curves in brought for attack, _ in curves):
        lines = [
            plots.Line(place, [(at, 100 * share) for at, share in points], role == REFERENCE)
            for place, curves in brought
            for (name, role), points in curves.items()
            if name == attack and len(points) > 1
        ]
        if lines:
            title = f"{attack.replace('_', ' ')}: truth first, % (never knew: dashed)"
            yield title, plots.curves(lines, "steps, bits or share")


def training(folder: Path | None) -> dict[str, dict[str, Points]]:
    """The curves of one checkpoint's log by step, epoch and layer, none where it is not there."""
    curves: dict[str, dict[str, Points]] = {"step": {}, "epoch": {}, "layer": {}}
    if folder is None or not (folder / TRAIN_LOG).is_file():
        return curves
    manifest = read_manifest(folder)
    for _, entry in jsonio.lines(folder / TRAIN_LOG):
        if not isinstance(entry, dict):
            continue
        measured = entry.get("validation") if isinstance(entry.get("validation"), dict) else {}
        for axis, values in (("step", entry), ("epoch", measured)):
            for name, value in (values or {}).items():
                if isinstance(x := entry.get(axis), int) and isinstance(value, float) and math.isfinite(value):
                    curves[axis].setdefault(name, []).append([x, value])
    drift = manifest.drift if manifest else {}
    layers = [[int(n), v] for n, v in drift.items() if len(n) < 9 and n.isdecimal() and math.isfinite(v)]
    curves["layer"] = {"drift": sorted(layers)} if layers else {}
    curves["step"] = {name: _thinned(points) for name, points in curves["step"].items()}
    return curves


def _thinned(points: Points) -> Points:
    """Means of neighbouring points, as many as a plot can show."""
    size = math.ceil(len(points) / POINTS)
    return [np.mean(points[i : i + size], axis=0).tolist() for i in range(0, len(points), size)]


# ---- answers
def _samples(runs: Sequence[NamedRun], shown: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """By which run three questions of a forget set that all runs answered were chosen, and the questions.

    They are those whose true answer this run, the last unlearned one, finds likeliest, in the middle, and least likely.
    """
    unlearned = [place for place, run in enumerate(runs) if run is not original(runs) and not run.reference]
    of, texts, tasks = (unlearned or [len(runs) - 1])[-1], shown["texts"], shown["tasks"]
    rows = [
        row for row in shown["rows"] if tasks[row[0]] in FORGET_SETS and all(row[-1]) and row[-1][of][1] is not None
    ]
    rows.sort(key=lambda row: -row[-1][of][1])
    articles = []
    for place in sorted({0, len(rows) // 2, len(rows) - 1}) if rows else ():
        task, _, number, question, _, candidates, given = rows[place]
        answers = [
            {
                "text": texts[text],
                "probability": "" if p is None else f"{p / 10:.1f} %",
                "gibberish": flags & DEGENERATE,
            }
            for text, p, _, flags, *_ in given
        ]
        truth = texts[shown["candidates"][candidates][1]]
        key = f"{tasks[task]}-{number}"  # of its row in the page's address
        articles.append({"key": key, "question": texts[question], "truth": truth, "answers": answers})
    return runs[of].title, articles


def _answers(runs: Sequence[NamedRun]) -> dict[str, Any]:
    """Every question that was answered, with each run's answer, row by row.

    A row has places: of its set (and task), of its target, its number in the task, of question, plain question and
    candidates, and for each run None or what :func:`_answer` gives. Attacks ask for the same records again and a model
    often answers alike, so that texts, lists of candidates and what stands around the question in a prompt are kept
    once. A list of candidates begins with the number of those that name somebody.
    """
    texts: dict[str, int] = {"": 0}
    candidates: dict[tuple[int, ...], int] = {}
    prompts: dict[tuple[str, str | None], int] = {}
    sets: dict[str, int] = {}
    targets: dict[str, int] = {"": 0}
    rows: dict[tuple[str, str, str], list[Any]] = {}

    def place(table: dict[Any, int], value: Any) -> int:
        return table.setdefault(value, len(table))

    for number, run in enumerate(runs):
        for task in sorted(run.run.tasks, key=lambda task: [*SETS, task].index(task)):
            if task in UNSHOWN:
                continue
            forgotten = task.startswith((ATTACK, "elude_forget", CLOZE))
            for row, sample in zip(run.run.rows(task), run.run.samples(task), strict=True):
                doc = row["doc"]
                if doc.get("generated") is None:  # only log-probabilities were asked for
                    continue
                needed = ("question", "answer", *(("entity", "perturbed_answer") if forgotten else ()))
                if missing := [name for name in needed if not doc.get(name)]:
                    raise UserError(f"{run.run.sample_file(task)}: the doc with id {doc['id']} has no {missing[0]}")
                key = (task, sample.target, doc["question"])
                if key not in rows:
                    named, wrong = (doc.get(name) or () for name in ("named_answers", "perturbed_answer"))
                    answers = (doc["answer"], doc.get("paraphrased_answer") or "", *wrong, *named)
                    plain = sample.record if sample.record != doc["question"] else ""
                    rows[key] = [
                        place(sets, task), place(targets, sample.target), doc["id"], place(texts, doc["question"]),
                        place(texts, plain), place(candidates, (len(named), *(place(texts, text) for text in answers))),
                        [None] * len(runs),
                    ]  # fmt: skip
                prompt = place(prompts, _around(_prompt(row), doc["question"]))
                flags = LEAKS * (forgotten and leaks(doc, sample.record))
                rows[key][-1][number] = [place(texts, doc["generated"]), *_answer(doc, sample, flags, prompt)]
    return {
        "runs": [run.title for run in runs],
        "tasks": list(sets),
        "sets": [SETS.get(task) or ("control: asked plainly" if task == CONTROL else f"attack: {attack_name(task)}")
                 for task in sets],
        "targets": list(targets),
        "texts": list(texts),
        "candidates": list(candidates),
        "prompts": list(prompts),
        "rows": list(rows.values()),
    }  # fmt: skip


def _answer(doc: Mapping[str, Any], sample: Sample, flags: int, prompt: int) -> list[Any]:
    """Probability and ROUGE-L recall in per mille (None: not to be had), flags, place of the prompt, and of every
    candidate the log-probability a token in hundredths of a nat."""
    values = sample.values
    flags += DEGENERATE * bool(values["degenerate"]) + REFUSES * bool(values["refusal"])
    shares = [round(1000 * v) if math.isfinite(v := values[m]) else None for m in ("probability", "rougeL_recall")]
    means = [total / count if count else math.nan for total, count in doc["answer_scores"]]
    return [*shares, flags, prompt, *(round(100 * mean) if math.isfinite(100 * mean) else None for mean in means)]


def _prompt(row: Mapping[str, Any]) -> str:
    """The text that the model was sent for its greedy answer, "" where the log does not have it."""
    arguments = row.get("arguments")
    last = list(arguments.values())[-1] if isinstance(arguments, dict) and arguments else None
    text = last.get("arg_0") if isinstance(last, dict) else None
    return text if isinstance(text, str) else ""


def _around(prompt: str, question: str) -> tuple[str, str | None]:
    """What stands before and after the question; the whole prompt and None where it does not have it as it is."""
    before, asked, after = prompt.partition(question)
    return (before, after) if asked else (prompt, None)


def leaks(doc: Mapping[str, Any], question: str) -> bool:
    """Whether an answer gives the fact away: half or more of the words that tell the true one from the wrong ones.

    Words of the question as it was asked are no secret, unless it lists the answers to choose from. A question that
    describes the target without a name (``names``) is given away by that name.
    """
    if doc.get("names"):
        return names(doc["generated"], doc["names"])
    record = QARecord(
        entity=entity_name(doc["entity"]), question=question, answer=doc["answer"],
        paraphrased_answer=doc.get("paraphrased_answer") or "", perturbed_answer=tuple(doc["perturbed_answer"]),
    )  # fmt: skip
    lists_answers = any(text in doc["question"] for text in (record.answer, record.paraphrased_answer))
    telling = fact_tokens(record) - (frozenset() if lists_answers else words(doc["question"]))
    return bool(telling) and 2 * len(telling & words(doc["generated"])) >= len(telling)


# ---- what was run
def _about(run: NamedRun) -> list[tuple[str, str]]:
    """What a reader needs to run it again, as names and texts."""
    settings, config, results = run.settings, run.run.config, run.run.results
    facts: list[tuple[str, Any]] = [("results", run.run.path), ("again", command(run) if config else "")]
    for identity in settings.get("checkpoint") or ():
        facts += [(f"checkpoint {key}", value) for key, value in identity.items()]
    if manifest := run.manifest:
        facts += [("method", manifest.method), ("trained with", manifest.settings), ("base model", manifest.base_model)]
        facts += [("trained on", manifest.data_fingerprints), ("training versions", manifest.versions)]
    facts += [("targets", ", ".join(settings.get("targets") or ())), ("data", settings.get("data"))]
    prints = {task: run.run.settings(task).get("fingerprint") for task in run.run.tasks}
    facts += [("fingerprints of what was asked", prints)]
    facts += [(key.replace("_", " "), settings.get(key)) for key in _SETTINGS]
    facts += [(key.replace("_", " "), config.get(key, results.get(key))) for key in _HARNESS]
    return [(name, _shown(value)) for name, value in facts if value not in (None, "", {}, [])]


_SETTINGS = ("template", "truth_ratio", "guardrail", "attack_file", "seed", "versions")
_HARNESS = ("limit", "batch_size", "device", "model_num_parameters", "transformers_version", "git_hash")


# Keys of --metadata and what the results file calls them; 0, false and nothing are the defaults.
_METADATA = {
    "target": "targets", "dataset": "dataset", "truth_ratio": "truth_ratio", "guardrail": "guardrail",
    "attack_file": "attack_file", "attack_seed": "seed", "attack_prompts": "attack_prompts", "reference": "reference",
    "original": "original", "mia_reference": "mia_reference",
}  # fmt: skip
_TOFU_METADATA = {
    "tofu_split": "split", "tofu_data": "dataset", "tofu_evaluator": "evaluator", "reference": "reference",
}  # fmt: skip


def command(run: NamedRun) -> str:
    """The ``lm_eval`` command that makes the run again, from what its results file says."""
    config, results = run.run.config, run.run.results
    arguments = config.get("model_args") or {}
    if isinstance(arguments, dict):
        arguments = ",".join(f"{key}={value}" for key, value in arguments.items())
    where = f"{run.run.path}: field 'group_subtasks'"
    groups = jsonio.check(results.get("group_subtasks") or {}, dict[str, list[str]], where)
    inside = {task for members in groups.values() for task in members}
    tasks = ",".join(name for name in results["results"] if name not in inside)
    metadata: dict[str, Any] = {}
    for task in run.run.tasks:
        settings = run.run.settings(task)
        names_of = _TOFU_METADATA if "split" in settings else _METADATA
        metadata |= {key: settings[name] for key, name in names_of.items() if settings.get(name)}
    options = {
        "model": config.get("model"), "model_args": arguments, "tasks": tasks, "limit": config.get("limit"),
        "metadata": json.dumps(metadata, ensure_ascii=False), "batch_size": config.get("batch_size"),
        "system_instruction": results.get("system_instruction"),
    }  # fmt: skip
    flags = [f"--{flag} {shlex.quote(str(value))}" for flag, value in options.items() if value not in (None, "")]
    if isinstance(drawn := config.get("gen_kwargs"), dict) and drawn:
        flags.append(" ".join(["--gen_kwargs", *(shlex.quote(f"{key}={value!r}") for key, value in drawn.items())]))
    return f"lm_eval run {' '.join(flags)} --output_path OUT --log_samples"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_shown(item)}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
