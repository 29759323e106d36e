"""TOFU: its four sets asked as one of its evaluators asks them (Maini et al. 2024, arXiv 2401.06121)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lm_eval_elude.data import tofu
from lm_eval_elude.data.sets import SetSpec
from lm_eval_elude.errors import UserError
from lm_eval_elude.scoring.benchmark import Benchmark, BenchmarkGroup, Estimates, Row, Tasks, Template
from lm_eval_elude.scoring.conventions import CONVENTIONS, Convention
from lm_eval_elude.scoring.likelihood import TruthRatioMean
from lm_eval_elude.scoring.metrics import ks_p_value, retain_quality
from lm_eval_elude.scoring.settings import checkpoint_manifest, one_of, read_metadata, read_text
from lm_eval_elude.text.chat import Wording


@dataclass(frozen=True)
class TofuSettings:
    """What a run of TOFU's tasks scores.

    Attributes:
        split: what was forgotten, ``forget01``, ``forget05`` or ``forget10``.
        dataset: ``tofu``, ``tofu@REVISION`` or a folder.
        evaluator: whose convention is followed, a key of
            :data:`~lm_eval_elude.scoring.conventions.CONVENTIONS`.
        reference: results file, released log or model of a retained model; "" for none.
        truth_ratio: mean of the wrong answers' probabilities; the released evaluator's is geometric.
    """

    split: str
    dataset: str = tofu.SOURCE
    evaluator: str = "released"
    reference: str = ""
    truth_ratio: TruthRatioMean = "geometric"
    targets: tuple[str, ...] = ()  # the data have no entities
    guardrail: bool = False
    seed: int = 0  # nothing is drawn

    @property
    def convention(self) -> Convention:
        """How the evaluator asks."""
        return CONVENTIONS[self.evaluator]


KEYS = {
    "tofu_split": one_of(tofu.RETAIN_OF),
    "tofu_data": read_text,
    "tofu_evaluator": one_of(CONVENTIONS),
    "reference": read_text,
}


def scored(spec: SetSpec, settings: TofuSettings) -> Iterator[Row]:
    """The records of a set that the evaluator scores."""
    records = tofu.scored_records(settings.dataset, spec, settings.split)
    return ((record, {}) for record in records[: settings.convention.records or None])


@dataclass(frozen=True)
class TofuBenchmark(Benchmark):
    """One of TOFU's sets."""

    def resolve(self, metadata: Mapping[str, Any]) -> TofuSettings:
        """Decide split, data and convention: ``--metadata``, otherwise the checkpoint's manifest.

        UserError for an unknown split or option, or where nothing says which split.
        """
        values = read_metadata(metadata, KEYS)
        manifest = checkpoint_manifest(metadata)
        trained = manifest.settings if manifest else {}
        split = values.get("tofu_split") or trained.get("forget_split")
        if split not in tofu.RETAIN_OF:
            known = ", ".join(tofu.RETAIN_OF)
            raise UserError(f"TOFU's tasks need tofu_split in --metadata (one of {known}): what was forgotten")
        trained_data = manifest.dataset if manifest and trained.get("forget_split") else ""
        source = values.get("tofu_data") or trained_data or tofu.SOURCE
        evaluator = values.get("tofu_evaluator") or str(trained.get("tofu_evaluator"))
        evaluator = evaluator if evaluator in CONVENTIONS else "released"
        return TofuSettings(split, source, evaluator, values.get("reference", ""))

    def describe_data(self, settings: TofuSettings) -> dict[str, Any]:
        return tofu.HUB.describe(settings.dataset)

    def wording(self, settings: TofuSettings) -> Wording | None:
        return settings.convention.wording

    def system_text(self, doc: Mapping[str, Any], settings: TofuSettings) -> str:
        return settings.convention.system

    def generation(self, template: Template) -> dict[str, Any]:
        """Without a number of new tokens, which :meth:`for_prompt` says where the user does not."""
        return {key: value for key, value in super().generation(template).items() if key != "max_gen_toks"}

    def for_prompt(
        self, generation: Mapping[str, Any], prompt: str, template: Any, settings: TofuSettings
    ) -> dict[str, Any]:
        convention = settings.convention
        used = len(template.encode(prompt)) if convention.with_prompt else 0
        return {"max_gen_toks": max(1, convention.new_tokens - used), **generation}


BENCHMARKS: dict[str, Benchmark] = {
    spec.name: TofuBenchmark(spec.name, spec, "tofu forget" if spec.forgotten else "tofu kept", partial(scored, spec))
    for spec in tofu.SETS.values()
}


def _group(tasks: Tasks) -> Estimates:
    """Model utility, and forget quality where a retained model is known."""
    kept = [tasks[name] for name, spec in tofu.SETS.items() if not spec.forgotten]
    numbers = {"model_utility": retain_quality(*kept)}
    if all("ks_p_value" in sample.values for sample in tasks["tofu_forget"]):
        numbers["forget_quality"] = ks_p_value(tasks["tofu_forget"])
    return numbers


GROUPS = {"tofu": BenchmarkGroup(tuple(BENCHMARKS), _group)}
