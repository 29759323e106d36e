"""The unlearning depth score (https://arxiv.org/abs/2605.24614): are the facts gone from the layers, or only masked?

Into the original model are put, one layer at a time, the states that another model has after that layer; the layers
above go on from them. D is by how many nats a token a fact becomes less likely. With the states of the model that
never knew it is what the layer carries of the fact; with those of the checkpoint, what is gone from it. The score of a
fact is the sum of D under the model that never knew, each times the share of it that the checkpoint reaches, over the
sum. It is 0 where every layer still carries the fact, and 1 where none does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lm_eval_elude.data.records import QARecord
from lm_eval_elude.model.layers import recorded, skip_first_layers
from lm_eval_elude.model.packing import collate
from lm_eval_elude.model.scorer import Scorer, answer_sums, progress
from lm_eval_elude.text.chat import Encoded, Renderer
from lm_eval_elude.text.words import fact_in

SHOWN = 0.05  # nats a token: a layer whose states carry less of a fact does not count
_BATCH = 16


def stated_facts(records: Sequence[QARecord], renderer: Renderer) -> dict[int, Encoded]:
    """By place of a record its question and paraphrased answer up to the fact, and the fact as what is scored."""
    samples = {}
    for place, record in enumerate(records):
        before, fact, _ = fact_in(record)
        if fact:
            prompt = renderer.prompt(record.question)
            start, whole = (renderer.encode(prompt + renderer.beginning(words)) for words in (before, before + fact))
            samples[place] = Encoded(whole, min(len(start), len(whole) - 1))
    return samples


@torch.no_grad()
def drops(original: Any, other: Any, samples: Sequence[Encoded]) -> Tensor:
    """D of each layer and sample, (layers, samples): the original with that layer's states of the other model.

    Both have the same layers. The log-probability of a fact is the mean over its tokens.
    """
    scorer, theirs, device = Scorer(original), Scorer(other), original.get_input_embeddings().weight.device
    columns = []
    for start in progress(range(0, len(samples), _BATCH), "unlearning depth", "batch"):
        batch = collate(samples[start : start + _BATCH], device)
        with recorded(other) as outputs:
            theirs(batch)
        plain = answer_sums(scorer(batch)[:, 0], batch.owners).means
        rows = []
        for number, output in enumerate(outputs, 1):
            with skip_first_layers(original, number, output):
                rows.append(plain - answer_sums(scorer(batch)[:, 0], batch.owners).means)
        columns.append(torch.stack(rows))
    return torch.cat(columns, 1).double().cpu()


def scores(never_knew: Tensor, unlearned: Tensor) -> list[float]:
    """The score of each sample from the :func:`drops` of both models, NaN where no layer carries its fact."""
    carried = torch.where(never_knew > SHOWN, never_knew, 0.0)
    reached = carried * (unlearned / never_knew.clamp(min=SHOWN)).clamp(0, 1)
    total = carried.sum(0)
    return torch.where(total > 0, reached.sum(0) / total, math.nan).tolist()
