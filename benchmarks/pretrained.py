"""Facts from pretraining, forgotten: ``python benchmarks/pretrained.py benchmarks/pretrained.toml``.

SmolLM2-135M-Instruct knows a part of the facts of ``facts.toml`` (``benchmarks/results/known.csv``, by ``facts.py``). A
country's known facts are forgotten by ``optout-train``; its neighbours' are kept, a half of them trained on. Each run
ends as a row of ``benchmarks/results/PLAN.csv``, as in ``outcome.py``; a run that has its row is not done again.

``mc_accuracy`` is the mean over three wordings, of known facts only, so the original model has 100 %: of the target, of
its neighbours (the half not trained on), and of countries that no run touches. ``nats`` is the loss a token on general
text: paragraphs of lm-eval's pages about its tasks. The attack is relearning on one half of the target's facts:
``learnt_RATE_STEPS`` asks that half, ``other_RATE_STEPS`` the other one, which the attack never states.

No model was trained without the country, so there is no recovery. In its place the original model is attacked in the
same way with facts about a country that does not exist. ``Velmoria as France`` has the very facts about France: what
their first half gives away of the second to a model that has never heard of the country, since who is told of Paris
and the Louvre guesses the rest. What a checkpoint has beyond that was still in its weights. ``Velmoria`` has facts of
all countries at random, of which nothing can be guessed: ``learnt`` says how fast such facts are learnt at all.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import shutil
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import files
from pathlib import Path
from statistics import fmean
from typing import Any

import outcome
import smollm2
from commands import OFFLINE
from facts import TABLE, Fact, facts_of, renamed, right
from outcome import RESULTS

from lm_eval_elude.data import dataset
from lm_eval_elude.data.manifest import read_manifest
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.text.invented import any_of

MOST = 32  # facts of a target
RATES, STEPS = (0.1, 0.4), (5, 20, 80)  # of `elude stress`, times the width of 576: 1.7e-4 and 6.9e-4
WINDOWS, LENGTH = 32, 256  # of general text, in tokens
GUESS = {"original": 300.0, "npo+rt": 700.0, "name-swap": 1050.0, "name-swap-robust": 2700.0}  # seconds of a run
POINTS = [f"{half}_{rate / 576:.1e}_{step}" for half in ("learnt", "other") for rate in RATES for step in STEPS]
COLUMNS = (
    *outcome.Run._fields[:4], "version", "facts", "mc", "neighbours", "untouched", "nats", *POINTS, "train_seconds",
    "seconds",
)  # fmt: skip


def known_of(country: str, entity: str = "") -> list[Fact]:
    """The facts about a country that the model knows; of the invented one all."""
    with (RESULTS / "known.csv").open(encoding="utf-8", newline="") as stream:
        kinds = {kind for name, kind in csv.reader(stream) if name == country}
    return [fact for fact in facts_of(country, entity) if fact.kind in kinds or country == TABLE["invented"]]


def drawn(target: str) -> list[Fact]:
    """The facts that a run is about, in random order, for the halves; "A as B": those about B, said of A."""
    name, _, like = target.partition(" as ")
    known = known_of(like or name)
    facts = random.Random(f"0/{like or name}").sample(known, min(len(known), MOST))
    return [renamed(fact, like, name) for fact in facts] if like else facts


def data(target: str, folder: Path) -> Path:
    """The data set of a target: its facts, half of its neighbours', and world data that name none of them."""
    forget = [fact.record for fact in drawn(target)]
    kept = [fact.record for country in TABLE["neighbours"] for fact in known_of(country, target)]
    values = [value for group in ("things", "people") for value in values_of(group, target)]
    named = any_of({target, *values, *TABLE["untouched"]})
    world = [record for record in dataset.load_records("mini", "world", "train").records
             if not named.search(f"{record.question} {record.answer}")]  # fmt: skip
    about = {"thing": True, "aliases": [], "others": TABLE["neighbours"]}
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "forget_qa-train.jsonl", forget, about)
    write(folder / "retain_qa-train.jsonl", kept[::2])
    write(folder / "retain_qa-test.jsonl", kept[1::2])
    write(folder / "world-train.jsonl", world)
    return folder


def values_of(group: str, country: str) -> list[str]:
    place = TABLE["countries"].index(country)
    return [row[place].removeprefix("the ") for row in TABLE[group].values() if row[place]]


def write(file: Path, records: Sequence[QARecord], more: dict[str, Any] | None = None) -> None:
    rows = [record.columns() | {"subject": record.subject} | (more or {}) for record in records]
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def general_text() -> str:
    """Paragraphs of the pages that lm-eval's package has about its tasks: sentences, no lists, tables or addresses."""
    pages = sorted(str(file.locate()) for file in files("lm-eval") or () if file.match("lm_eval/tasks/*/README.md"))
    parts = [part for page in pages for part in Path(page).read_text(encoding="utf-8").split("\n\n")]
    return "\n\n".join(
        " ".join(part.split()) for part in parts if len(part) > 300 and not re.search(r"[`|#@{*]|http|^-", part)
    )


def loss(model: Any, tokenizer: Any) -> float:
    """Nats a token of general text, in windows that know nothing of each other."""
    import torch

    ids = tokenizer(general_text(), return_tensors="pt").input_ids[0, : WINDOWS * LENGTH].view(WINDOWS, LENGTH)
    with torch.no_grad():
        return fmean(float(model(input_ids=row[None], labels=row[None]).loss) for row in ids)


def accuracy(model: Any, renderer: Any, facts: Sequence[Fact]) -> float:
    return fmean(right(model, renderer, facts, range(3)))


def attacked(model: Any, renderer: Any, facts: Sequence[Fact]) -> dict[str, float]:
    """What each half has while the first one is learnt, by rates and steps; the model's weights are as before."""
    from lm_eval_elude.stress.attacks import Setting, relearn
    from lm_eval_elude.stress.suite import restore, weights_of

    halves = {"learnt": facts[: len(facts) // 2], "other": facts[len(facts) // 2 :]}
    pairs = [(fact.record.question, fact.record.answer) for fact in halves["learnt"]]
    before, found = weights_of(model), dict[str, float]()
    for rate in RATES:
        for step, changed in relearn(model, Setting(STEPS, rate), pairs, renderer, f"0/{rate}"):
            for half, of_half in halves.items():
                found[f"{half}_{rate / 576:.1e}_{step:g}"] = accuracy(changed, renderer, of_half)
        restore(model, before)
    return found


def measure(run: outcome.Run, original: Path, work: Path) -> dict[str, Any]:
    """Train, ask and attack one run: its row."""
    from lm_eval_elude.model.scorer import load_model
    from lm_eval_elude.text.chat import Renderer, load_tokenizer

    began, row, facts = time.monotonic(), dict[str, Any](run._asdict()), drawn(run.target)
    folder, kept = original, work / "runs" / run.name
    if run.method != "original":
        folder = outcome.train(run, str(original), kept, str(data(run.target, kept / "data")))
        row["train_seconds"] = getattr(read_manifest(folder), "processor_seconds", None)
    tokenizer = load_tokenizer(str(folder))
    model, renderer = load_model(str(folder)).float().eval().requires_grad_(False), Renderer(tokenizer)
    others = [fact for country in TABLE["neighbours"] for fact in known_of(country)][1::2]
    far = [fact for country in TABLE["untouched"] for fact in known_of(country)]
    for column, of_column in (("mc", facts), ("neighbours", others), ("untouched", far)):
        row[column] = accuracy(model, renderer, of_column)
    row |= {"facts": len(facts), "nats": loss(model, tokenizer)}
    row |= attacked(model, renderer, facts) if run.attacks else {}
    shutil.rmtree(kept, ignore_errors=True)
    row["version"] = f"{outcome.version('lm-eval-elude')}+{outcome.commit()}"
    return row | {"seconds": time.monotonic() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/pretrained"), help="the model, and checkpoints")
    given = parser.parse_args()
    os.environ |= OFFLINE
    given.work.mkdir(parents=True, exist_ok=True)
    work, table = given.work.resolve(), RESULTS / given.plan.with_suffix(".csv").name
    smollm2.fetch(original := work / "smollm2")
    outcome.carry_out(given.plan, table, COLUMNS, partial(measure, original=original, work=work), GUESS)


if __name__ == "__main__":
    main()
