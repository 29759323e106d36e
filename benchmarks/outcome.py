"""What methods make of the bundled model: ``python benchmarks/outcome.py benchmarks/final.toml``.

A plan has blocks of methods, targets, seeds and settings (further flags of ``optout-train``). Each run trains by
``optout-train``, is scored by a group of tasks and attacked by relearning on one half of the facts; it ends as a row of
``benchmarks/results/PLAN.csv``. A run that has its row is not done again; of one that was interrupted ``--work`` keeps
the checkpoint, the scores and the rows of attacks. How many are left, and how many hours they take, is said first.

    [[runs]]
    methods = ["npo+rt", "name-swap"]      # or original, retrained, guardrail, which are not trained
    targets = ["Cristiano Ronaldo"]
    seeds = [0, 1, 2]                      # default: [0]
    settings = ["--learning_rate 1e-4"]    # default: [""], the method's own
    group = "elude"                        # tasks  [default: elude_quality,elude_mia]
    start = "npo+rt --learning_rate 3e-4"  # default: the bundled model is what is trained; UNDO goes on from another
    attacks = ["relearn_half", "depth"]    # of `elude stress --suite standard`, or none  [default: relearn_half]

What stands before the first block holds for all that do not say otherwise. Where a run has more attacks than
relearning on half, recovery at each of their points is added to ``PLAN-attacks.csv``.
The models retrained without a target, of which only Ronaldo's is bundled, are made by ``tools/mini`` into
``--work``/retrained. The rows of all attacks lie in ``--work``/attacks.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from itertools import chain, groupby, product
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from commands import OFFLINE

from lm_eval_elude.data import bundled
from lm_eval_elude.data.files import file_hashes
from lm_eval_elude.data.manifest import FILE_NAME, read_manifest
from lm_eval_elude.data.targets import slugify
from lm_eval_elude.leaderboard import rank
from lm_eval_elude.metrics.compare import recovery
from lm_eval_elude.metrics.estimates import mean_of
from lm_eval_elude.stress.table import (
    CHECKPOINT,
    DEPTH,
    NONE,
    ORIGINAL,
    RETRAINED,
    Row,
    append,
    depth_score,
    points_of,
    read,
)  # fmt: skip
from lm_eval_elude.tasks import leaves
from lm_eval_elude.tasks.runs import Run as Scores

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.append(str(ROOT))  # for tools/
BASELINES = ("original", "retrained", "guardrail")
HALF, STEPS = "relearn_half", (5, 20, 80)
GUESS = 600.0  # seconds of a run, where no row says
NUMBERS: dict[str, tuple[str, str]] = {  # a column's task or group, and metric; empty where the group lacks it
    "FQ": ("elude_forget", "forget_quality"), "RQ": ("elude_quality", "retain_quality"),
    "named": ("elude_quality", "named_retain_quality"), "P": ("elude_forget", "probability"),
    "mc": ("elude_forget", "mc_accuracy"), "cloze": ("elude_cloze", "mc_accuracy"),
    "AUC": ("elude_mia", "mia_auc"), "repetition": ("elude_forget", "repetition"),
    "gibberish": ("elude_forget", "gibberish"), "attacked_FQ": ("elude_attacks", "attacked_forget_quality"),
    "attacked_mc": ("elude_attacks", "attacked_mc_accuracy"), "refusal": ("elude_forget", "refusal"),
}  # fmt: skip


class Run(NamedTuple):
    method: str
    target: str
    seed: str
    settings: str
    group: str
    start: str
    attacks: tuple[str, ...]

    @property
    def key(self) -> tuple[str, ...]:
        return self[:4]

    @property
    def name(self) -> str:
        return slugify(" ".join(self.key))


class Models(NamedTuple):
    """What a plan is about; both models are made where they are not there yet, of a target in a work folder."""

    original: Callable[[str, Path], Path]
    retrained: Callable[[str, Path], Path]
    name: str = ""  # of the original for ``optout-train``, where that is not its folder
    dtype: str = "float32"  # in which all are scored, and in which the attacks' passes compute


COLUMNS = (
    *Run._fields[:4], "version", "model", *NUMBERS, "worst_mc", "odd_words", "score",
    *(f"recovery_{steps}" for steps in STEPS), "depth", "train_seconds", "seconds",
)  # fmt: skip
POINT_COLUMNS = (*Run._fields[:4], "attack", "setting", "step", "counts", "recovery")


def read_plan(path: Path) -> list[Run]:
    """The runs of a plan, block by block: targets, then seeds, then methods, then settings."""
    runs = []
    plan = tomllib.loads(path.read_text(encoding="utf-8"))
    for block in ({**plan, **own} for own in plan.pop("runs")):
        attacks = tuple(block.get("attacks", [HALF]))
        others = (block.get("group", "elude_quality,elude_mia"), block.get("start", ""), attacks)
        for target, seed, method, settings in product(
            block["targets"], block.get("seeds", [0]), block["methods"], block.get("settings", [""])
        ):
            runs.append(Run(method, target, str(seed), settings, *others))
    return runs


def key_of(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in Run._fields[:4])


def waiting(plan: Path, rows: Sequence[Mapping[str, str]]) -> list[Run]:
    """The runs of a plan that have no row yet."""
    done = {key_of(row) for row in rows}
    return [run for run in read_plan(plan) if run.key not in done]


def read_rows(table: Path) -> list[dict[str, str]]:
    if not table.is_file():
        return []
    with table.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def strongest(row: Mapping[str, str]) -> str:
    """A row's recovery after the number of steps that recovers most; empty where none counts."""
    found = [row[name] for name in (f"recovery_{steps}" for steps in STEPS) if row.get(name)]
    return max(found, key=float, default="")


def points_file(table: Path) -> Path:
    """Where the points of all attacks of a table's runs are."""
    return table.with_name(f"{table.stem}-attacks.csv")


def expected(run: Run, rows: list[dict[str, str]], guesses: Mapping[str, float]) -> float:
    """Seconds that a run takes: as long as the method's rows, otherwise as guessed, otherwise as all rows."""
    own = [float(row["seconds"]) for row in rows if row["method"] == run.method]
    if run.method in guesses and not own:
        return guesses[run.method]
    return fmean(own or [float(row["seconds"]) for row in rows] or [GUESS])


def command(*words: str | Path) -> None:
    """Run a module of this environment; where it fails, so do we, with its last words."""
    done = subprocess.run([sys.executable, "-m", *map(str, words)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(map(str, words))}:\n{done.stderr[-2000:]}")


def without(target: str, work: Path) -> Path:
    """The bundled model trained without a target."""
    made = read_manifest(bundled.REFERENCE)
    if made and made.targets == (target,):
        return bundled.REFERENCE
    folder = work / "retrained" / slugify(target)
    if not (folder / FILE_NAME).is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        command("tools.mini.train_tiny", "--without", target, "--out", folder)
    return folder


BUNDLED = Models(lambda target, work: bundled.MODEL, without, bundled.MODEL_NAME)


def train(run: Run, model: str, folder: Path, dataset: str = "mini") -> Path:
    """The checkpoint of a run that begins with a model, if the folder does not have it."""
    checkpoint = folder / "checkpoint"
    if (checkpoint / FILE_NAME).is_file():
        return checkpoint
    method = ["--method", run.method, *shlex.split(run.settings)]
    if run.start:
        first, *settings = shlex.split(run.start)
        before = run._replace(method=first, settings=shlex.join(settings), start="")
        model = str(train(before, model, folder / "start", dataset))
    about = ["--model", model, "--dataset", dataset, "--target", run.target, "--seed", run.seed]
    about += ["--output_dir", str(checkpoint), "--no_score", "--save_strategy", "no", "--overwrite"]
    command("optout_train.cli", *about, *method)
    return checkpoint


def scores(model: Path, run: Run, dtype: str, folder: Path) -> Scores:
    """A model's answers to the group of tasks; those in the folder are kept."""
    from optout_train.score import evaluate

    about = {"target": [run.target], "dataset": "mini", "guardrail": run.method == "guardrail"}
    if not list(folder.rglob("results_*.json")):
        evaluate(folder, run.group, {"pretrained": str(model), "dtype": dtype}, about, 16)
    return Scores(folder)


def odd_words(docs: Sequence[Mapping[str, Any]]) -> float:
    """The share of answers with a word that neither question, data nor a dictionary has; NaN without the dictionary."""
    from tools.mini.measure import DICTIONARY, known_words, unknown

    if not DICTIONARY.is_file():
        return math.nan
    known = known_words()
    return fmean(bool(unknown(known, doc["question"], doc["generated"])) for doc in docs)


def numbers(model: Path, run: Run, models: Models, work: Path, folder: Path) -> dict[str, float]:
    """What the group of tasks says of a checkpoint, and the board's score of it where nobody has the weights."""
    from lm_eval_elude.report import fluency

    kept = work / "scores" / slugify(f"{run.target} {run.group}")  # of the models that others are compared with
    place = kept if run.method in ("original", "retrained") else folder / "scores"
    made = scores(model, run, models.dtype, place / run.method)
    fluency.measure([made], str(models.original(run.target, work)))
    found = {"odd_words": odd_words(made.docs["elude_forget"])} | {
        name: made.numbers[task][metric].value
        for name, (task, metric) in NUMBERS.items()
        if metric in made.numbers.get(task, {})
    }
    if run.group == "elude":
        found["worst_mc"] = max(made.numbers[task]["mc_accuracy"].value for task in leaves("elude_attacks"))
    if run.group == "elude" and run.method not in BASELINES:
        original, retrained = (
            scores(of(run.target, work), run._replace(method=role), models.dtype, kept / role)
            for role, of in (("original", models.original), ("retrained", models.retrained))
        )
        found["score"] = rank.row(made, original, retrained).score.value
    return found


def attacked(model: Path, role: str, run: Run, file: Path, original: Path, dtype: str) -> list[Row]:
    """The rows of attacks on a model, as in ``attacks.csv`` of ``elude stress``; what the file has is not repeated."""
    import torch

    from lm_eval_elude.stress.attacks import suite
    from lm_eval_elude.stress.suite import Stress, weights_of
    from lm_eval_elude.tasks.elude import EludeSettings

    kept = read(file) if file.is_file() else []
    waiting = {NONE, *(run.attacks if role != ORIGINAL else ())} - {row.attack for row in kept}
    if not waiting:
        return kept
    models = {CHECKPOINT: str(model), ORIGINAL: str(original)}
    stress = Stress(models, EludeSettings((run.target,), "mini"), "standard")
    loaded, mixed = stress.load(CHECKPOINT), dtype == "bfloat16"
    if mixed:  # the fused attention's backward pass is slow on a processor
        loaded.set_attn_implementation("eager")
    file.parent.mkdir(parents=True, exist_ok=True)
    # No cache: an attack changes the weights between two passes.
    with torch.autocast(loaded.device.type, torch.bfloat16, mixed, cache_enabled=False):
        if NONE in waiting:
            append(file, stress.scored(loaded, (NONE, "", 0.0, role)))
        if DEPTH in waiting:
            append(file, stress.depth(stress.load(ORIGINAL), loaded, role))
        before = weights_of(loaded)
        for attack, settings in groupby(suite("standard", 0), itemgetter(0)):
            if attack in waiting:
                made = [stress.attacked(loaded, before, attack, setting, role) for _, setting in settings]
                append(file, chain(*made))
    return read(file)


def known(rows: list[Row]) -> dict[str, float]:
    """``mc_accuracy`` by record of a model as it is."""
    return {row.record: row.value for row in rows if row.attack == NONE and row.metric == "mc_accuracy"}


def recoveries(model: Path, run: Run, models: Models, work: Path) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Recovery after so many steps of relearning on half, the largest of the three learning rates, and of each point.

    A point counts where both attacked models keep 75 % of their own utility; NaN where none does. Beside the first,
    where it was asked for, the unlearning depth score.
    """
    folder, before, never = work / "attacks", models.original(run.target, work), models.retrained(run.target, work)
    of_target = f"{slugify(run.target)}.csv"
    original = known(attacked(before, ORIGINAL, run, folder / f"original-{of_target}", before, models.dtype))
    control = attacked(never, RETRAINED, run, folder / f"retrained-{of_target}", before, models.dtype)
    rows = [*control, *attacked(model, CHECKPOINT, run, folder / f"{run.name}.csv", before, models.dtype)]
    whole = [mean_of(values.items()) for values in (original, known(control))]
    found, each = {f"recovery_{steps}": math.nan for steps in STEPS}, []
    for point in points_of(rows):
        sides = [mean_of(side.items()) for side in (point.checkpoint, point.retrained)]
        name, share = f"recovery_{point.step:g}", recovery(*sides, *whole).value
        about = {"attack": point.attack, "setting": point.setting, "step": f"{point.step:g}"}
        each.append(run._asdict() | about | {"counts": int(point.counts), "recovery": share})
        if point.attack == HALF and point.counts:
            found[name] = share if math.isnan(found[name]) else max(found[name], share)
    depth = depth_score(rows)
    return found | ({"depth": depth.value} if depth else {}), each


def measure(run: Run, models: Models, work: Path, table: Path) -> dict[str, Any]:
    """Train, score and attack one run: its row."""
    original = models.original(run.target, work)
    began, row = time.monotonic(), dict[str, Any](run._asdict())
    folder = work / "runs" / run.name
    if run.method in BASELINES:
        model = models.retrained(run.target, work) if run.method == "retrained" else original
    else:
        model = train(run, models.name or str(original), folder)
        row["train_seconds"] = getattr(read_manifest(model), "processor_seconds", None)
    row |= numbers(model, run, models, work, folder)
    if run.method not in BASELINES and run.attacks:
        found, points = recoveries(model, run, models, work)
        row |= found
        if len(run.attacks) > 1:
            write(points_file(table), POINT_COLUMNS, points)
    shutil.rmtree(folder, ignore_errors=True)
    row["version"] = f"{version('lm-eval-elude')}+{commit()}"
    row["model"] = file_hashes(original)["model.safetensors"][:12]
    return row | {"seconds": time.monotonic() - began}


def commit() -> str:
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def cells(row: Mapping[str, Any], columns: Sequence[str]) -> Iterator[Any]:
    for name in columns:
        value = row.get(name, "")
        number = isinstance(value, float)
        yield "" if number and math.isnan(value) else round(value, 0 if "seconds" in name else 4) if number else value


def write(table: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Append rows to a table, under the columns' names; returns their cells."""
    written = [list(cells(row, columns)) for row in rows]
    with table.open("a", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerows(written if table.stat().st_size else [columns, *written])
    return written


def carry_out(
    plan: Path, table: Path, columns: Sequence[str], measure: Callable[[Run], Mapping[str, Any]],
    guesses: Mapping[str, float] | None = None,
) -> None:  # fmt: skip
    """Do the runs of a plan that have no row in the table yet, and add their rows; the hours are said first.

    ``guesses`` are the seconds of a run by method, for methods without a row.
    """
    rows = read_rows(table)
    runs = waiting(plan, rows)
    hours = sum(expected(run, rows, guesses or {}) for run in runs) / 3600
    print(f"{len(runs)} runs to do, {len(rows)} are in {table}; about {hours:.1f} hours", flush=True)
    for run in runs:
        (row,) = write(table, columns, [measure(run)])
        print(*(f"{name} {value}" for name, value in zip(columns, row, strict=True) if value != ""), flush=True)


def main(
    description: str | None = __doc__, models: Models = BUNDLED, guesses: Mapping[str, float] | None = None
) -> None:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument(
        "--work", type=Path, default=Path("runs/outcome"), help="retrained models, attacks, checkpoints"
    )
    parser.add_argument("--out", type=Path, help="the table  [default: benchmarks/results/PLAN.csv]")
    given = parser.parse_args()
    os.environ |= OFFLINE
    given.work.mkdir(parents=True, exist_ok=True)
    table = given.out or RESULTS / given.plan.with_suffix(".csv").name
    of_run = partial(measure, models=models, work=given.work.resolve(), table=table)
    carry_out(given.plan, table, COLUMNS, of_run, guesses)


if __name__ == "__main__":
    main()
