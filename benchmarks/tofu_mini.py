"""TOFU's whole circle on the bundled model, in minutes: ``make tofu-mini``.

Writes data in TOFU's layout (authors whom nobody could take for real ones, from a seed; real people and the world from
ELUDe-mini), fine-tunes the starting and the retained model, unlearns with each ``--method``, scores all with ``lm_eval
--tasks tofu`` beside the retained model, and prints one table. ``--docs`` writes it into ``docs/results.md`` too. What
is finished is not repeated. The real data is TOFU's own (``--dataset tofu``), which this does not stand in for.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
import tomllib
from pathlib import Path
from typing import Any

from commands import OFFLINE, call, score
from tables import DOCS, markdown, put
from teach import teach

from lm_eval_elude.data import bundled
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.metrics.table import written
from lm_eval_elude.report.frame import read_models
from lm_eval_elude.tasks.tofu import EVALUATORS

ROOT = Path(__file__).resolve().parents[1]
MINI = ROOT / "lm_eval_elude" / "mini" / "data"
SPLIT, AUTHORS, FORGOTTEN = "forget10", 40, 4
# Names; question, answer, the same in other words, and what the answer may be.
TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
KINDS = [(*texts, TEXTS["values"][values]) for *texts, values in TEXTS["kinds"]]
PERTURBED = ("paraphrased_answer", "perturbed_answer")
COLUMNS = (  # column, task or group, metric
    ("KS p", "tofu_forget", "ks_p_value"), ("utility", "tofu", "model_utility"),
    ("forget P", "tofu_forget", "probability"), ("ROUGE", "tofu_forget", "rougeL_recall"),
    ("TR", "tofu_forget", "truth_ratio"), ("choice", "tofu_forget", "mc_accuracy"),
    ("repetition", "tofu_forget", "repetition"), ("retain P", "tofu_retain", "probability"),
    ("ROUGE", "tofu_retain", "rougeL_recall"), ("TR", "tofu_retain", "truth_ratio"),
    ("people P", "tofu_real_authors", "probability"), ("world P", "tofu_world_facts", "probability"),
)  # fmt: skip


def write_data(folder: Path, seed: int) -> Path:
    """All files of TOFU that training and scoring read, for one split; authors follow one another, as there."""
    draw = random.Random(seed)
    names = draw.sample([f"{given} {family}" for given in TEXTS["given"] for family in TEXTS["family"]], AUTHORS)
    rows: list[dict[str, Any]] = []
    for name in names:
        for question, answer, other, values in KINDS:
            right, *wrong = draw.sample(values, 6)
            said = [form.format(n=name, v=right) for form in (question, answer, other)]
            perturbed = [other.format(n=name, v=value) for value in wrong]
            rows.append(dict(zip(("question", "answer", *PERTURBED), (*said, perturbed), strict=True)))
    people, world = (
        [
            {"question": row["question"], "answer": row["answer"], "perturbed_answer": row["perturbed_answer"][:3]}
            for row in draw.sample([json.loads(line) for line in (MINI / name).read_text("utf-8").splitlines()], 24)
        ]
        for name in ("retain_qa-test.jsonl", "world-test.jsonl")
    )
    cut = len(rows) - FORGOTTEN * len(KINDS)
    files = {
        "full": rows, "forget10": rows[cut:], "retain90": rows[:cut], "forget10_perturbed": rows[cut:],
        "retain_perturbed": draw.sample(rows[:cut], 60), "real_authors_perturbed": people,
        "world_facts_perturbed": world,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for file, lines in files.items():
        kept = [row if "perturbed" in file else {k: v for k, v in row.items() if k not in PERTURBED} for row in lines]
        (folder / f"{file}.json").write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    return folder


def train(work: Path, name: str, *flags: str) -> float:
    """A checkpoint ``work/NAME`` unless it is finished; returns the seconds it took, also if it was made before."""
    took, started = work / f"{name}.seconds", time.monotonic()
    if not took.exists():
        data = ("--dataset", work / "data", "--forget_split", SPLIT, "--tofu_evaluator", "open-unlearning")
        how = ("--per_device_train_batch_size", "16", "--no_score", "--overwrite", "--output_dir", work / name)
        call("optout-train", *data, *how, *flags)
        took.write_text(f"{time.monotonic() - started:.0f}")
    return float(took.read_text())


def main() -> None:
    """Run what is not finished and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/tofu-mini"))
    parser.add_argument("--method", nargs="*", default=["npo+rt", "opt-out", "idk+rt"], help="methods to unlearn with")
    parser.add_argument("--epochs", default="8", help="of fine-tuning")
    parser.add_argument("--unlearn-epochs", default="10")
    parser.add_argument("--learning-rate", default="1e-3", help="of fine-tuning; unlearning takes a tenth")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--docs", action="store_true", help="write the table into docs/results.md")
    given = parser.parse_args()
    os.environ |= OFFLINE
    work = given.work.absolute()
    write_data(work / "data", given.seed)
    rows: dict[str, tuple[str, tuple[str, ...]]] = {
        "starting model": ("start", ("full",)),
        "retained model": ("retained", ("retain90",)),
    }
    for method in given.method:
        rate = f"{float(given.learning_rate) / 10:g}"
        flags = ("--model", str(work / "start"), "--method", method, "--num_train_epochs", given.unlearn_epochs)
        rows[f"`{method}`"] = (method, (*flags, "--learning_rate", rate))
    seconds = {}
    for name, flags in rows.values():
        if len(flags) > 1:
            seconds[name] = train(work, name, "--seed", str(given.seed), *flags)
            continue
        took, started = work / f"{name}.seconds", time.monotonic()
        if not took.exists():
            lines = (work / "data" / f"{flags[0]}.json").read_text(encoding="utf-8").splitlines()
            records = [QARecord("", row["question"], row["answer"]) for row in map(json.loads, lines)]
            rate, epochs = float(given.learning_rate), float(given.epochs)
            how = EVALUATORS["open-unlearning"]
            teach(
                bundled.MODEL_NAME, records, work / name, rate=rate, epochs=epochs, batch=16, seed=given.seed, asked=how
            )
            took.write_text(f"{time.monotonic() - started:.0f}")
        seconds[name] = float(took.read_text())
    scores = work / "scores"
    about = {"tofu_split": SPLIT, "tofu_evaluator": "open-unlearning", "tofu_data": str(work / "data")}
    for name, _ in rows.values():
        score(work / name, scores / name, "tofu", about)
    cells, labels = [], {name: label for label, (name, _) in rows.items()}
    for model in read_models([str(scores / name) for name in labels], reference="retained"):
        found = [model.numbers.get(task, {}).get(metric) for _, task, metric in COLUMNS]
        texts = [written(n.value, metric) if n else "–" for n, (*_, metric) in zip(found, COLUMNS, strict=True)]
        cells.append([labels[model.name], *texts, f"{seconds[model.name]:.0f}"])
    lines = markdown(["", *(name for name, *_ in COLUMNS), "s"], cells)
    print(*lines, sep="\n")
    if given.docs:
        facts = len(KINDS)
        note = (
            f"{AUTHORS} authors of {facts} questions, {FORGOTTEN} forgotten; seed {given.seed}, {given.epochs} epochs "
            f"of fine-tuning at {given.learning_rate}, {given.unlearn_epochs} of unlearning at a tenth; s: of training."
        )
        put(DOCS / "results.md", "tofu-mini", ["", *lines, "", note, ""])


if __name__ == "__main__":
    main()
