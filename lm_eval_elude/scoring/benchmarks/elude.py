"""ELUDe: questions about a target, its neighbours and the world, the forget set under attack, and membership."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from lm_eval_elude.attacks import builders
from lm_eval_elude.attacks.files import load_attack_file
from lm_eval_elude.data import dataset
from lm_eval_elude.data.records import PERTURBATIONS, QARecord
from lm_eval_elude.data.sets import FORGET, RETAIN, WORLD, SetSpec, Subset
from lm_eval_elude.errors import UserError
from lm_eval_elude.scoring.benchmark import (
    Benchmark,
    BenchmarkGroup,
    Estimates,
    MembershipBenchmark,
    NothingToAskError,
    Row,
    Tasks,
)
from lm_eval_elude.scoring.estimates import average
from lm_eval_elude.scoring.metrics import (
    Kind,
    attacked_forget_quality,
    attacked_gap,
    forget_quality,
    known,
    retain_quality,
)
from lm_eval_elude.scoring.samples import Sample, has_reference, mean
from lm_eval_elude.scoring.settings import Settings
from lm_eval_elude.text.names import short_name

log = logging.getLogger("lm_eval.elude")

ATTACK = "elude_attack_"
CONTROL = f"{ATTACK}none"
KINDS: dict[str, Kind] = {"multiple_choice": "multiple choice", "reverse_query": "reverse query"}


# ---- what is asked
def questions(spec: SetSpec, settings: Settings) -> Iterator[Row]:
    """The scored split of a set for the run's targets."""
    return ((record, {}) for record in _load(spec, settings))


def attacked(attack: str, settings: Settings) -> Iterator[Row]:
    """The forget set asked through an attack, or plainly (the control)."""
    forget_set = _load(FORGET, settings)
    targets = dataset.resolve_targets(settings.dataset, settings.targets)
    for target in targets:
        name, seed, count = target.name, settings.seed, settings.attack_prompts
        records = [record for record in forget_set if record.entity == name]
        if attack == builders.CONTROL:
            prompts = builders.build_control(records, target, n=count, seed=seed)
        elif file := settings.attack_file:
            prompts = load_attack_file(Path(file), target, attack, others=targets)
        elif attack == "cross_lingual" and not any(record.translated_question for record in records):
            raise NothingToAskError(
                f"data set {settings.dataset!r} has no translated questions of {name}; "
                "`elude attacks` writes such prompts, and --metadata takes them as attack_file"
            )
        else:
            prompts = builders.build_attacks(records, target, attack, n=count, seed=seed)
            if len(prompts) < count:
                log.warning(
                    "ELUDe: elude_attack_%s has %d prompts instead of %d for %s: its %d records allow no more",
                    attack, len(prompts), count, name, len(records),
                )  # fmt: skip
        for p in prompts:
            record = QARecord(
                entity=name,
                question=p.prompt,
                answer=p.answer,
                paraphrased_answer=p.paraphrased_answer,
                perturbed_answer=p.perturbed_answer,
            )
            more: dict[str, Any] = {"attack": p.type, "plain_question": p.question}
            if attack == "reverse_query":
                wrong = random.Random(f"{seed}/{p.prompt}").sample(builders.alike(target), PERTURBATIONS)
                more["names"] = list(dict.fromkeys((name, short_name(target), *target.aliases)))
                more["named_answers"] = [builders.described(target, who) for who in (name, *wrong)]
            yield record, more


def compared(settings: Settings) -> Iterator[Row]:
    """The forget set, each record with the paraphrase that it is compared with."""
    for record in _load(FORGET, settings):
        if not record.paraphrased_question:
            raise UserError(
                f"elude_mia needs a paraphrased_question in every forget record; {record.question!r} has none"
            )
        yield record, {}


def _load(spec: SetSpec, settings: Settings) -> tuple[QARecord, ...]:
    name = cast(Subset, spec.name)
    return dataset.load_records(settings.dataset, name, spec.split, settings.targets, scored=True).records


BENCHMARKS: dict[str, Benchmark] = {
    row.name: row
    for row in (
        Benchmark("elude_forget", FORGET, "forget", partial(questions, FORGET)),
        Benchmark("elude_retain", RETAIN, "kept", partial(questions, RETAIN)),
        Benchmark("elude_world", WORLD, "kept", partial(questions, WORLD)),
        MembershipBenchmark("elude_mia", FORGET, "membership", compared),
        *(
            Benchmark(f"{ATTACK}{attack}", FORGET, KINDS.get(attack, "attack"), partial(attacked, attack))
            for attack in (*builders.ATTACKS, builders.CONTROL)
        ),
    )
}


# ---- groups
def attack_samples(tasks: Tasks) -> list[Sequence[Sample]]:
    """The samples of the attacks, without the control's."""
    return [samples for task, samples in tasks.items() if task.startswith(ATTACK) and task != CONTROL]


def _quality(tasks: Tasks) -> Estimates:
    return {
        "forget_quality": forget_quality(tasks["elude_forget"]),
        "retain_quality": retain_quality(tasks["elude_retain"], tasks["elude_world"]),
        "truth_first": mean(tasks["elude_forget"], "truth_first"),
    }


def _attacks(tasks: Tasks, prefix: str = "") -> Estimates:
    suites = attack_samples(tasks)
    asked = [*([tasks["elude_forget"]] if prefix else ()), *suites]
    estimates = {
        f"{prefix}forget_quality": attacked_forget_quality(suites),
        f"{prefix}truth_first": average([mean(samples, "truth_first") for samples in suites]),
        "known": known(asked),
    }
    if all(map(has_reference, asked)):
        estimates[f"{prefix}forget_quality_gap"] = attacked_gap(suites)
        estimates["known_gap"] = known(asked, less=True)
    return estimates


GROUPS: dict[str, BenchmarkGroup] = {
    "elude_quality": BenchmarkGroup(("elude_forget", "elude_retain", "elude_world"), _quality),
    "elude_attacks": BenchmarkGroup(tuple(name for name in BENCHMARKS if name.startswith(ATTACK)), _attacks),
    "elude": BenchmarkGroup(
        ("elude_quality", "elude_mia", "elude_attacks"), lambda tasks: _quality(tasks) | _attacks(tasks, "attacked_")
    ),
}
