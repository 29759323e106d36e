"""A suite of attacks on a checkpoint and the same on the retrained model, into one table."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.sets import FORGET, RETAIN, WORLD, SetSpec
from lm_eval_elude.errors import UserError, reason
from lm_eval_elude.metrics.estimates import harmonic
from lm_eval_elude.metrics.samples import Sample, Values, answer_values, mean
from lm_eval_elude.model.layers import layers_of
from lm_eval_elude.model.scorer import Scorer, load_model, score_all
from lm_eval_elude.stress.attacks import RANK, WEIGHT_ATTACKS, Setting, relearn, suite
from lm_eval_elude.stress.depth import drops, stated_facts
from lm_eval_elude.stress.table import CHECKPOINT, DEPTH, FILE, NONE, ORIGINAL, RETRAINED, Row, append, read
from lm_eval_elude.tasks import rwku
from lm_eval_elude.tasks.elude import EludeSettings, records
from lm_eval_elude.tasks.settings import template_of
from lm_eval_elude.tasks.task import Published, answers, documents
from lm_eval_elude.text.chat import Renderer, Texts, load_tokenizer

LARGE = 1_000_000_000  # parameters; above it weights are bfloat16 and an adapter is trained
ABOUT = "stress.json"
KEPT_RECORDS = 32  # of the retain and of the world set, by which utility is judged
_FLAGS = {CHECKPOINT: "CHECKPOINT", RETRAINED: "--reference", ORIGINAL: "--original"}
_BATCH = 16


class Questions:
    """The questions of a set that can be scored (``most`` of them, if given), tokenized once for all models."""

    def __init__(self, spec: SetSpec, settings: EludeSettings, renderer: Renderer, most: int = 0) -> None:
        self.spec, self.mean = spec, settings.truth_ratio
        self.records = [record for record in records(spec, settings) if record.can_be_scored]
        if not self.records:
            raise UserError(f"data set {settings.dataset!r}: no {spec.name} record has a paraphrase and wrong answers")
        if 0 < most < len(self.records):
            self.records = random.Random(settings.seed).sample(self.records, most)
        self.docs = documents(((record, {}) for record in self.records), spec.name)
        self.encoded = [[renderer.encode_turn(q, text) for q, texts in answers(d) for text in texts] for d in self.docs]

    def values(self, model: Any, asked: set[str] | None = None) -> list[tuple[str, Values]]:
        """By question (all, or those asked) what log-probabilities give; nothing is generated."""
        numbers = [i for i, doc in enumerate(self.docs) if asked is None or doc["question"] in asked]
        rows = [self.encoded[i] for i in numbers]
        group = len(rows[0]) if len({len(row) for row in rows}) == 1 else 1  # a row shares its question
        sums, counts = score_all(Scorer(model), [sample for row in rows for sample in row], _BATCH, group)
        pairs = iter(zip(sums.tolist(), counts.tolist(), strict=True))
        found: list[tuple[str, Values]] = []
        for i, row in zip(numbers, rows, strict=True):
            doc: dict[str, Any] = {**self.docs[i], "answer_scores": [next(pairs) for _ in row]}
            kinds: Any = {"forgotten": self.spec.forgotten, "choice": self.spec.choice, "mean": self.mean}
            found.append((doc["question"], answer_values(doc, **kinds)))
        return found


class Stress:
    """A suite of attacks.

    ``models`` are folders or Hub ids by role; without an original there is no depth score. ``full`` trains all weights
    in float32, whatever the size. UserError where a model has another tokenizer.
    """

    def __init__(self, models: Mapping[str, str], settings: EludeSettings, name: str, full: bool = False) -> None:
        self.models, self.settings, self.name, self.full = models, settings, name, full
        template = template_of({"pretrained": models[CHECKPOINT]})
        self.renderer = Renderer(load_tokenizer(models[CHECKPOINT]), template=template)
        for role, model in models.items():
            if Renderer(load_tokenizer(model), template=template).fingerprint != self.renderer.fingerprint:
                raise UserError(f"{_FLAGS[role]} {model}: its tokenizer or template is not that of the checkpoint")
        self.forget = Questions(FORGET, settings, self.renderer)
        self.kept = [Questions(spec, settings, self.renderer, KEPT_RECORDS) for spec in (RETAIN, WORLD)]

    def run(self, out: Path) -> Path:
        """Do what the table in a folder does not have yet; returns the table. UserError where it is of other models."""
        out.mkdir(parents=True, exist_ok=True)
        about = {"models": dict(self.models), "targets": [*self.settings.targets], "dataset": self.settings.dataset,
                 "seed": self.settings.seed, "full": self.full}  # fmt: skip
        if (file := out / ABOUT).is_file() and (there := json.loads(file.read_text(encoding="utf-8"))) != about:
            differs = [key for key in about if there.get(key) != about[key]]
            raise UserError(f"--out {out}: the attacks there have other {', '.join(differs)}; name another folder")
        file.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        table = out / FILE
        rows = read(table) if table.is_file() else []
        # The utility is the last row of a run: where it is, all are.
        done = {(r.attack, r.setting, r.step, r.role) for r in rows if r.metric == "retain_quality"}
        deep = {row.role for row in rows if row.attack == DEPTH}
        original = None
        if ORIGINAL in self.models and not {CHECKPOINT, RETRAINED} <= deep:
            original = self.load(ORIGINAL)
        for role in (RETRAINED, CHECKPOINT):
            model = self.load(role)
            if (NONE, "", 0.0, role) not in done:
                append(table, self.scored(model, (NONE, "", 0.0, role)))
            if original is not None and role not in deep:
                append(table, self.depth(original.to(model.device), model, role))
                original.to("cpu")  # one model beside its optimizer is enough
            rank = RANK if model.dtype == torch.bfloat16 else 0
            runs = suite(self.name, rank)
            waiting = [run for run in runs if (run[0], run[1].name, run[1].points[-1], role) not in done]
            before = weights_of(model)
            for attack, setting in tqdm(waiting, desc=f"attacks on the {role}", unit="attack", disable=None):
                try:
                    append(table, self.attacked(model, before, attack, setting, role))
                except (NotImplementedError, ValueError) as error:  # of a library, about this kind of model
                    tqdm.write(f"{attack}, {setting.name}, is left out: {reason(error)}", file=sys.stderr)
            del model, before
        return table

    def attacked(self, model: Any, before: Mapping[str, Any], name: str, setting: Setting, role: str) -> list[Row]:
        """The rows of one run, after which the weights are as ``before``.

        Of an attack that trains on halves, each half is asked while the other is learnt.
        """
        attack, found, quality = WEIGHT_ATTACKS[name], list[Row](), dict[float, list[float]]()
        for fold, (learnt, asked) in enumerate(self.halves() if attack.halves else [(self.forget.records, None)]):
            pairs = attack.pairs(learnt, self.settings) if attack.pairs else []
            seed = f"{self.settings.seed}/{name}/{setting.name}/{fold}"
            try:
                for step, changed in attack.run(model, setting, pairs, self.renderer, seed):
                    *rows, utility = self.scored(changed, (name, setting.name, step, role), asked)
                    found += rows
                    quality.setdefault(step, []).append(utility.value)
            finally:
                restore(model, before)
        return found + [
            Row(name, setting.name, step, role, "", "retain_quality", sum(values) / len(values))
            for step, values in quality.items()
        ]

    def halves(self) -> Iterator[tuple[Sequence[QARecord], set[str]]]:
        """The records of one half and the questions of the other, both ways round; each target is halved by itself."""
        first, rng = list[QARecord](), random.Random(f"{self.settings.seed}/halves")
        for target in self.settings.targets:
            own = [record for record in self.forget.records if record.entity == target]
            first += rng.sample(own, len(own) // 2)
        second = [record for record in self.forget.records if record not in first]
        for learnt, asked in ((first, second), (second, first)):
            yield learnt, {record.question for record in asked}

    def scored(self, model: Any, place: tuple[str, str, float, str], asked: set[str] | None = None) -> list[Row]:
        """A point: mc_accuracy and probability by record, and last the utility, which is without ROUGE."""
        values = self.forget.values(model, asked)
        rows = [Row(*place, q, metric, of_q[metric]) for q, of_q in values for metric in ("mc_accuracy", "probability")]
        parts = []
        for questions in self.kept:
            samples = [Sample("", q, i, of_q) for i, (q, of_q) in enumerate(questions.values(model))]
            parts += [mean(samples, metric) for metric in ("probability", "truth_ratio")]
        return [*rows, Row(*place, "", "retain_quality", harmonic(parts).value)]

    def depth(self, original: Any, model: Any, role: str) -> list[Row]:
        """How much less likely each fact is with one layer's states of the model; none where it is built otherwise."""
        samples = stated_facts(self.forget.records, self.renderer)
        shapes = [[tuple(p.shape) for p in layers_of(each).parameters()] for each in (original, model)]
        if shapes[0] != shapes[1] or not samples:
            return []
        found = drops(original, model, [*samples.values()]).tolist()
        return [
            Row(DEPTH, "", layer, role, question, "log_prob_drop", drop)
            for layer, of_layer in enumerate(found, 1)
            for question, drop in zip(samples, of_layer, strict=True)
        ]

    def load(self, role: str) -> Any:
        return loaded(self.models[role], _FLAGS[role], self.full)


def loaded(name: str, flag: str, full: bool) -> Any:
    """A model without dropout, an adapter merged into its base: float32, or bfloat16 where it is large."""
    if (Path(name) / "adapter_config.json").is_file():
        from peft import PeftConfig, PeftModel

        base = str(PeftConfig.from_pretrained(name).base_model_name_or_path)
        model = PeftModel.from_pretrained(load_model(base, flag=f"{flag} {name}: its base"), name)
        model = model.merge_and_unload()
    else:
        model = load_model(name, flag=flag)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = full or model.num_parameters() <= LARGE
    return model.to(device, torch.float32 if small else torch.bfloat16).eval().requires_grad_(False)


def weights_of(model: Any) -> dict[str, Any]:
    """A copy of a model's weights by name, on the CPU."""
    return {name: weight.detach().to("cpu", copy=True) for name, weight in model.named_parameters()}


def restore(model: Any, before: Mapping[str, Any]) -> None:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(before[name])


def relearn_passages(
    models: Mapping[str, str], settings: Published, name: str, full: bool, seed: int, out: Path
) -> Iterator[str]:
    """RepSelect's protocol on RWKU (arXiv 2606.17168): fine-tuning on half of the passages; the blanks are asked.

    Every rate of the suite starts from the model's own weights. The lines say the highest mean probability of a model.
    """
    tokenizer, template = load_tokenizer(models[CHECKPOINT]), template_of({"pretrained": models[CHECKPOINT]})
    prompts = rwku.Prompts("Answer:", settings, tokenizer, template)
    blanks = rwku.TASKS["rwku_forget_level1"].docs(settings)
    asked = [prompts.encode_turn(doc["question"], doc["answer"]) for doc in blanks]
    passages = [(p.question, p.answer) for p in rwku.of_targets(settings.dataset, rwku.PASSAGES, settings.targets)]
    half = random.Random(seed).sample(passages, -(-len(passages) // 2))
    for role in models:
        model, means = loaded(models[role], _FLAGS[role], full), list[float]()
        rank, before = RANK if model.dtype == torch.bfloat16 else 0, weights_of(model)
        for setting in (setting for attack, setting in suite(name, rank) if attack == "relearn_half"):
            for step, changed in chain([(0, model)], relearn(model, setting, half, Texts(tokenizer), str(seed))):
                values = score_all(Scorer(changed), asked, _BATCH).means.exp().tolist()
                place = ("relearn_passages", setting.name, float(step), role)
                pairs = zip(blanks, values, strict=True)
                append(out / FILE, [Row(*place, doc["question"], "probability", value) for doc, value in pairs])
                means.append(sum(values) / len(values))
            restore(model, before)
        yield f"{role}: the blanks' answers have probability {means[0]:.3f}, and {max(means):.3f} at most when relearnt"
