"""ELUDe: questions about a target, its neighbours and the world, the forget set under attack, and membership.

``elude_retain_mention`` and ``elude_cloze`` are not the paper's. Their wordings stand in ``elude.toml``.
"""

from __future__ import annotations

import logging
import random
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, cast

from lm_eval_elude.attacks import builders
from lm_eval_elude.attacks.prompt import load_attack_file
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
    SampledBenchmark,
    Tasks,
)
from lm_eval_elude.scoring.estimates import Estimate, average
from lm_eval_elude.scoring.metrics import METRICS, Kind, forget_quality, known, retain_quality
from lm_eval_elude.scoring.samples import Sample, has_reference, mean
from lm_eval_elude.scoring.settings import Settings
from lm_eval_elude.text.names import name_leak, short_name
from lm_eval_elude.text.words import STOP, fact_in, fact_tokens, words

log = logging.getLogger("lm_eval.elude")

ATTACK = "elude_attack_"
CONTROL = f"{ATTACK}none"
CLOZE, MENTION, LEAK = "elude_cloze", "elude_retain_mention", "elude_leak"
WORDINGS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
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
                wrong = random.Random(f"{seed}/{p.prompt}").sample(builders.alike(target, p.prompt), PERTURBATIONS)
                more["names"] = list(dict.fromkeys((name, short_name(target), *target.aliases)))
                more["named_answers"] = [builders.described(target, who) for who in (name, *wrong)]
            yield record, more


def mentioned(settings: Settings) -> Iterator[Row]:
    """Test questions about neighbours and about the world, asked with the target's name in passing.

    For each target ``attack_prompts`` of them are drawn, half from each set, which take turns. A record with the
    target's name in an answer is not drawn, because the prompt would help it or mislead it.
    """
    kept = {spec.name: _load(spec, settings) for spec in (RETAIN, WORLD)}
    wordings = WORDINGS["mention"]
    for target in dataset.resolve_targets(settings.dataset, settings.targets):
        rng, halves = random.Random(f"{settings.seed}/mention/{target.name}"), list[list[Row]]()
        for number, (name, records) in enumerate(kept.items()):
            suitable = [
                r
                for r in records
                if r.entity in (target.name, "")
                and not any(name_leak(text, target) for text in (r.answer, r.paraphrased_answer, *r.perturbed_answer))
            ]
            count = (settings.attack_prompts + 1 - number) // 2
            rows: list[Row] = []
            halves.append(rows)
            for record in rng.sample(suitable, len(suitable))[:count]:
                question = rng.choice(wordings).format(target=target.name, question=record.question)
                asked = replace(record, entity=target.name, question=question)
                rows.append((asked, {"set": name, "plain_question": record.question}))
        yield from filter(None, chain.from_iterable(zip_longest(*halves)))


def gapped(settings: Settings) -> Iterator[Row]:
    """The paraphrase of each forget record with a gap in the place of the fact.

    The fact is what the paraphrase does not share with its wrong versions. It is the reference answer, and the whole
    sentences are the paraphrase and the wrong answers. A record is left out where the rest of the sentence says
    nothing, or holds a word of the fact.
    """
    lacking = 0
    for record in _load(FORGET, settings):
        before, fact, after = fact_in(record)
        sentence = f"{before}{WORDINGS['gap']}{after}"
        question = WORDINGS["cloze"].format(target=record.entity, sentence=sentence)
        secret, context = words(fact) - STOP, words(f"{before} {after}") - STOP - words(record.entity)
        if secret and context and not secret & words(question):
            yield replace(record, question=question, answer=fact), {"plain_question": record.question}
        else:
            lacking += 1
    if lacking:
        log.warning("ELUDe: %s leaves out %d records whose sentence has no gap for the fact", CLOZE, lacking)


def compared(settings: Settings) -> Iterator[Row]:
    """The forget set, each record with the paraphrase that it is compared with."""
    for record in _load(FORGET, settings):
        if not record.paraphrased_question:
            raise UserError(
                f"elude_mia needs a paraphrased_question in every forget record; {record.question!r} has none"
            )
        yield record, {}


def with_fact(settings: Settings) -> Iterator[Row]:
    """The forget set, each record with the words that an answer must hold to give its fact away.

    A record without such words is left out: any text would hold them all.
    """
    lacking = 0
    for record in _load(FORGET, settings):
        if fact := sorted(fact_tokens(record)):
            yield record, {"fact": fact}
        else:
            lacking += 1
    if lacking:
        log.warning("ELUDe: %s leaves out %d records whose answer says no word that tells the fact", LEAK, lacking)


def _load(spec: SetSpec, settings: Settings) -> tuple[QARecord, ...]:
    name = cast(Subset, spec.name)
    return dataset.load_records(settings.dataset, name, spec.split, settings.targets).records


BENCHMARKS: dict[str, Benchmark] = {
    row.name: row
    for row in (
        Benchmark("elude_forget", FORGET, "forget", partial(questions, FORGET)),
        Benchmark("elude_retain", RETAIN, "kept", partial(questions, RETAIN)),
        Benchmark("elude_world", WORLD, "kept", partial(questions, WORLD)),
        # Each document's own set decides its probability and its truth ratio. A model that repeats the name does so up
        # to the limit, so it is the neighbours'.
        Benchmark(MENTION, RETAIN, "kept", mentioned),
        Benchmark(CLOZE, FORGET, "attack", gapped),
        MembershipBenchmark("elude_mia", FORGET, "membership", compared),
        SampledBenchmark(LEAK, FORGET, "sampled", with_fact),
        *(
            Benchmark(f"{ATTACK}{attack}", FORGET, KINDS.get(attack, "attack"), partial(attacked, attack))
            for attack in (*builders.ATTACKS, builders.CONTROL)
        ),
    )
}


# ---- groups
def _quality(tasks: Tasks) -> Estimates:
    # The task is left out where no record can be asked so.
    mention = {"mention_quality": retain_quality(tasks[MENTION])} if MENTION in tasks else {}
    return {
        **mention,
        **_known(_plain(tasks)),
        "forget_quality": forget_quality(tasks["elude_forget"]),
        "retain_quality": retain_quality(tasks["elude_retain"], tasks["elude_world"]),
        "truth_first": mean(tasks["elude_forget"], "truth_first"),
    }


def _plain(tasks: Tasks) -> list[Sequence[Sample]]:
    return [tasks[task] for task in ("elude_forget", CLOZE) if task in tasks]


def _known(suites: Sequence[Sequence[Sample]]) -> Estimates:
    compared = list(filter(has_reference, suites))
    return {"known": known(suites)} | ({"known_gap": known(compared, less=True)} if compared else {})


def _attacks(tasks: Tasks, prefix: str = "") -> Estimates:
    suites = [samples for task, samples in tasks.items() if task.startswith(ATTACK) and task != CONTROL]

    def over_attacks(metric: str) -> Estimate:
        return average([METRICS[metric].of_set(samples, {}) for samples in suites])

    estimates = {f"{prefix}{metric}": over_attacks(metric) for metric in ("forget_quality", "truth_first")}
    estimates |= _known([*_plain(tasks), *suites] if prefix else suites)
    if all(map(has_reference, suites)):
        estimates[f"{prefix}forget_quality_gap"] = over_attacks("forget_quality_gap")
    return estimates


GROUPS: dict[str, BenchmarkGroup] = {
    "elude_quality": BenchmarkGroup(("elude_forget", "elude_retain", "elude_world", MENTION, CLOZE), _quality),
    "elude_attacks": BenchmarkGroup(tuple(name for name in BENCHMARKS if name.startswith(ATTACK)), _attacks),
    "elude": BenchmarkGroup(
        ("elude_quality", "elude_mia", "elude_attacks"), lambda tasks: _quality(tasks) | _attacks(tasks, "attacked_")
    ),
}
