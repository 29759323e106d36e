"""The whole path on a real model: ``python benchmarks/real_model.py MODEL_FOLDER --teach [flags of optout-train]``.

First, which facts of the target the model truly knows: where it knows few, Forget Quality would be high before anything
was forgotten, and the script stops. With ``--teach`` it is taught the target, its neighbours and a share of world data
first (a merged LoRA adapter), once with and once without the target: the second never knew, and is what forgetting is
compared with. Then come ``optout-train`` by each of ``--methods`` with the flags that this script does not know itself,
and for every model lm-eval's group ``elude`` by ``--model elude``. ``--stress`` attacks the weights of what was
unlearned. A stage leaves its outcome under ``--work`` and is skipped when that is there; one
that was cut off goes on. Stages are processes, one at a time, so times and peaks of memory are their own. Any model
works, with or without a chat template; ``smollm2`` fetches SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import smollm2
import tables
from commands import OFFLINE
from scipy.stats import ks_2samp

from lm_eval_elude.data import dataset
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.sets import Split, Subset
from lm_eval_elude.report import frame, weights
from lm_eval_elude.scoring.estimates import difference
from lm_eval_elude.scoring.metrics import METRICS
from lm_eval_elude.scoring.runs import Run
from lm_eval_elude.stress.outcome import RECOVERED, Outcome
from optout_train.presets import METHODS

PAPER = "paper"
GATE = 0.5  # share of facts known below which FQ means nothing
SETS: tuple[tuple[Subset, Split], ...] = (
    ("forget", "train"), ("retain", "train"), ("retain", "validation"), ("retain", "test"),
    ("world", "train"), ("world", "validation"), ("world", "test"),
)  # fmt: skip
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("first", "elude_forget", "truth_first"), ("cloze", "elude_cloze", "truth_first"),
    ("FQ", "elude_forget", "forget_quality"), ("P", "elude_forget", "probability"),
    ("ROUGE", "elude_forget", "rougeL_recall"), ("TR", "elude_forget", "truth_ratio"),
    ("degen.", "elude_forget", "degenerate"), ("RQ", "elude_quality", "retain_quality"),
    ("mention", "elude_quality", "mention_quality"), ("world", "elude_world", "set_quality"),
    ("degen. retain", "elude_retain", "degenerate"),
    ("degen. world", "elude_world", "degenerate"), ("reverse", "elude_attack_reverse_query", "forget_quality"),
    ("nine", "elude_attacks", "forget_quality"),
)  # fmt: skip


class Stage(NamedTuple):
    """What a finished stage took: wall-clock and processor seconds, and the peak resident memory of its process."""

    seconds: float
    cpu: float
    peak_mib: float


class Work:
    """The folder of a run: what was asked for, and what each finished stage took."""

    def __init__(self, root: Path, asked: dict[str, Any]) -> None:
        self.root = root
        self.root.mkdir(parents=True, exist_ok=True)
        file = root / "asked.json"
        if file.exists() and (before := json.loads(file.read_text())) != asked:
            other = ", ".join(f"{k} {before.get(k)!r}" for k in asked if before.get(k) != asked[k])
            raise SystemExit(f"--work {root} was begun with {other}: give the same or another folder")
        file.write_text(json.dumps(asked, indent=1) + "\n")

    def stage(self, name: str, command: Sequence[str]) -> Stage:
        """Run a stage as a process of its own, unless it is finished.

        Raises:
            SystemExit: it failed; its own words are on the terminal.
        """
        done = self.root / f"{name}.stage.json"
        if not done.exists():
            print(f"[{time.strftime('%H:%M:%S')}] {name}: {shlex.join(command)}", file=sys.stderr, flush=True)
            began = time.monotonic()
            with (self.root / f"{name}.out").open("w") as out:
                process = subprocess.Popen([sys.executable, *command], stdout=out)
                _, status, used = os.wait4(process.pid, 0)
            if code := os.waitstatus_to_exitcode(status):
                raise SystemExit(f"{name} ended with exit code {code}; the same command goes on from there")
            took = Stage(time.monotonic() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
            done.write_text(json.dumps(took._asdict()) + "\n")
        return Stage(**json.loads(done.read_text()))

    def train(self, name: str, model: str, data: Path, target: str, flags: Sequence[str]) -> tuple[str, Stage]:
        folder = self.root / name
        command = ["-m", "optout_train.cli", "--model", model, "--dataset", str(data), "--target", target, "--no_score"]
        return str(folder), self.stage(name, [*command, "--output_dir", str(folder), "--overwrite", *flags])

    def teach(
        self, name: str, model: str, target: str, lessons: Sequence[QARecord], options: argparse.Namespace
    ) -> tuple[str, Stage]:
        """Learn records: they are the neighbours of a run whose forget loss has no weight; an epoch shows each once."""
        rows = [replace(record, entity=target) for record in lessons]
        data = write_data(self.root / f"data-{name}", {("forget", "train"): rows, ("retain", "train"): rows})
        recipe = ["--method", "npo+neighbours", "--forget_weight", "0", "--lora", "16", "--merge", "true"]
        recipe += ["--num_train_epochs", str(options.teach_epochs), "--learning_rate", str(options.teach_rate)]
        recipe += ["--per_device_train_batch_size", "8", "--seed", str(options.seed), *options.computing]
        folder, took = self.train(name, model, data, target, recipe)
        if (manifest := Path(folder) / "optout.json").exists():  # nothing was forgotten, so it must not say so
            manifest.rename(manifest.with_name("taught.json"))
        return folder, took

    def known(self, name: str, model: str, data: Path, target: str) -> float:
        """The share of the target's facts that a model knows."""
        out = self.root / f"known-{name}.csv"
        elude = ["-c", "from lm_eval_elude.cli import main; main()", "probe", "--model", model, "--dataset", str(data)]
        self.stage(f"known-{name}", [*elude, "--target", target, "--out", str(out)])
        return float(pd.read_csv(out)["known"].mean())

    def stress(
        self, suite: str, checkpoint: str, original: str, reference: str, data: Path, target: str, *others: Outcome
    ) -> Outcome:
        """What ``elude stress`` brought back; the reference is attacked once for all checkpoints."""
        name = f"stress-{suite}-{Path(checkpoint).name}"
        elude = ["-c", "from lm_eval_elude.cli import main; main()", "stress", checkpoint, "--original", original]
        elude += ["--suite", suite]
        elude += ["--reference", reference, "--target", target, "--dataset", str(data), "--out", str(self.root / name)]
        elude += [argument for outcome in others[:1] for argument in ("--reference-run", str(outcome.folder))]
        self.stage(name, elude)
        return Outcome(self.root / name)

    def evaluate(self, name: str, model: str, data: Path, target: str, tasks: str, limit: int) -> Run:
        folder = self.root / f"scores-{name}"
        folder.mkdir(exist_ok=True)
        command = [
            "-m", "lm_eval", "run", "--model", "elude", "--model_args", f"pretrained={model},dtype=float32",
            "--tasks", tasks, "--metadata", json.dumps({"target": target, "dataset": str(data)}), "--log_samples",
            "--output_path", str(folder), "--use_cache", str(folder / "answered"),
            *(["--limit", str(limit)] if limit else []),
        ]  # fmt: skip
        self.stage(f"scores-{name}", command)
        return Run(folder)


Sets = dict[tuple[Subset, Split], Sequence[QARecord]]


def write_data(folder: Path, sets: Sets) -> Path:
    """A data set in the ELUDe schema."""
    folder.mkdir(parents=True, exist_ok=True)
    for (kind, split), records in sets.items():
        name = f"{kind}-{split}" if kind == "world" else f"{kind}_qa-{split}"
        lines = (json.dumps(record.columns(), ensure_ascii=False) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def row(name: str, run: Run, reference: Run | None, took: Stage | None) -> list[str]:
    """A line of the table."""

    def percent(task: str, metric: str) -> str:
        value = run.results["results"].get(task, {}).get(f"{metric},none")
        return f"{100 * value:.1f}" if isinstance(value, float) and value == value else ""

    cells = [percent(task, metric) for _, task, metric in COLUMNS]
    low, auc, high = (percent("elude_mia", f"mia_auc{end}") for end in ("_low", "", "_high"))
    cells.append(f"{auc} ({low} to {high})" if auc else "")
    ratios = [[s.values["truth_ratio_raw"] for s in r.samples("elude_forget")] for r in (run, reference) if r]
    cells.append(f"{ks_2samp(*ratios).pvalue:.3g}" if len(ratios) == 2 and run is not reference else "")
    cells += [f"{took.seconds:.0f}", f"{took.cpu:.0f}", f"{took.peak_mib:.0f}"] if took else ["", "", ""]
    return [name, *cells]


def brought_back(outcomes: dict[str, Outcome]) -> list[str]:
    """The attacks on the weights, a method below the other, and by how much less comes back under the first."""
    cells = [
        weights.table({name: outcome}).cells.rename(lambda attack, name=name: f"{name}, {attack}")
        for name, outcome in outcomes.items()
    ]
    table = weights.table(outcomes)._replace(cells=pd.concat(cells))
    lines, ((first, of_first), *others) = [*frame.markdown(table).splitlines(), ""], outcomes.items()
    for name, outcome in others:
        for attack in (name for name in of_first.worst if name in outcome.worst):
            less = []
            for metric in RECOVERED:
                change = difference(*(each.worst[attack].recovery[metric] for each in (of_first, outcome)))
                written = frame.plain_cell(frame.cell(change.value, *change.bounds, "share", "+"))
                less.append(f"{METRICS[metric].label} {written}")
            lines.append(f"- {attack.replace('_', ' ')}, {first} less {name}, of what came back: {', '.join(less)}.")
    return [*lines, ""] if others else lines


def answers(runs: dict[str, Run], count: int = 3) -> list[str]:
    """What each model says to the first questions."""
    logs = {name: run.rows("elude_forget")[:count] for name, run in runs.items()}
    lines = []
    for i, first in enumerate(next(iter(logs.values()))):
        lines += ["", f"{first['doc']['question']} *{first['doc']['answer']}*", ""]
        lines += [f"- {name}: {_shown(rows[i]['doc']['generated'])}" for name, rows in logs.items()]
    return lines


def _shown(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return f"{line[:200]}..." if len(line) > 200 else line or "(nothing)"


def _method(text: str) -> tuple[str, list[str]]:
    """A method and its flags."""
    name, *flags = shlex.split(text) or [""]
    if name not in (PAPER, *METHODS):
        raise argparse.ArgumentTypeError(f"{text!r} does not begin with {PAPER} or a method of optout-train")
    if name == PAPER and flags:
        raise argparse.ArgumentTypeError(f"{PAPER} takes no flags: its settings are the paper's; opt-out takes them")
    return name, flags


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the model, or smollm2")
    parser.add_argument("--target", default="Cristiano Ronaldo")
    parser.add_argument("--dataset", default="mini")
    parser.add_argument("--records", type=int, default=0, help="most rows of each set (0: all)")
    parser.add_argument("--teach", action="store_true", help="teach it the data first, with and without the target")
    parser.add_argument("--teach-epochs", type=int, default=12)
    parser.add_argument("--teach-rate", type=float, default=1e-3, help="learning rate of the lesson's adapter")
    parser.add_argument(
        "--methods", nargs="*", type=_method, default=[(PAPER, []), ("name-swap", [])], metavar="'NAME FLAGS'",
        help="of optout-train, each with flags of its own and those this script does not know; "
        "paper: opt-out with the paper's settings",
    )  # fmt: skip
    parser.add_argument("--tasks", default="elude")
    parser.add_argument("--limit", type=int, default=0, help="of lm_eval (0: none)")
    parser.add_argument(
        "--stress", choices=("glance", "quick", "full"), help="attack the weights of what was unlearned (--teach)"
    )
    parser.add_argument(
        "--bf16", dest="computing", action="store_const", const=["--bf16", "true"], default=[],
        help="train in bfloat16 over float32 weights",
    )  # fmt: skip
    parser.add_argument("--full", action="store_true", help="unlearn in all weights instead of an adapter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/real"))
    parser.add_argument("--docs", action="store_true", help="also write the tables into docs/pretrained.md")
    options, flags = parser.parse_known_args()
    if str(options.model) == smollm2.__name__:
        options.model = options.work / smollm2.__name__
        smollm2.fetch(options.model)
    if options.stress and not options.teach:
        parser.error("--stress needs a model that never knew the target: --teach makes one")
    if not (options.model / "config.json").is_file():
        parser.error(f"{options.model} is no model folder: it has no config.json")
    if len({name for name, _ in options.methods}) < len(options.methods):
        parser.error("--methods: one of them is named twice; give the second run a --work of its own")
    os.environ |= OFFLINE
    asked = {k: str(v) for k, v in vars(options).items() if k not in ("work", "docs", "methods", "stress")}
    work = Work(options.work.absolute(), asked | {"model": str(options.model.resolve())})
    (target,) = dataset.resolve_targets(options.dataset, [options.target])
    most = options.records or None
    sets: Sets = {
        (kind, split): dataset.load_records(options.dataset, kind, split, [target.name]).records[:most]
        for kind, split in SETS
    }  # fmt: skip
    data = write_data(work.root / "data", sets)

    def evaluate(name: str, model: str) -> Run:
        return work.evaluate(name, model, data, target.name, options.tasks, options.limit)

    model = str(options.model.resolve())
    schooled: dict[str, tuple[str, Stage]] = {}
    runs: dict[str, tuple[Run, Stage | None]]
    share = work.known("original", model, data, target.name)
    lines = [
        f"Of {target.name} the original knows {share:.0%} of {len(sets['forget', 'train'])} facts (`elude probe`)."
    ]
    if options.teach:
        kept = [record for place, records in sets.items() if place[0] != "forget" for record in records]
        lessons = {"taught": [*sets["forget", "train"], *kept], "taught-without": kept}
        schooled |= {name: work.teach(name, model, target.name, rows, options) for name, rows in lessons.items()}
        share, never = (work.known(name, folder, data, target.name) for name, (folder, _) in schooled.items())
        lines.append(f"Taught, it knows {share:.0%}; taught without the target {never:.0%}.")
        model = schooled["taught"][0]
    if share < GATE:
        print("\n".join(lines))
        advice = "Teach longer: --teach-epochs" if options.teach else "Teach it first: --teach"
        print(f"That is below {GATE:.0%}: its Forget Quality says nothing. {advice}", file=sys.stderr)
        return 1
    seed, adapter = (
        ["--seed", str(options.seed), *options.computing],
        [] if options.full else ["--lora", "16", "--merge", "true"],
    )
    unlearned: dict[str, tuple[str, Stage]] = {}
    for name, its in options.methods:
        method, method_flags = ("opt-out", []) if name == PAPER else (name, [*flags, *its])
        settings = [
            "--method",
            method,
            *seed,
            *([] if {"lora"} & {*METHODS[method], *METHODS[method]["settings"]} else adapter),
            *method_flags,
        ]
        unlearned[name] = work.train(name, model, data, target.name, settings)
    runs = {name: (evaluate(name, folder), took) for name, (folder, took) in (schooled | unlearned).items()}
    reference = runs["taught-without"][0] if options.teach else None
    if not options.teach:
        runs = {"original": (evaluate("original", model), None), **runs}
    never_knew = schooled["taught-without"][0] if options.stress else ""
    outcomes: dict[str, Outcome] = {}
    for name, (folder, _) in (unlearned if options.stress else {}).items():
        others = outcomes.values()
        outcomes[name] = work.stress(options.stress, folder, model, never_knew, data, target.name, *others)
    head = ["", *(name for name, _, _ in COLUMNS), "AUC", "KS p", "s", "CPU s", "MiB"]
    lines += ["", *tables.markdown(head, [row(name, run, reference, took) for name, (run, took) in runs.items()]), ""]
    lines += [
        *(brought_back(outcomes) if outcomes else []),
        "A few answers:",
        *answers({name: run for name, (run, _) in runs.items()}),
        "",
    ]
    shown_flags = [
        f"--{k.replace('_', '-')} {v}" for k, v in asked.items() if k not in ("model", "teach", "full", "computing")
    ]
    methods = ["--methods", *(shlex.quote(shlex.join([name, *its])) for name, its in options.methods)]
    shown = " ".join([options.model.name, *shown_flags, *options.computing, *flags, *methods])
    lines.append(f"`{shown}`; {time.strftime('%Y-%m-%d')}.")
    print("\n".join(lines))
    if options.docs:
        tables.put(tables.DOCS / "pretrained.md", f"real model: {options.model.name}, {target.name}", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
