"""ELUDe's leaves and groups."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from lm_eval.api.instance import Instance

from lm_eval_elude import documents
from lm_eval_elude.attacks import builders as attacks
from lm_eval_elude.core.likelihood import AnswerScore
from lm_eval_elude.core.sets import FORGET, RETAIN, WORLD, SetSpec
from lm_eval_elude.documents import Asked, Pairs
from lm_eval_elude.results.numbers import TOKEN_ATTACKS, membership_attacks
from lm_eval_elude.results.reference import of_reference
from lm_eval_elude.results.samples import Sample
from lm_eval_elude.settings import model_renderer
from lm_eval_elude.tasks.base import QuestionGroup, QuestionTask

log = logging.getLogger("lm_eval.elude")

TEXT_METRICS = {"degenerate": False, "ngram_entropy": True, "refusal": False}


class EludeSet(QuestionTask):
    """A set of questions with probability, ROUGE-L recall and truth ratio, and the harmonic mean of the three."""

    spec: ClassVar[SetSpec]
    metrics: ClassVar = {
        "probability": True,
        "rougeL_recall": True,
        "truth_ratio": True,
        "set_quality": True,
        **TEXT_METRICS,
    }

    def make_docs(self) -> Iterable[Asked]:
        return documents.questions(self.spec, self.settings)

    def noted(self, sample: Sample) -> dict[str, Any]:
        return {"truth_ratio_raw": sample.values["truth_ratio_raw"]}

    def logged(self, metric: str, sample: Sample) -> float:
        if metric == "ks_p_value":  # of a single sample: R against the reference's
            metric = "truth_ratio_raw_gap"
        if metric.endswith("_gap"):
            name = metric.removesuffix("_gap")
            return self.logged(name, sample) - self.logged(name, *of_reference([sample]))
        return float(sample.values["quality" if metric.endswith("_quality") else metric])


class EludeForget(EludeSet):
    """``elude_forget``: the target's own questions; FQ is the harmonic mean of 1 - P, 1 - ROUGE and min(R, 1/R)."""

    spec = FORGET
    metrics: ClassVar = {
        "probability": False, "rougeL_recall": False, "truth_ratio": True, "forget_quality": True, **TEXT_METRICS,
    }  # fmt: skip
    gaps: ClassVar = {
        "forget_quality_gap": None, "probability_gap": None, "rougeL_recall_gap": None, "ks_p_value": True,
        "reference_divergence": False,
    }  # fmt: skip


class EludeRetain(EludeSet):
    """``elude_retain``: questions about the target's neighbours."""

    spec = RETAIN


class EludeWorld(EludeSet):
    """``elude_world``: questions about anything else; the probability is the answer's share among six."""

    spec = WORLD
    max_new_tokens = WORLD.max_new_tokens


class EludeAttack(EludeForget):
    """``elude_attack_<type>``: the forget set asked through one of nine attacks, scored by Forget Quality."""

    gaps: ClassVar = {"forget_quality_gap": None}

    def __init__(self, config: dict[str, Any]) -> None:
        self.attack = config["task"].removeprefix(documents.ATTACK)
        super().__init__(config)

    def make_docs(self) -> Iterable[Asked]:
        return documents.attacked(self.attack, self.settings)


class EludeMia(EludeSet):
    """``elude_mia``: whether the loss tells the forget set from its paraphrase (section 5.5).

    A backend that serves token log-probabilities (``--model elude`` says so in the rank that it gives the harness) is
    asked for these, and the AUC of more attacks is reported; ``mia_reference`` in --metadata names the reference model.
    """

    spec = FORGET
    generates = False
    # Both sides of one half give a model away, so an AUC has no direction and its distance from one half has.
    metrics: ClassVar = {
        "mia_accuracy": False, "mia_accuracy_std": None, "mia_auc": None, "mia_auc_low": None, "mia_auc_high": None,
        "mia_auc_distance": False,
    }  # fmt: skip
    gaps: ClassVar = {"mia_auc_gap": None, "privleak": None}
    token_attacks: tuple[str, ...] = ()  # of this run

    @property
    def loss_reference(self) -> str:
        """Model of the reference attack, "" for none."""
        return str(self.config.metadata.get("mia_reference") or "")

    @cached_property
    def reference_space_tokens(self) -> int:
        """:attr:`space_tokens` in the reference model's own tokens."""
        metadata = self.config.metadata
        return self.space_tokens_of(model_renderer({**metadata, "tokenizer": self.loss_reference, "revision": None}))

    def build_all_requests(self, *, tokenizer_name: str = "", **kwargs: Any) -> None:
        if "token_logprobs" in getattr(kwargs.get("rank"), "serves", ()):
            self.token_attacks = TOKEN_ATTACKS if self.loss_reference else TOKEN_ATTACKS[:-1]
            tokenizer_name += f"-tokens-{self.loss_reference}"  # other requests, so another cache
        else:
            names = ", ".join(sorted(TOKEN_ATTACKS))
            log.warning("ELUDe: only --model elude gives token log-probabilities: %s are absent", names)
        super().build_all_requests(tokenizer_name=tokenizer_name, **kwargs)

    def construct_requests(self, doc: dict[str, Any], ctx: str, *args: Any, **kwargs: Any) -> list[Instance]:
        requests = super().construct_requests(doc, ctx, *args, **kwargs)
        if not self.token_attacks:
            return requests
        asked: list[tuple[Any, ...]] = [r.args for r in requests if r.args[1].strip()]
        asked += [(*arguments, self.loss_reference) for arguments in asked] if self.loss_reference else []
        return [
            replace(requests[0], request_type="token_logprobs", arguments=a, idx=i, resps=[], filtered_resps={})  # type: ignore[arg-type]
            for i, a in enumerate(asked)
        ]

    def answer_scores(self, doc: dict[str, Any], results: list[Any]) -> list[AnswerScore]:
        if not self.token_attacks:
            return super().answer_scores(doc, results)
        # The white space at the start of a continuation belongs to the prompt.
        doc["prompt_tokens"] = self.space_tokens
        if self.loss_reference:
            doc["reference_prompt_tokens"] = self.reference_space_tokens
        own = [r.log_probs[self.space_tokens :] for r in results[:2]]
        return [AnswerScore(sum(log_probs), len(log_probs)) for log_probs in own]

    def noted(self, sample: Sample) -> dict[str, Any]:
        member, other = sample.values["loss"]
        return {"member_loss": member, "non_member_loss": other}

    def logged(self, metric: str, sample: Sample) -> float:
        """How much more a member looks like one than its paraphrase (nats per token for the loss)."""
        if metric in TOKEN_ATTACKS:
            member, other = sample.values[metric]
            return float(member - other)
        if metric in self.gaps:
            own, reference = (self.logged("loss", s) for s in (sample, *of_reference([sample])))
            return own - reference
        member, other = sample.values["loss"]
        return float(other - member)

    def higher_is_better(self) -> dict[str, Any]:
        return {**super().higher_is_better(), **dict.fromkeys(self.token_attacks, None)}

    def make_docs(self) -> Iterable[Asked]:
        return documents.compared(self.settings)

    def pairs(self, doc: dict[str, Any]) -> Pairs:
        return documents.compared_pairs(doc)

    def reported(self) -> None:
        for target, attack in membership_attacks(self.samples, self.settings.seed).items():
            if attack.reason:
                self.config.metadata["elude"]["mia_reason"] = attack.reason
                log.warning("ELUDe: no membership attack on %s: %s", target, attack.reason)


class EludeQuality(QuestionGroup):
    """``elude_quality``: forget, retain and world sets; FQ and RQ, the paper's main table."""

    children: ClassVar = {"elude_forget": EludeForget, "elude_retain": EludeRetain, "elude_world": EludeWorld}


class EludeAttacks(QuestionGroup):
    """``elude_attacks``: the nine attacks, their mean FQ, and the same records asked plainly as a control."""

    children: ClassVar = {f"elude_attack_{name}": EludeAttack for name in (*attacks.ATTACKS, attacks.CONTROL)}


class Elude(QuestionGroup):
    """``elude``: the paper's whole evaluation of one checkpoint."""

    children: ClassVar = {"elude_quality": EludeQuality, "elude_mia": EludeMia, "elude_attacks": EludeAttacks}
