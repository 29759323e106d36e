"""TOFU's leaves and group."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from lm_eval_elude.core import tofu
from lm_eval_elude.core.chat import Renderer
from lm_eval_elude.core.sets import SetSpec
from lm_eval_elude.documents import Asked
from lm_eval_elude.results.samples import Sample
from lm_eval_elude.settings import TofuSettings, model_renderer, resolve_tofu_settings
from lm_eval_elude.tasks.base import QuestionGroup, QuestionTask
from lm_eval_elude.tasks.elude import TEXT_METRICS

log = logging.getLogger("lm_eval.elude")


class TofuSet(QuestionTask):
    """One of TOFU's sets with probability, ROUGE-L recall and truth ratio."""

    spec: ClassVar[SetSpec]
    settings: TofuSettings  # type: ignore[assignment]
    metrics: ClassVar = {"probability": True, "rougeL_recall": True, "truth_ratio": True, **TEXT_METRICS}

    def resolve(self, metadata: Mapping[str, Any]) -> TofuSettings:  # type: ignore[override]
        return resolve_tofu_settings(metadata)

    def origin(self) -> dict[str, Any]:
        return tofu.describe(self.settings.dataset)

    @property
    def convention(self) -> tofu.Convention:
        """How the evaluator of the settings asks."""
        return tofu.CONVENTIONS[self.settings.evaluator]

    def make_renderer(self, metadata: Mapping[str, Any]) -> Renderer:
        return model_renderer(metadata, self.convention.wording)

    def make_docs(self) -> list[Asked]:
        records = tofu.scored_records(self.settings.dataset, self.spec, self.settings.split)
        return [(record, {}) for record in records[: self.convention.records or None]]

    def system_text(self, doc: dict[str, Any]) -> str:
        return self.convention.system

    def generation(self, prompt: str) -> dict[str, Any]:
        used = len(self.renderer.encode(prompt)) if self.convention.with_prompt else 0
        return {**self.config.generation_kwargs, "max_gen_toks": max(1, self.convention.new_tokens - used)}


class TofuForget(TofuSet):
    """``tofu_forget``: the forgotten authors; its forget quality is the KS p-value against a retained model."""

    spec = tofu.FORGET
    metrics: ClassVar = {"probability": False, "rougeL_recall": False, "truth_ratio": True, **TEXT_METRICS}
    gaps: ClassVar = {"ks_p_value": True}

    def reported(self) -> None:
        if self.reference is None:
            log.warning(
                "TOFU: no forget quality without a retained model: give a retained model's results or log as reference"
            )

    def logged(self, metric: str, sample: Sample) -> float:
        if metric == "ks_p_value":  # of a single sample: R against the retained model's
            return float(sample.values["truth_ratio_raw"] - sample.values["reference"]["truth_ratio_raw"])
        return super().logged(metric, sample)


class TofuRetain(TofuSet):
    """``tofu_retain``: the authors that are kept."""

    spec = tofu.RETAIN


class TofuRealAuthors(TofuSet):
    """``tofu_real_authors``: questions about authors there are."""

    spec = tofu.REAL_AUTHORS


class TofuWorldFacts(TofuSet):
    """``tofu_world_facts``: questions about the world."""

    spec = tofu.WORLD_FACTS


class Tofu(QuestionGroup):
    """``tofu``: model utility (harmonic mean of nine) and, with a retained model, forget quality."""

    children: ClassVar = {
        "tofu_forget": TofuForget, "tofu_retain": TofuRetain, "tofu_real_authors": TofuRealAuthors,
        "tofu_world_facts": TofuWorldFacts,
    }  # fmt: skip
