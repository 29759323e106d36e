"""The paper's tables and figures from results alone, one function each, with the paper's own values beside ours.

A row is every run of one method with one set of settings (as the checkpoint's manifest says) on one base model: values
are averaged over its targets first, then FQ and RQ are formed, as in the paper, whose values ``paper.toml`` holds.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_elude.data import jsonio, tofu
from lm_eval_elude.data.manifest import Manifest, read_manifest
from lm_eval_elude.data.sets import COLLAPSE
from lm_eval_elude.data.targets import slugify
from lm_eval_elude.report.comparison import NamedRun
from lm_eval_elude.report.tables import Key
from lm_eval_elude.scoring.benchmarks import BENCHMARKS, GROUPS, UTILITY, UTILITY_BENCHMARKS
from lm_eval_elude.scoring.benchmarks.elude import ATTACK, CONTROL
from lm_eval_elude.scoring.estimates import Estimate, average

PAPER: dict[str, Any] = tomllib.loads(Path(__file__).with_name("paper.toml").read_text(encoding="utf-8"))
MODELS = tuple(PAPER["main"])
DISTANCES = PAPER["distances"]["llama-3.1"]
# FQ and RQ of every method.
PAPER["quality"] = {
    model: {method: row[:2] for method, row in (PAPER["distances"].get(model, {}) | known).items()}
    for model, known in PAPER["main"].items()
}
# Settings that say what or where, not how: runs that differ in these alone are one row.
SAME = {
    "target", "seed", "model", "revision", "dataset", "strict", "micro_batch_size", "shard", "compile",
    "gradient_checkpointing", "validate",
}  # fmt: skip
WORLD_ONLY = " world only"
COLLAPSED = "collapsed"
TRIPLE = (("P", "probability"), ("ROUGE", "rougeL_recall"), ("TR", "truth_ratio"))
FQ, RQ = ("elude_quality", "forget_quality"), ("elude_quality", "retain_quality")
MEAN = (UTILITY, "acc")


class Row(NamedTuple):
    """A line of the tables.

    Attributes:
        method: the paper's name of it where it has one; ``original``, ``guardrail``, ``retained``.
        base: the model that was unlearned.
        varied: settings in which it differs from other rows of the method.
        numbers: by task or group and metric.
        runs: results files behind it.
        facts: what else a results file or manifest says, as texts.
        mind: what a reader must know of a part of it.
        spread: standard deviations over seeds, where they are known.
    """

    method: str
    base: str
    varied: Mapping[str, Any]
    numbers: Mapping[Key, Estimate]
    runs: int
    facts: Mapping[str, str]
    mind: tuple[str, ...]
    spread: Mapping[Key, float] = {}

    @property
    def name(self) -> str:
        """Method and what is special about it."""
        return ", ".join([self.method, *(f"{k.replace('_', '-')} {v}" for k, v in self.varied.items()), *self.mind])


class Entry(NamedTuple):
    """A cell: our number or text, None where there is none, the paper's in per cent or as text, and ours over seeds."""

    ours: Estimate | str | None
    paper: float | str | None = None
    spread: float | None = None


Line = tuple[str, list[Entry], int]


class PaperTable(NamedTuple):
    """A table of the paper; ``rows`` are name, entries, and number of runs."""

    name: str
    caption: str
    head: list[str]
    rows: list[Line]


Column = tuple[str, Key, str, int]  # its name, our number, and where the paper has it: section and place in a row


def rows(runs: Sequence[NamedRun]) -> list[Row]:
    """The rows that the runs make, each base model's in the order in which it was given."""
    groups: dict[tuple[str, str, bool], list[tuple[NamedRun, Manifest | None]]] = {}
    for run in runs:
        manifest = _manifest(run)
        of_tofu = "tofu_forget" in run.run.tasks
        base = manifest.base_model.get("name") if manifest else None
        name = "" if of_tofu else Path(str(base or _model(run))).name
        groups.setdefault((name, _method(run, manifest), of_tofu), []).append((run, manifest))
    found = []
    for (base, method, _), members in groups.items():
        settings = [m.settings if m else {} for _, m in members]
        keys = sorted({key for one in settings for key in one} - SAME)
        odd = [key for key in keys if len({str(one.get(key)) for one in settings}) > 1]
        variants: dict[tuple[str, ...], list[int]] = {}
        for i, one in enumerate(settings):
            variants.setdefault(tuple(str(one.get(key)) for key in odd), []).append(i)
        for values, places in variants.items():
            own = [members[i][0] for i in places]
            facts = _facts(own[0], members[places[0]][1])
            varied = dict(zip(odd, values, strict=True))
            mind = {str(run.run.results["results"].get(UTILITY, {}).get("alias", "")) for run in own}
            mind = {alias.replace("elude_", "") for alias in mind if "fast" in alias}
            mind |= {f"--limit {run.run.limit:g}" for run in own if run.run.limit is not None}
            found.append(Row(method, base, varied, _numbers(own), len(own), facts, tuple(sorted(mind))))
    return marked(found)


def marked(found: Sequence[Row]) -> list[Row]:
    """The rows, with a word where less than half of the original's retain quality is left."""
    before = {row.base: row.numbers[RQ].value for row in found if row.method == "original" and RQ in row.numbers}
    return [
        row._replace(mind=(*row.mind, COLLAPSED))
        if RQ in row.numbers and row.numbers[RQ].value < COLLAPSE * before.get(row.base, 0)
        else row
        for row in found
    ]


def about(run: NamedRun) -> set[str]:
    """The targets that a run asks about, as slugs."""
    return {slugify(str(name)) for task in run.run.tasks for name in run.run.settings(task).get("targets") or ()}


def _numbers(runs: Sequence[NamedRun]) -> dict[Key, Estimate]:
    """Every number of several runs: question sets pooled, so that their means are over targets; others averaged."""
    found: dict[Key, Estimate] = {}
    tasks = dict.fromkeys(task for run in runs for task in run.run.tasks)
    pooled = {
        task: [s for run in runs if task in run.run.tasks for s in run.run.samples(task)]
        for task in tasks
        if task.startswith("elude_") and task != "elude_mia"
    }
    for task, samples in pooled.items():
        settings = next(run.run.settings(task) for run in runs if task in run.run.tasks)
        found |= {(task, metric): value for metric, value in BENCHMARKS[task].numbers(samples, settings).items()}
    if pooled.keys() >= {"elude_forget", "elude_retain", "elude_world"}:
        found |= {("elude_quality", metric): value for metric, value in GROUPS["elude_quality"].numbers(pooled).items()}
    if any("elude_attacks" in run.run.results["results"] for run in runs):
        found |= {("elude_attacks", metric): value for metric, value in GROUPS["elude_attacks"].numbers(pooled).items()}
    others: dict[Key, list[Estimate]] = {}
    for run in runs:
        for key, value in {**run.estimates, **_utility(run)}.items():
            if key not in found and key[0] not in pooled:
                others.setdefault(key, []).append(value)
    return found | {key: average(values) for key, values in others.items()}


def _utility(run: NamedRun) -> dict[Key, Estimate]:
    """Accuracies of the harness's own tasks, whose samples are not ours to measure."""
    results, counts = run.run.results["results"], run.run.results.get("n-samples") or {}
    jsonio.check(counts, dict[str, dict[str, int]], f"{run.run.path}: field 'n-samples'")
    found = {}
    for task in (*UTILITY_BENCHMARKS.values(), UTILITY) if UTILITY in results else ():
        value, error = (results.get(task, {}).get(key) for key in ("acc,none", "acc_stderr,none"))
        if isinstance(value, int | float):
            spread = {task: float(error)} if isinstance(error, int | float) else {}
            found[task, "acc"] = Estimate(float(value), spread, counts.get(task, {}).get("effective", 0))
    return found


def _model(run: NamedRun) -> str:
    """The model that was scored, by name: an adapter's before its base's."""
    said = run.run.config.get("model_args") or {}
    if isinstance(said, str):
        said = dict(part.split("=", 1) for part in said.split(",") if "=" in part)
    jsonio.check(said, dict[str, Any], f"{run.run.path}: field 'model_args'")
    return str(next((said[key] for key in ("peft", "pretrained", "model") if said.get(key)), run.name))


def _manifest(run: NamedRun) -> Manifest | None:
    """The manifest of the scored checkpoint; where no task of ours was run, that of the folder of the model's name."""
    if run.run.tasks:
        return read_manifest(run.run.checkpoint)
    places = (Path(), *run.run.path.absolute().parents)
    return next((found for place in places if (found := read_manifest(place / _model(run)))), None)


def _method(run: NamedRun, manifest: Manifest | None) -> str:
    said = run.run.settings(run.run.tasks[0]) if run.run.tasks else {}
    lost = not run.run.tasks and _model(run).count("/") > 1 and not Path(_model(run)).exists()
    if manifest is None and (lost or any("manifest" in part for part in said.get("checkpoint") or ())):
        return run.name  # its checkpoint is not here to say
    if manifest is None or manifest.method == "none":
        return "guardrail" if said.get("guardrail") else "original"
    settings, method = manifest.settings, manifest.method
    if method == "retrained-without" or settings.get("learn") == "retain":
        return "retained"
    kept = method.endswith("+rt") or method.startswith("opt-out")
    return method + (WORLD_ONLY if kept and settings.get("retain_weight") == 0 else "")


def _facts(run: NamedRun, manifest: Manifest | None) -> dict[str, str]:
    size, seconds = (
        run.run.config.get("model_num_parameters"),
        str(run.run.results.get("total_evaluation_time_seconds")),
    )
    epochs = [e["epoch"] for e in manifest.epochs if isinstance(e.get("epoch"), int)] if manifest else []
    found = {"epochs": str(max(epochs))} if epochs else {}
    found |= {"parameters": f"{size:,}"} if isinstance(size, int) else {}
    return found | ({"scoring": f"{float(seconds):.0f}"} if re.fullmatch(r"\d+\.?\d*", seconds) else {})


# ---- the tables


def _table(
    name: str, caption: str, columns: Sequence[Column], found: Sequence[Row], model: str,
    wanted: Callable[[str], bool] = lambda method: method == "opt-out" or method not in DISTANCES,
) -> PaperTable:  # fmt: skip
    """One table: of each base model the paper's methods in its order, then ours; the paper's values of its settings."""
    section = PAPER.get(columns[0][2], {})  # says which rows there are
    own = [row for row in found if any(key in row.numbers for _, key, _, _ in columns) and wanted(row.method)]
    bases = list(dict.fromkeys(row.base for row in own)) or [""]
    lines: list[Line] = []
    for base in bases:
        its = next((m for m in MODELS if m in base.lower()), "")
        known = section.get(its or model, {})
        missing = filter(wanted, known) if its or len(bases) == 1 else ()
        here = [row for row in own if row.base == base]
        for method in dict.fromkeys([*missing, *(row.method for row in here)]):
            for row in [row for row in here if row.method == method] or (None,):
                entries = []
                for _, key, part, place in columns:
                    theirs = PAPER.get(part, {}).get(its or model, {}).get(method) if place >= 0 else None
                    said = theirs[place] if theirs and (row is None or _papers(row)) else None
                    entries.append(Entry(row.numbers.get(key), said, row.spread.get(key)) if row else Entry(None, said))
                label = row.name if row else method
                lines.append((f"{base}: {label}" if len(bases) > 1 else label, entries, row.runs if row else 0))
    beside = f", beside {model} where the model is neither of its two" if section else ", which has no numbers"
    where = f"The paper's {PAPER['where'][name]}{beside}."
    return PaperTable(name, f"{caption} {where}", [column for column, *_ in columns], lines)


def _papers(row: Row) -> bool:
    """Whether what distinguishes a row from others of its method is what the paper has."""
    return all(str(PAPER["settings"].get(key)) == value for key, value in row.varied.items())


# Forget quality never stands alone: the share of gibberish is beside it.
GIBBERISH: Column = ("degen.", ("elude_forget", "degenerate"), "", -1)


def summary(section: str) -> tuple[Column, ...]:
    """FQ, RQ and mean utility, which a section of the paper has in this order."""
    return ("FQ", FQ, section, 0), GIBBERISH, ("RQ", RQ, section, 1), ("Util.", MEAN, section, 2)


MAIN: tuple[Column, ...] = (
    *summary("main")[:3],
    *((name, (task, "acc"), "main", i) for i, (name, task) in enumerate(UTILITY_BENCHMARKS.items(), 2)),
    ("Avg.", MEAN, "main", 10),
)  # fmt: skip
FULL: tuple[Column, ...] = tuple(
    (f"{name} {part}", (f"elude_{name}", metric), "full", 3 * i + j)
    for i, name in enumerate(("forget", "retain", "world"))
    for j, (part, metric) in enumerate(TRIPLE)
)
QUALITY: tuple[Column, ...] = (
    ("FQ", FQ, "quality", 0),
    *((name, ("elude_forget", metric), "full", place) for place, (name, metric) in enumerate(TRIPLE)),
    GIBBERISH, ("RQ", RQ, "quality", 1),
    *((f"degen. {name}", (f"elude_{name}", "degenerate"), "", -1) for name in ("retain", "world")),
)  # fmt: skip
NEVER_KNEW: tuple[Column, ...] = (
    *QUALITY, ("AUC", ("elude_mia", "mia_auc"), "", -1),
    ("reverse", (f"{ATTACK}reverse_query", "forget_quality"), "", -1),
    ("nine", ("elude_attacks", "forget_quality"), "", -1), ("KS p", ("elude_forget", "ks_p_value"), "", -1),
    ("divergence", ("elude_forget", "reference_divergence"), "", -1),
)  # fmt: skip
MEMBERSHIP: tuple[Column, ...] = (
    ("accuracy", ("elude_mia", "mia_accuracy"), "membership", 0),
    ("deviation", ("elude_mia", "mia_accuracy_std"), "membership", 1),
    *((name, ("elude_mia", f"mia_{name.replace(' ', '_').lower()}"), "membership", -1)
      for name in ("AUC", "AUC low", "AUC high")),
)  # fmt: skip
TOFU: tuple[Column, ...] = (
    ("FQ*", ("tofu", "forget_quality"), "tofu", 0), ("degen.", ("tofu_forget", "degenerate"), "tofu", -1),
    ("RQ*", ("tofu", "model_utility"), "tofu", 1),
    *((f"{task.removeprefix('tofu_').replace('_', ' ')} {part}", (task, metric), "tofu", -1)
      for task in tofu.SETS for part, metric in TRIPLE),
)  # fmt: skip


def neighbours(found: Sequence[Row], model: str) -> PaperTable:
    """With the neighbours' retain loss and with world data alone, also averaged over the methods that have both."""
    both = {row.method.removesuffix(WORLD_ONLY) for row in found if row.method.endswith(WORLD_ONLY)}
    caption = "Retain losses on neighbours and world data, and on world data only."
    table = _table(
        "neighbours", caption, summary("neighbours"), found, model, lambda m: m.removesuffix(WORLD_ONLY) in both
    )
    return table._replace(rows=[*table.rows, *ablation(found)])


def ablation(found: Sequence[Row]) -> list[Line]:
    """Means over the methods that were run both ways."""
    pairs = [
        (row, other) for row in found for other in found
        if other.method == row.method + WORLD_ONLY and other.base == row.base
    ]  # fmt: skip
    lines: list[Line] = []
    for name, side in (("mean, neighbours and world", 0), ("mean, world only", 1)) if pairs else ():
        entries = []
        for key in (FQ, GIBBERISH[1], RQ, MEAN):
            have = [pair for pair in pairs if all(key in row.numbers for row in pair)]
            entries.append(Entry(average([pair[side].numbers[key] for pair in have]) if have else None))
        lines.append((name, entries, sum(pair[side].runs for pair in pairs)))
    return lines


def attacks(found: Sequence[Row], model: str) -> PaperTable:
    """FQ under each attack, asked plainly, and the mean of the nine attacks."""
    tasks = sorted({task: 0 for row in found for task, _ in row.numbers if task.startswith(ATTACK)}, key=CONTROL.__eq__)
    columns: list[Column] = [
        (task.removeprefix(ATTACK).replace("_", " "), (task, "forget_quality"), "attacks", -1) for task in tasks
    ]
    columns.append(("nine", ("elude_attacks", "forget_quality"), "attacks", -1))
    caption = "FQ under adversarial prompts; none: the same records asked plainly; nine: the mean of the nine attacks."
    return _table("attacks", caption, columns, found, model)


def cost(found: Sequence[Row], model: str) -> PaperTable:
    """The paper's complexities, and what was measured: epochs trained, size, seconds."""
    theirs, facts = PAPER["cost"]["any"], ("parameters", "epochs", "training", "scoring")
    lines: list[Line] = []
    for method in dict.fromkeys([*theirs, *(row.method for row in found if row.facts)]):
        for row in [row for row in found if row.method == method and row.facts] or (None,):
            entries = [Entry(None, text) for text in theirs.get(method, [None] * 4)]
            entries += [Entry(row.facts.get(key) if row else None) for key in facts]
            lines.append((row.name if row else method, entries, row.runs if row else 0))
    head = [f"{what} {of}" for what in ("training", "inference") for of in ("time", "memory")]
    head += [*facts[:2], "training, s", "scoring, s"]
    caption = (
        f"L: tokens, d: projections; as they stand in the paper's {PAPER['where']['cost']}. Beside it what was run."
    )
    return PaperTable("cost", caption, head, lines)


# Distances are of the initial weights, opt-out's the sliced Wasserstein distance; TOFU's FQ is a p-value.
TABLES: dict[str, Callable[[Sequence[Row], str], PaperTable]] = {
    "main": partial(_table, "main", "Forget and retain quality, and utility.", MAIN),
    "full": partial(_table, "full", "What FQ and RQ are made of.", FULL),
    "distances": partial(
        _table, "distances", "Distances in the regulariser.", summary("distances"), wanted=DISTANCES.__contains__
    ),
    "neighbours": neighbours,
    "attacks": attacks,
    "membership": partial(_table, "membership", "Membership inference; 50 is ideal.", MEMBERSHIP),
    "tofu": partial(_table, "tofu", "TOFU: p-value of the KS test against the retained model; model utility.", TOFU),
    "utility": partial(_table, "utility", "Accuracy by the harness's own tasks, and their mean.", MAIN[3:]),
    "cost": cost,
    "quality": partial(_table, "quality", "FQ, what it is made of, and RQ.", QUALITY, wanted=bool),
    "never_knew": partial(
        _table, "never_knew", "What is compared with a model that never knew; reverse: FQ under the reverse query.",
        NEVER_KNEW, wanted=bool,
    ),
}  # fmt: skip
