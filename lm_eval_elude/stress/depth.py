"""How much of a fact the layers of a model carry: the unlearning depth score's drops (arXiv 2605.24614).

Into the original model are put, one layer at a time, the states that another model has after that layer; the layers
above go on from them. D is by how many nats a token a fact becomes less likely.
:func:`lm_eval_elude.stress.table.depth_score` makes the score of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lm_eval_elude.data.records import QARecord
from lm_eval_elude.model.layers import recorded, skip_first_layers
from lm_eval_elude.model.packing import collate
from lm_eval_elude.model.scorer import Scorer, answer_sums
from lm_eval_elude.text.chat import Encoded, Renderer
from lm_eval_elude.text.words import fact_in

_BATCH = 16


def stated_facts(records: Sequence[QARecord], renderer: Renderer) -> dict[str, Encoded]:
    """By question of a record: question and paraphrased answer up to the fact, with the fact as what is scored."""
    samples = {}
    for record in records:
        before, fact, _ = fact_in(record)
        if fact:
            prompt = renderer.prompt(record.question)
            start, whole = (renderer.encode(prompt + renderer.beginning(words)) for words in (before, before + fact))
            samples[record.question] = Encoded(whole, min(len(start), len(whole) - 1))
    return samples


@torch.no_grad()
def drops(original: Any, other: Any, samples: Sequence[Encoded]) -> Tensor:
    """D of each layer and sample, (layers, samples): the original with that layer's states of the other model.

    Both have the same layers. The log-probability of a fact is the mean over its tokens.
    """
    scorer, theirs, device = Scorer(original), Scorer(other), original.get_input_embeddings().weight.device
    columns = []
    for start in range(0, len(samples), _BATCH):
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
