"""RepSelect's relearning on RWKU (arXiv 2606.17168): fine-tuning on half of the passages while the blanks are asked."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from statistics import fmean

import torch

from lm_eval_elude.model.scorer import Scorer, score_all
from lm_eval_elude.stress.attacks import RANK, relearn, suite
from lm_eval_elude.stress.suite import loaded
from lm_eval_elude.stress.table import FILE, Row, append
from lm_eval_elude.tasks import rwku
from lm_eval_elude.tasks.settings import template_of
from lm_eval_elude.text.chat import Texts, load_tokenizer


def relearn_passages(
    models: Mapping[str, str], settings: rwku.RwkuSettings, name: str, full: bool, seed: int, out: Path
) -> Iterator[str]:
    """Fine-tune each model by the suite's rates for ``relearn_half``, each time from its own weights.

    Writes the probability of the answer by blank and point, and yields a line for each model with the highest mean.
    """
    tokenizer, template = load_tokenizer(models["checkpoint"]), template_of({"pretrained": models["checkpoint"]})
    blanks, prompts = (
        rwku.TASKS["rwku_forget_level1"].docs(settings),
        rwku.Prompts("Answer:", settings, tokenizer, template),
    )
    asked = [prompts.encode_turn(doc["question"], doc["answer"]) for doc in blanks]
    passages = rwku.of_targets(settings.dataset, rwku.PASSAGES, settings.targets)
    half = random.Random(seed).sample([(p.question, p.answer) for p in passages], -(-len(passages) // 2))
    for role, place in models.items():
        means: list[float] = []
        rank = RANK if loaded(place, role, full).dtype == torch.bfloat16 else 0
        for setting in (setting for attack, setting in suite(name, rank) if attack == "relearn_half"):
            model = loaded(place, role, full)
            for step, changed in chain([(0, model)], relearn(model, setting, half, Texts(tokenizer), f"{seed}")):
                found = score_all(Scorer(changed), asked, 16).means.exp().tolist()
                about = ("relearn_passages", setting.name, step, role)
                rows = [Row(*about, d["question"], "probability", p) for d, p in zip(blanks, found, strict=True)]
                append(out / FILE, rows)
                means.append(fmean(found))
        yield f"{role}: mean probability of the blanks' answers {means[0]:.3f}, after relearning {max(means):.3f} at most"
