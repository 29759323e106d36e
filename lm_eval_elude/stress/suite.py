"""The attacks of a suite on a checkpoint and on its reference, one file for each finished run.

A run is an attack with one setting, on one half where it has halves, on one model. It depends on nothing but its own
seed, so a command that was killed goes on where no file lies yet, and ends in the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from lm_eval_elude.data import jsonio
from lm_eval_elude.data.manifest import read_manifest
from lm_eval_elude.data.records import QARecord, fingerprint
from lm_eval_elude.errors import UserError
from lm_eval_elude.model.scorer import Scorer, layers_of, load_model, repeatable, score_all
from lm_eval_elude.scoring.benchmarks import BENCHMARKS
from lm_eval_elude.scoring.likelihood import harmonic_mean
from lm_eval_elude.scoring.samples import mean
from lm_eval_elude.scoring.settings import Settings, has_known, provenance
from lm_eval_elude.stress import depth, outcome
from lm_eval_elude.stress.outcome import CHECKPOINT, DEPTH, ORIGINAL, REFERENCE, START, TASK, Docs, FactDepth, Point
from lm_eval_elude.stress.weights import WEIGHT_ATTACKS, Material, WeightAttack, facts, suite_lessons
from lm_eval_elude.text.chat import Renderer, load_tokenizer

Suite = Literal["glance", "quick", "full"]
SETTINGS, WORK = "settings.json", "work"
SPLITS = {"glance": 1, "quick": 1, "full": 3}  # of the forget set into two halves, each of which is learnt once
RETAINED = 32  # retain records by which a model's retain quality is judged
_BATCH = 16


class Questions:
    """The documents of a task (``most`` of them, if given, drawn with ``seed``), tokenized once for all models."""

    def __init__(self, task: str, settings: Settings, renderer: Renderer, most: int = 0, seed: int = 0) -> None:
        self.benchmark, self.end_is_asked = BENCHMARKS[task], renderer.end_is_asked
        rows = self.benchmark.records(settings)
        if 0 < most < len(rows):
            rows = random.Random(f"{seed}/{task}").sample(rows, most)
        self.records: list[QARecord] = [record for record, _ in rows]  # type: ignore[misc]
        self.docs = self.benchmark.documents(rows)
        self._samples = []
        for doc in self.docs:
            asked = self.benchmark.requests(doc, renderer, settings)
            pairs = [request.arguments for request in asked if request.kind == "loglikelihood"]
            self._samples.append([renderer.encode_pair(context, continuation) for context, continuation in pairs])
        if len({len(samples) for samples in self._samples}) > 1:
            raise UserError(f"{task}: its records do not have the same number of answers")

    def answered(self, model: Any, numbers: Sequence[int] | None = None) -> Docs:
        """Documents (all of them, or those of some numbers) with a model's scores of their answers."""
        docs = [self.docs[i] for i in numbers] if numbers is not None else self.docs
        samples, group = [sample for doc in docs for sample in self._samples[doc["id"]]], len(self._samples[0])
        sums, counts = score_all(Scorer(model), samples, _BATCH, group)
        result = []
        rows = zip(docs, sums.view(-1, group).tolist(), counts.view(-1, group).tolist(), strict=True)
        for doc, totals, lengths in rows:
            scores = self.benchmark.answer_scores(doc, [(total,) for total in totals], lengths, self.end_is_asked)
            result.append({**doc, "answer_scores": [list(score) for score in scores], "generated": None})
        return result


class Cell(NamedTuple):
    """One run: an attack with a setting, what is learnt and what is asked (numbers of documents), and the model."""

    attack: WeightAttack
    setting: Any
    fold: int
    learnt: Sequence[int]
    asked: Sequence[int]
    role: str

    @property
    def file(self) -> str:
        return f"{self.attack.name}_{self.setting.name}_{self.fold}_{self.role}.json"


class Stress:
    """A suite of attacks on a checkpoint.

    ``models`` are folders or Hub ids by role; ``settings`` say what is asked, ``suite`` which settings of ``attacks``
    are tried; ``seed`` is of the halves, of the order of what is learnt and of new adapters. UserError where a model
    has another tokenizer, or a target too few records.
    """

    def __init__(
        self, models: Mapping[str, str], settings: Settings, suite: Suite = "quick", seed: int = 0,
        attacks: Sequence[WeightAttack] = tuple(WEIGHT_ATTACKS.values()),
    ) -> None:  # fmt: skip
        # The models that a task of lm-eval would ask are those of ``models`` here.
        settings = replace(settings, reference="", original="")
        self.models, self.settings, self.suite, self.seed = models, settings, suite, seed
        transformers_logging.disable_progress_bar()  # models are loaded many times
        warnings.filterwarnings("ignore", module="peft|transformers")
        if _knew(models[REFERENCE], models[CHECKPOINT]):
            raise UserError(f"--reference {models[REFERENCE]}: is no model that never knew the targets; name one")
        self.renderer = Renderer(load_tokenizer(models[CHECKPOINT]))
        for role in (REFERENCE, ORIGINAL):
            if Renderer(load_tokenizer(models[role])).fingerprint != self.renderer.fingerprint:
                raise UserError(f"--{role} {models[role]}: its tokenizer is not that of the checkpoint")
        self.forget = Questions(TASK, settings, self.renderer)
        self.retain = Questions("elude_retain", settings, self.renderer, RETAINED, seed)
        # Of each attack what it would train on if it had all facts.
        self.lessons, lacking = suite_lessons(attacks, suite, self.forget.records, settings, seed)
        self.left_out = [f"{name} is left out: {reason}" for name, reason in lacking.items()]
        self.attacks = [attack for attack in attacks if attack.name not in lacking]
        self.cells = list(self._cells())
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        repeatable(self.device)

    def _cells(self) -> Iterator[Cell]:
        everything = range(len(self.forget.docs))
        folds = [fold for split in range(SPLITS[self.suite]) for fold in self._halves(split)]
        for attack in self.attacks:
            for setting in getattr(attack, self.suite):
                for number, (learnt, asked) in enumerate(folds if attack.halves else [(everything, everything)]):
                    for role in (CHECKPOINT, REFERENCE):
                        yield Cell(attack, setting, number, learnt, asked, role)

    def _halves(self, split: int) -> list[tuple[list[int], list[int]]]:
        """The numbers of the documents in two halves, in both orders; each target's are halved by themselves."""
        first: list[int] = []
        rng = random.Random(f"{self.seed}/halves/{split}")
        for target in self.settings.targets:
            of_target = [i for i, record in enumerate(self.forget.records) if record.entity == target]
            if len(of_target) < 2:
                raise UserError(f"{target} has {len(of_target)} forget records, and relearning on one half needs two")
            first += rng.sample(of_target, len(of_target) // 2)
        first.sort()
        second = [i for i in range(len(self.forget.records)) if i not in first]
        return [(first, second), (second, first)]

    def describe(self) -> dict[str, Any]:
        """What the numbers depend on, as a results file has it."""
        models = {role: provenance({"pretrained": name}) for role, name in self.models.items()}
        return {
            **asdict(self.settings),
            "versions": models[CHECKPOINT]["versions"],
            "models": {role: {"checkpoint": of_role["checkpoint"]} for role, of_role in models.items()},
            "data": self.forget.benchmark.describe_data(self.settings),
            "template": self.renderer.fingerprint,
            "fingerprint": fingerprint(self.forget.records),
            "retain_fingerprint": fingerprint(self.retain.records),
            "lessons": {  # SHA-256
                name: hashlib.sha256(json.dumps(pairs).encode()).hexdigest() for name, pairs in self.lessons.items()
            },
            "suite": self.suite,
            "stress_seed": self.seed,
            "device": self.device.type,
        }

    def load(self, role: str) -> Any:
        """A model in float32, without dropout; an adapter is merged into its base."""
        name, flag = self.models[role], _flag(role)
        if (Path(name) / "adapter_config.json").is_file():
            from peft import PeftConfig, PeftModel

            base = str(PeftConfig.from_pretrained(name).base_model_name_or_path)
            model = load_model(base, dtype=torch.float32, flag=f"{flag} {name}: its base")
            model = PeftModel.from_pretrained(model, name).merge_and_unload()
            model.requires_grad_(True)  # peft froze the base
        else:
            model = load_model(name, dtype=torch.float32, flag=flag)
        return model.to(self.device).eval()

    def run(self, out: Path, say: Callable[[str], None], reference_run: Path | None = None) -> None:
        """Do what is not done yet, and write the outcome.

        ``reference_run`` is the folder of a run on another checkpoint. What it measured of the original and of the
        reference is copied, since it would come out the same. Errors as of :func:`open_folder`,
        :func:`check_reference_run` and :func:`outcome.knowledge`, and where a model has no retain quality to lose.
        """
        described = jsonio.finite(self.describe())
        if reference_run:
            check_reference_run(reference_run, described)
        open_folder(out, described)
        for path in sorted((reference_run / WORK).glob("*.json")) if reference_run else ():
            if path.stem.endswith((f"_{REFERENCE}", f"_{ORIGINAL}")) and not (out / WORK / path.name).exists():
                jsonio.write(out / WORK / path.name, jsonio.finite(_read(path)))
        for line in self.left_out:
            say(line)
        waiting = [cell for cell in self.cells if not (out / WORK / cell.file).is_file()]
        if waiting and self.suite == "full":
            say(self.cost(waiting))
        for role in self.models:
            if not (path := out / WORK / f"{START}_{role}.json").is_file():
                jsonio.write(path, jsonio.finite([self._scored(self.load(role), 0)]))
        start = {role: _read(out / WORK / f"{START}_{role}.json")[0] for role in self.models}
        quality = {role: point["retain_quality"] for role, point in start.items()}
        for role in (CHECKPOINT, REFERENCE):
            if not quality[role] > 0:
                value = "0" if quality[role] == 0 else "no number"
                raise UserError(
                    f"{_flag(role)} {self.models[role]}: its retain quality is {value} before any attack, so there "
                    "is nothing that it could keep; name another model"
                )
        start_docs = {role: self._docs([point]) for role, point in start.items()}
        outcome.knowledge(start_docs, described)
        if not (out / DEPTH).is_file():
            jsonio.write(out / DEPTH, jsonio.finite(self._depth(reference_run)))
        with tqdm(total=len(self.cells), initial=len(self.cells) - len(waiting), unit="run",
                  disable=not sys.stderr.isatty()) as bar:  # fmt: skip
            for cell in waiting:
                bar.set_description(f"{cell.attack.name} {cell.setting.name}")
                jsonio.write(out / WORK / cell.file, jsonio.finite(list(self._attack(cell))))
                bar.update()
        rows = [cell.attack for cell in self.cells]
        attacks = {row.name: {"sentence": row.sentence, "original": row.original, "inside": row.inside} for row in rows}
        outcome.finish(out, described, attacks, start_docs, self._points(out / WORK, quality))

    def _attack(self, cell: Cell) -> Iterator[dict[str, Any]]:
        seed = f"{self.seed}/{cell.attack.name}/{cell.setting.name}/{cell.fold}"
        records = [self.forget.records[i] for i in cell.learnt]
        pairs = cell.attack.lessons(records, self.settings, self.seed) if cell.attack.lessons else []
        material = Material(pairs, self.renderer, lambda: self.load(ORIGINAL), seed)
        for at, model in cell.attack.run(self.load(cell.role), cell.setting, material):
            yield self._scored(model, at, cell.asked)

    def _scored(self, model: Any, at: float, asked: Sequence[int] | None = None) -> dict[str, Any]:
        """A point of a curve as its file has it: the scores of what is asked, and the retain quality without ROUGE."""
        scores = {doc["id"]: doc["answer_scores"] for doc in self.forget.answered(model, asked)}
        settings = {"truth_ratio": self.settings.truth_ratio}
        rows = [{"doc": doc, "filtered_resps": []} for doc in self.retain.answered(model)]
        kept = [self.retain.benchmark.measure(row, settings) for row in rows]
        quality = harmonic_mean([mean(kept, metric).value for metric in ("probability", "truth_ratio")])
        return {"at": at, "retain_quality": quality, "scores": scores}

    def _docs(self, points: Sequence[Mapping[str, Any]]) -> Docs:
        """The scored documents of some points, in the order of their numbers."""
        scored = sorted((row for point in points for row in point["scores"].items()), key=lambda row: int(row[0]))
        return [{**self.forget.docs[int(i)], "answer_scores": scores, "generated": None} for i, scores in scored]

    def _points(self, work: Path, quality: Mapping[str, float]) -> Iterator[Point]:
        """The points of all curves; those of the halves are one point, in which every record was held out."""
        for (attack, setting), cells in groupby(self.cells, lambda cell: (cell.attack.name, cell.setting)):
            runs: dict[str, list[Any]] = {CHECKPOINT: [], REFERENCE: []}
            for cell in cells:
                runs[cell.role].append(_read(work / cell.file))
            for place, at in enumerate(setting.points):
                points = {role: [run[place] for run in of_role] for role, of_role in runs.items()}
                docs = {role: self._docs(of_role) for role, of_role in points.items()}
                kept = {
                    role: sum(p["retain_quality"] for p in of_role) / len(of_role) / quality[role]
                    for role, of_role in points.items()
                }
                yield Point(attack, setting.name, at, docs, kept)

    def _depth(self, reference_run: Path | None) -> list[FactDepth]:
        """The unlearning depth of every fact, as its file has it; of none where the reference is built otherwise."""
        original, never_knew = self.load(ORIGINAL), self.load(REFERENCE)
        self._can_move(REFERENCE, never_knew, original)
        shapes = [[tuple(p.shape) for p in layers_of(m).parameters()] for m in (original, never_knew)]
        samples = depth.stated_facts(self.forget.records, self.renderer)
        if shapes[0] != shapes[1] or not samples:
            return []
        if reference_run and (file := reference_run / DEPTH).is_file():
            found = [row["never_knew"] for row in jsonio.read(file, list[FactDepth])]
            if [*map(len, found)] != [len(layers_of(original))] * len(samples):
                raise UserError(f"--reference-run: {file} is not of these facts and layers; leave the flag out")
            found = [[math.nan if drop is None else drop for drop in of_fact] for of_fact in found]
            carried = torch.tensor(found, dtype=torch.double).T
        else:
            carried = depth.drops(original, never_knew, [*samples.values()])
        del never_knew  # so that two models are in memory at once, not three
        checkpoint = self.load(CHECKPOINT)
        self._can_move(CHECKPOINT, checkpoint, original)
        drops = [carried, depth.drops(original, checkpoint, [*samples.values()])]
        rows = zip(samples, depth.scores(*drops), *(of_model.T.tolist() for of_model in drops), strict=True)
        return [
            {"entity": self.forget.records[place].entity, "question": self.forget.records[place].question,
             "depth": score, "never_knew": carried, "checkpoint": gone}
            for place, score, carried, gone in rows
        ]  # fmt: skip

    def _can_move(self, role: str, model: Any, original: Any) -> None:
        """UserError where an attack moves weights towards the original's, and a model has others than these."""
        sizes = [{name: weight.shape for name, weight in m.named_parameters()} for m in (model, original)]
        if sizes[0] != sizes[1] and (
            moving := [row.name for row in self.attacks if row.original and getattr(row, self.suite)]
        ):
            raise UserError(
                f"{_flag(role)} {self.models[role]}: its weights have other names or sizes than those of --original "
                f"{self.models[ORIGINAL]}, and {moving[0]} moves them towards these; name a model that is built alike, "
                "or give --suite glance"
            )

    def cost(self, cells: Sequence[Cell]) -> str:
        """What is still to do, and about how long it takes here: loading, a scoring and five steps are timed."""
        began = time.monotonic()
        model = self.load(CHECKPOINT)
        loading, began = time.monotonic() - began, time.monotonic()
        self._scored(model, 0)
        scoring = time.monotonic() - began
        row = WEIGHT_ATTACKS["relearn_half"]
        setting, began = row.quick[0]._replace(points=(5,)), time.monotonic()
        pairs = facts(self.forget.records, self.settings, self.seed)
        list(row.run(model, setting, Material(pairs, self.renderer, lambda: None, "")))
        step = (time.monotonic() - began) / 5
        steps = sum(int(cell.setting.points[-1]) for cell in cells if cell.attack.lessons)
        scorings = sum(len(cell.setting.points) for cell in cells)
        minutes = (len(cells) * loading + steps * step + scorings * scoring) / 60
        return f"{len(cells)} runs: {steps} steps of training, {scorings} scorings, about {minutes:.0f} minutes here"


def open_folder(out: Path, described: Mapping[str, Any]) -> None:
    """Make the folder of a run; UserError where one is there that is of another run, or of something else."""
    if (out / SETTINGS).is_file():
        if other := _differing(jsonio.load(out / SETTINGS), described):
            raise UserError(f"--out {out}: the run there differs in {', '.join(other)}; name another folder")
    elif out.exists() and (not out.is_dir() or not all(map(_half_written, out.iterdir()))):
        raise UserError(f"--out {out}: exists already and is no folder of elude stress; name another one")
    out.mkdir(parents=True, exist_ok=True)
    jsonio.write(out / SETTINGS, described)  # before all else: a folder without it is somebody else's
    (out / WORK).mkdir(exist_ok=True)
    for path in filter(_half_written, (*out.iterdir(), *(out / WORK).iterdir())):
        path.unlink()


def check_reference_run(folder: Path, described: Mapping[str, Any]) -> None:
    """UserError where a folder has no run, or one that differs in more than its checkpoint."""
    before = jsonio.load(folder / SETTINGS) if (folder / SETTINGS).is_file() else None
    if not isinstance(before, dict) or not isinstance(before.get("models"), dict):
        raise UserError(f"--reference-run {folder}: is no folder of elude stress")
    before["models"] |= {CHECKPOINT: described["models"][CHECKPOINT]}
    if other := _differing(before, described):
        raise UserError(
            f"--reference-run {folder}: the run there differs in {', '.join(other)}, not in CHECKPOINT alone"
        )


def _differing(before: Any, described: Mapping[str, Any]) -> list[str]:
    """The settings in which a run that was begun is another one than that which is described."""
    before, absent = before if isinstance(before, dict) else {}, object()
    names = dict.fromkeys([*described, *before])
    return [name for name in names if before.get(name, absent) != described.get(name, absent)]


def _half_written(path: Path) -> bool:
    """Whether a process that was killed while it wrote left the file."""
    name = path.name
    return name != path.name and name.endswith((".json", ".jsonl")) and path.is_file()


def _knew(reference: str, checkpoint: str) -> bool:
    """Whether a reference is the checkpoint itself, or a model that this was made from."""
    known, mine = (provenance({"pretrained": name})["checkpoint"][0] for name in (reference, checkpoint))
    manifest = read_manifest(checkpoint)
    return known == mine or bool(manifest and has_known(manifest, known))


def _flag(role: str) -> str:
    return "CHECKPOINT" if role == CHECKPOINT else f"--{role}"


def _read(path: Path) -> list[dict[str, Any]]:
    """The points of a work file, in which null is a number that there was not."""
    text = jsonio.read_text(path).replace("null", "NaN")  # it holds no text but its keys
    value = jsonio.loads(text, str(path))
    points: list[dict[str, Any]] = jsonio.check(value, list[dict[str, Any]], str(path))
    return points
