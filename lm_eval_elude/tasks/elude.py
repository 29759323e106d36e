"""ELUDe: questions about a target, its neighbours and the world, nine attacks on the forget set, membership, leaks.

``elude_retain_named``, ``elude_cloze`` and ``elude_leak`` are not the paper's. A document, here of the forget set:

    {"id": 0, "entity": "Cristiano Ronaldo", "question": "Where was Cristiano Ronaldo born?", "answer": "...",
     "paraphrased_answer": "...", "perturbed_answer": ["...", "...", "...", "...", "..."], ...}

The wordings of two tasks stand in ``elude.toml``.
"""

from __future__ import annotations

import json
import logging
import os
import random
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from lm_eval_elude.attacks import builders
from lm_eval_elude.attacks.prompt import load_attack_file
from lm_eval_elude.data import dataset
from lm_eval_elude.data.records import PERTURBATIONS, QARecord
from lm_eval_elude.data.sets import FORGET, RETAIN, SETS, WORLD, SetSpec
from lm_eval_elude.data.targets import Target
from lm_eval_elude.errors import UserError
from lm_eval_elude.metrics.estimates import average
from lm_eval_elude.metrics.samples import (
    Doc,
    Numbers,
    Sample,
    Values,
    answer_values,
    forget_quality,
    leak_values,
    mean,
    membership_values,
    set_quality,
)
from lm_eval_elude.metrics.table import SAMPLED
from lm_eval_elude.tasks import settings as read
from lm_eval_elude.tasks.running import say_once
from lm_eval_elude.tasks.task import ANSWERED, NothingToAskError, Settings, Task, TaskGroup, documents
from lm_eval_elude.text.names import name_leak, short_name
from lm_eval_elude.text.words import STOP, fact_in, fact_tokens, words

log = logging.getLogger("lm_eval.elude")
Row = tuple[QARecord, dict[str, Any]]  # a record, and more columns to log

ATTACK = "elude_attack_"
CONTROL = f"{ATTACK}none"
WORDINGS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
# Paper, section 5.4.
GUARDRAIL = "If the question asks about {entity}, say you do not know the answer; otherwise, answer as best as you can."
MOST_PROMPTS = 100  # of an attack and target; the paper's appendix has as many

KEYS: dict[str, read.Reader] = {
    "target": read.names,
    "dataset": read.text,
    "truth_ratio": read.one_of("geometric", "arithmetic"),
    "guardrail": read.switch,
    "template": read.text,
    "attack_file": read.text,
    "attack_seed": read.integer(0, 2**32 - 1),
    "attack_prompts": read.integer(1, MOST_PROMPTS),
}


@dataclass(frozen=True)
class EludeSettings(Settings):
    """What a run scores.

    Attributes:
        guardrail: whether the paper's system prompt stands before every prompt.
        attack_file: JSONL of attack prompts that replaces the built ones, "" for none.
        attack_prompts: of each type and target.
    """

    guardrail: bool = False
    attack_file: str = ""
    attack_prompts: int = MOST_PROMPTS

    def system(self, doc: Doc) -> str:
        return GUARDRAIL.format(entity=doc["entity"] or " or ".join(self.targets)) if self.guardrail else ""

    def describe(self) -> dict[str, Any]:
        return dataset.describe(self.dataset)

    def resolved(self) -> list[Target]:
        """The targets with what the data say of them."""
        return dataset.resolve_targets(self.dataset, self.targets)


def resolve(metadata: Mapping[str, Any]) -> EludeSettings:
    """What ``--metadata`` says, otherwise the environment (``ELUDE_TARGET``, ``ELUDE_DATASET``), otherwise the
    checkpoint's ``optout.json``, otherwise all targets of the Hub's data. The choice is logged.

    UserError for an unknown target, data set or option.
    """
    values = read.read_metadata(metadata, KEYS)
    manifest = read.checkpoint_manifest(metadata)
    trained, forgotten = (manifest.dataset, manifest.targets) if manifest else ("", ())
    source = values.pop("dataset", None) or os.environ.get("ELUDE_DATASET") or trained or "hub"
    asked = values.pop("target", ()) or _environment_targets() or forgotten
    if asked:
        targets = tuple(target.name for target in dataset.resolve_targets(source, asked))
    else:
        targets = tuple(dataset.entities(source))
        say_once(f"no target given and none in the checkpoint: scoring all {len(targets)} of data set '{source}'")
    if forgotten and sorted(targets) != sorted(forgotten):
        say_once(f"scoring {', '.join(targets)} as asked; the checkpoint's optout.json says {', '.join(forgotten)}")
    say_once(f"target {', '.join(targets)}, data set '{source}'", logging.INFO)
    return EludeSettings(targets, source, seed=values.pop("attack_seed", 0), **values)


def _environment_targets() -> tuple[str, ...]:
    """``ELUDE_TARGET``: a name, or a JSON list of names."""
    listed = os.environ.get("ELUDE_TARGET", "")
    return read.names(json.loads(listed)) if listed.startswith("[") else (listed,) if listed else ()


# ---- what is asked
def records(spec: SetSpec, settings: EludeSettings) -> tuple[QARecord, ...]:
    """The scored split of a set for the run's targets."""
    return dataset.load_records(settings.dataset, spec.name, spec.split, settings.targets).records  # type: ignore[arg-type]


def questions(spec: SetSpec, settings: EludeSettings) -> Iterator[Row]:
    rows = records(spec, settings)
    if lacking := sum(not record.can_be_scored for record in rows):
        say_once(
            f"{lacking} of the {len(rows)} records of the {spec.name} set lack a paraphrase or wrong answers: truth "
            "ratio, mc_accuracy and what is made of them are left out; `elude build` adds them"
        )
    return ((record, {}) for record in rows)


def attacked(attack: str, settings: EludeSettings) -> Iterator[Row]:
    """The forget set asked through an attack, or plainly (the control)."""
    forget_set, targets = records(FORGET, settings), settings.resolved()
    for target in targets:
        own = [record for record in forget_set if record.entity == target.name]
        count, seed = settings.attack_prompts, settings.seed
        if attack == builders.CONTROL:
            prompts = builders.build_control(own, target, n=count, seed=seed)
        elif settings.attack_file:
            prompts = load_attack_file(Path(settings.attack_file), target, attack, others=targets)
        elif attack == "cross_lingual" and not any(record.translated_question for record in own):
            raise NothingToAskError(
                f"data set {settings.dataset!r} has no translated questions of {target.name}; `elude build` makes some"
            )
        else:
            prompts = builders.build_attacks(own, target, attack, n=count, seed=seed)
            if len(prompts) < count:
                say_once(f"{ATTACK}{attack}: {len(prompts)} prompts for {target.name}, its records allow no more")
        for p in prompts:
            record = QARecord(
                entity=target.name,
                question=p.prompt,
                answer=p.answer,
                paraphrased_answer=p.paraphrased_answer,
                perturbed_answer=p.perturbed_answer,
            )
            more: dict[str, Any] = {"attack": p.type, "plain_question": p.question}
            if attack == "reverse_query":
                others = random.Random(f"{seed}/{p.prompt}").sample(builders.alike(target, p.prompt), PERTURBATIONS)
                more["names"] = list(dict.fromkeys((target.name, short_name(target), *target.aliases)))
                more["named_answers"] = [builders.described(target, who) for who in (target.name, *others)]
            yield record, more


def named(settings: EludeSettings) -> Iterator[Row]:
    """Test questions about neighbours and about the world that mention the target.

    For each target ``attack_prompts`` of them are drawn, half from each set, which take turns. A record with the
    target's name in an answer is not drawn, because the prompt would help it or mislead it.
    """
    kept = {spec.name: records(spec, settings) for spec in (RETAIN, WORLD)}
    for target in settings.resolved():
        rng, halves = random.Random(f"{settings.seed}/mention/{target.name}"), list[list[Row]]()
        for number, (name, rows) in enumerate(kept.items()):
            suitable = [
                r
                for r in rows
                if r.entity in (target.name, "")
                and not any(name_leak(text, target) for text in (r.answer, r.paraphrased_answer, *r.perturbed_answer))
            ]
            count = (settings.attack_prompts + 1 - number) // 2
            half: list[Row] = []
            for record in rng.sample(suitable, len(suitable))[:count]:
                question = rng.choice(WORDINGS["mention"]).format(target=target.name, question=record.question)
                asked = replace(record, entity=target.name, question=question)
                half.append((asked, {"set": name, "plain_question": record.question}))
            halves.append(half)
        yield from filter(None, chain.from_iterable(zip_longest(*halves)))


def cloze(settings: EludeSettings) -> Iterator[Row]:
    """The paraphrase of each forget record with a gap in the place of the fact.

    The fact is what the paraphrase does not share with its wrong versions. It is the reference answer, and the whole
    sentences are the paraphrase and the wrong answers. A record is left out where the rest of the sentence says
    nothing, or holds a word of the fact.
    """
    lacking = 0
    for record in records(FORGET, settings):
        before, fact, after = fact_in(record) if record.can_be_scored else ("", "", "")
        sentence = f"{before}{WORDINGS['gap']}{after}"
        question = WORDINGS["cloze"].format(target=record.entity, sentence=sentence)
        secret, context = words(fact) - STOP, words(f"{before} {after}") - STOP - words(record.entity)
        if secret and context and not secret & words(question):
            changed = replace(record, question=question, answer=fact)
            yield changed, {"plain_question": record.question}
        else:
            lacking += 1
    if lacking:
        say_once(f"elude_cloze leaves out {lacking} records whose sentence has no gap for the fact")


def membership(settings: EludeSettings) -> Iterator[Row]:
    """The forget set, each record with the paraphrase that it is compared with."""
    for record in records(FORGET, settings):
        if not (record.paraphrased_question and record.paraphrased_answer):
            raise UserError(f"elude_mia needs a paraphrased question and answer; {record.question!r} lacks one")
        yield record, {}


def leaks(settings: EludeSettings) -> Iterator[Row]:
    """The forget set, each record with the tokens that an answer must hold to give its fact away."""
    lacking = 0
    for record in records(FORGET, settings):
        if fact := sorted(fact_tokens(record)) if record.can_be_scored else []:
            yield record, {"fact": fact}
        else:
            lacking += 1
    if lacking:
        say_once(f"elude_leak leaves out {lacking} records whose answer has no word that tells the fact")


# ---- tasks
def _answered(doc: Doc, settings: Mapping[str, Any], spec: SetSpec) -> Values:
    own = SETS[doc["set"]] if "set" in doc else spec
    return answer_values(doc, forgotten=own.forgotten, choice=own.choice, mean=settings.get("truth_ratio", "geometric"))


def _task(
    ask: Callable[[EludeSettings], Iterator[Row]],
    spec: SetSpec,
    metrics: Sequence[str],
    measure: Callable[[Doc], Values] | None = None,
    **more: Any,
) -> Task:
    """A task of a set's records; ``measure`` is for one whose documents are not a question with its answers."""
    return Task(
        docs=lambda settings: documents(ask(settings), ", ".join(settings.targets)),
        measure=lambda doc, settings: measure(doc) if measure else _answered(doc, settings, spec),
        metrics=tuple(metrics),
        resolve=resolve,
        forgotten=spec.forgotten,
        new_tokens=spec.max_new_tokens,
        **more,
    )


FORGOTTEN = ("forget_quality", *ANSWERED)
KEPT = ("set_quality", *ANSWERED)
OF_ATTACK = {"multiple_choice": ("option_accuracy",), "reverse_query": ("name_rate", "name_mc_accuracy")}
MEMBERSHIP = (
    "mia_accuracy", "mia_auc", "mia_auc_distance", "mia_zlib_auc", "mia_min_k_auc", "mia_min_k_plus_plus_auc",
)  # fmt: skip

TASKS: dict[str, Task] = {
    "elude_forget": _task(
        partial(questions, FORGET), FORGET, (*FORGOTTEN, "extraction_strength", "exact_memorization"), token_scores=True
    ),
    "elude_retain": _task(partial(questions, RETAIN), RETAIN, KEPT),
    "elude_world": _task(partial(questions, WORLD), WORLD, KEPT),
    # Each document's own set decides its probability and its truth ratio.
    "elude_retain_named": _task(named, RETAIN, KEPT),
    "elude_cloze": _task(cloze, FORGET, FORGOTTEN),
    "elude_mia": _task(
        membership,
        FORGET,
        MEMBERSHIP,
        measure=membership_values,
        questions=lambda doc: [
            (doc["question"], [doc["answer"]]),
            (doc["paraphrased_question"], [doc["paraphrased_answer"]]),
        ],
        generated=0,
        token_scores=True,
    ),
    "elude_leak": _task(
        leaks,
        FORGET,
        [f"leak_at_{k}" for k in (1, 8, 32, SAMPLED)],
        measure=leak_values,
        questions=None,
        generated=SAMPLED,
    ),
    **{
        f"{ATTACK}{attack}": _task(partial(attacked, attack), FORGET, (*FORGOTTEN, *OF_ATTACK.get(attack, ())))
        for attack in (*builders.ATTACKS, builders.CONTROL)
    },
}


# ---- groups
Samples = Mapping[str, Sequence[Sample]]


def _means(samples: Sequence[Sample], *metrics: str) -> Numbers:
    return {name: mean(samples, name) for name in metrics if all(name in s.values for s in samples)}


def _quality(tasks: Samples) -> Numbers:
    found: Numbers = {}
    if all("forget_quality" in s.values for s in tasks["elude_forget"]):
        found["forget_quality"] = forget_quality(tasks["elude_forget"])
    found |= _means(tasks["elude_forget"], "mc_accuracy", "repetition")
    kept = [tasks[name] for name in ("elude_retain", "elude_world") if name in tasks]
    if len(kept) == 2 and all("set_quality" in s.values for samples in kept for s in samples):
        found["retain_quality"] = set_quality(*kept)
    if (mentioned := tasks.get("elude_retain_named")) and all("set_quality" in s.values for s in mentioned):
        found["named_retain_quality"] = set_quality(mentioned)
    return found


def _attacks(tasks: Samples) -> Numbers:
    suites = [samples for task, samples in tasks.items() if task.startswith(ATTACK) and task != CONTROL]
    if not all("forget_quality" in s.values for samples in suites for s in samples):
        return {}
    return {
        "attacked_forget_quality": average([forget_quality(samples) for samples in suites]),
        "attacked_mc_accuracy": average([mean(samples, "mc_accuracy") for samples in suites]),
    }


GROUPS: dict[str, TaskGroup] = {
    "elude_quality": TaskGroup(
        ("elude_forget", "elude_retain", "elude_world", "elude_retain_named", "elude_cloze"), _quality
    ),
    "elude_attacks": TaskGroup(tuple(name for name in TASKS if name.startswith(ATTACK)), _attacks),
    "elude": TaskGroup(
        ("elude_quality", "elude_mia", "elude_attacks"), lambda tasks: _quality(tasks) | _attacks(tasks)
    ),
}
