"""``elude stress``: the same attacks on a checkpoint and on the retrained model, one long CSV.

Each row is (attack, setting, step, role, record, metric, value). ``mc_accuracy`` and ``probability`` stand for each
record that the attack did not train on, ``retain_quality`` for the model at that point, with record "". Attack
``none`` is the model as it is. A run whose rows exist is skipped.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lm_eval_elude.attacks.builders import build_attacks
from lm_eval_elude.data import dataset
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.errors import UserError
from lm_eval_elude.metrics.samples import set_quality
from lm_eval_elude.stress import attacks
from lm_eval_elude.tasks import TASKS
from lm_eval_elude.tasks.elude import EludeSettings
from lm_eval_elude.tasks.running import quietly
from lm_eval_elude.text.chat import Encoded, Renderer

COLUMNS = ("attack", "setting", "step", "role", "record", "metric", "value")
RATES = (0.02, 0.1, 0.2)  # times the width
SCORED = ("elude_forget", "elude_retain", "elude_world")


class Attack(NamedTuple):
    """One run of an attack.

    Attributes:
        name, setting: as the CSV has them.
        apply: changes the model in place, yields the steps at which it is measured.
        unseen: records that it does not train on, by question; None for all.
        examples: what it trains on; () where it does not train.
    """

    name: str
    setting: str
    apply: Callable[..., Iterator[int]]
    unseen: frozenset[str] | None = None
    examples: Sequence[Encoded] = ()


def suite(name: str, settings: EludeSettings, renderer: Renderer, seed: int) -> list[Attack]:
    """The attacks of ``smoke`` (relearning half of the facts for 5 steps) or ``standard``."""
    forget = load(settings, "forget", "train")
    halves = random.Random(seed).sample(range(len(forget)), len(forget))
    learnt = [forget[i] for i in sorted(halves[: len(forget) // 2])]
    unseen = frozenset(record.question for record in forget) - {record.question for record in learnt}

    def relearn(what: str, pairs: Sequence[tuple[str, str]], rate: float, steps: tuple[int, ...],
                kept: frozenset[str] | None) -> Attack:  # fmt: skip
        examples = [renderer.encode_turn(*pair) for pair in pairs]
        run = partial(attacks.relearn, examples=examples, rate=rate, steps=steps, seed=seed)
        return Attack(f"relearn {what}", f"rate {rate:g}", run, kept, examples)

    half = [(record.question, record.answer) for record in learnt]
    if name == "smoke":
        return [relearn("half", half, RATES[1], (5,), unseen)]
    middle, short = RATES[1], (5, 20)
    found = [relearn("half", half, rate, (5, 20, 80), unseen) for rate in RATES]
    for what in ("retain", "world"):
        if dataset.has(settings.dataset, what, "train"):  # type: ignore[arg-type]
            pairs = [(record.question, record.answer) for record in load(settings, what, "train")]
            found.append(relearn("neighbours" if what == "retain" else what, pairs, middle, short, None))
    found.append(relearn("reworded half", reworded(learnt, settings, seed), middle, short, unseen))
    found += [Attack("round", f"{bits} bits", partial(attacks.round_weights, bits=bits)) for bits in (8, 4, 3)]
    return found + [Attack("prune", f"{share:.0%}", partial(attacks.prune, share=share)) for share in (0.3, 0.5)]


def load(settings: EludeSettings, subset: Any, split: Any) -> list[QARecord]:
    return list(dataset.load_records(settings.dataset, subset, split, settings.targets).records)


def reworded(records: Sequence[QARecord], settings: EludeSettings, seed: int) -> list[tuple[str, str]]:
    """The same facts in other words: paraphrased questions and answers, and questions behind two attacks' prompts."""
    pairs = [(r.paraphrased_question, r.paraphrased_answer) for r in records if r.paraphrased_question]
    for target in settings.resolved():
        own = [record for record in records if record.entity == target.name]
        for attack in ("prefix_injection", "role_playing"):
            pairs += [(p.prompt, p.answer) for p in build_attacks(own, target, attack, n=len(own), seed=seed)]
    return pairs


class Table:
    """The CSV: what it has, and new rows at its end."""

    def __init__(self, path: Path) -> None:
        self.path, self.done = path, set[tuple[str, str, str]]()
        if path.is_file():
            with path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            if rows and {*COLUMNS} != rows[0].keys():
                raise UserError(f"--out {path}: no table of `elude stress`; name another file")
            self.done = {(row["attack"], row["setting"], row["role"]) for row in rows}
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")

    def add(self, rows: Sequence[Sequence[Any]]) -> None:
        """All rows of a run at once, so that a run that was cut off has none."""
        with self.path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


def run(
    models: dict[str, str], name: str, settings: EludeSettings, renderer: Renderer, out: Path, *, seed: int = 0,
    whole: bool = False, say: Callable[[str], object] = print,
) -> None:  # fmt: skip
    """Attack each of ``models`` (``checkpoint``, ``retrained``: where they lie) by a suite; rows go to ``out``.

    Each model is loaded once, and its weights are restored after each attack. ``whole`` trains all weights of models
    of a billion parameters or more, too.
    """
    table = Table(out)
    todo = [Attack("none", "", lambda model: iter([0])), *suite(name, settings, renderer, seed)]
    for role, place in models.items():
        left = [attack for attack in todo if (attack.name, attack.setting, role) not in table.done]
        if not left:
            continue
        with quietly():
            lm = load_lm(place)
        model = lm.model
        before = {key: value.cpu().clone() for key, value in model.state_dict().items()}
        for attack in left:
            say(f"{role}: {' '.join(filter(None, (attack.name, attack.setting)))}")
            if attack.examples:
                lm._model = attacks.with_adapter(model, whole)
            try:
                rows = []
                for step in attack.apply(lm.model):
                    rows += [
                        (attack.name, attack.setting, step, role, *row) for row in measure(lm, settings, attack.unseen)
                    ]
            except (NotImplementedError, ValueError) as error:
                say(f"{attack.name} {attack.setting} is left out: {error}")
                rows = []
            if lm.model is not model:
                lm._model = lm.model.unload()
            model.load_state_dict(before)
            table.add(rows)
        del lm, model
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()  # type: ignore[attr-defined]


def load_lm(place: str) -> Any:
    """A model behind ``--model elude``, in bfloat16 on an accelerator where it has a billion parameters or more."""
    from transformers import AutoConfig

    from lm_eval_elude.model.backend import EludeLM

    config = AutoConfig.from_pretrained(place).get_text_config()
    large = 12 * config.num_hidden_layers * config.hidden_size**2 >= attacks.LORA_FROM
    return EludeLM(place, dtype="bfloat16" if large and torch.accelerator.is_available() else "float32")


def measure(lm: Any, settings: EludeSettings, unseen: frozenset[str] | None) -> list[tuple[str, str, float]]:
    """(record, metric, value) of the model as it is, by the tasks themselves."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from lm_eval_elude import task_folder

    metadata = {"target": list(settings.targets), "dataset": settings.dataset, "pretrained": lm.tokenizer.name_or_path}
    manager = TaskManager(include_path=str(task_folder()), include_defaults=False, metadata=metadata)
    with quietly():
        found = simple_evaluate(lm, tasks=list(SCORED), task_manager=manager, bootstrap_iters=0, verbosity="ERROR")
    samples = {
        task: [TASKS[task].sample(row["doc"], {"truth_ratio": "geometric"}) for row in rows]
        for task, rows in found["samples"].items()
    }
    rows = [
        (sample.record, metric, sample.values[metric])
        for sample in samples["elude_forget"]
        for metric in ("mc_accuracy", "probability")
        if unseen is None or sample.record in unseen
    ]
    return [*rows, ("", "retain_quality", set_quality(samples["elude_retain"], samples["elude_world"]).value)]
