"""What is kept of the frozen initial model: its log-probabilities on the forget set, its parameters for transport."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lm_eval_elude.core.chat import Encoded
from lm_eval_elude.core.logprobs import AnswerLogProbs, answer_log_probs, token_log_probs
from optout_train.data import Lesson, collate, collate_forked, share
from optout_train.losses import lesson


class AnswerScorer(nn.Module):
    """A causal language model that returns log-probabilities of answers: one forward, so that DDP and FSDP see it.

    The vocabulary is computed at answer positions only, where the model's logits are its output embedding of its last
    hidden states; that is checked once, and a model which scales or caps its logits is asked for all of them.

    Args:
        model: a transformers causal language model, or a peft model over one.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._inner: Any = [getattr(model, "get_base_model", lambda: model)()]
        self.all_logits = False
        self.all_logits = not self._head_is_last()
        # Most tokens of a sample that may share its opening: none where the model does not obey mask and positions.
        window = getattr(self._inner[0].config, "sliding_window", None)
        self.forks = (window or sys.maxsize) if self._forks_are_alone() else 0

    def forward(self, ids: Tensor, labels: Tensor, *more: Tensor) -> AnswerLogProbs:
        """Sums and counts of the labelled tokens' log-probabilities, each (batch,), or (samples,) of a fork.

        Of lessons the sums are of what :func:`optout_train.losses.lesson` gives.

        Padding is on the right, where a causal model does not look, so no attention mask is needed.

        Args:
            ids, labels: of :class:`optout_train.data.Batch`, ``Lessons`` or ``Forked``.
            more: the other fields, three of lessons and four of a fork.
        """
        if len(more) == 4:
            return self._forked(ids, labels, *more)
        inner = self._inner[0]  # in a list, so that it is not registered a second time
        measure = (lambda logits, tokens: lesson(logits, tokens, *more)) if more else token_log_probs
        if self.all_logits:
            return answer_log_probs(inner(input_ids=ids, use_cache=False).logits, nn.Identity(), labels, measure)
        hidden = inner.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        return answer_log_probs(hidden, inner.get_output_embeddings(), labels, measure)

    def _forked(
        self, ids: Tensor, targets: Tensor, positions: Tensor, sees: Tensor, sources: Tensor, owners: Tensor
    ) -> AnswerLogProbs:
        inner = self._inner[0]
        kind = next(inner.parameters()).dtype
        mask = torch.zeros(sees.shape, dtype=kind, device=sees.device).masked_fill(~sees, torch.finfo(kind).min)[
            :, None
        ]
        given = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "use_cache": False}
        nodes, which = sources.unique(return_inverse=True)  # one that predicts several answers' tokens is read once
        if self.all_logits:
            logits = inner(**given).logits.flatten(0, 1)[nodes]
        else:
            logits = inner.get_output_embeddings()(inner.get_decoder()(**given).last_hidden_state.flatten(0, 1)[nodes])
        logits = logits if logits.dtype == torch.float64 else logits.float()
        log_probs = logits[which, targets] - logits.logsumexp(-1)[which]
        counts = owners.bincount()
        return AnswerLogProbs(log_probs.new_zeros(len(counts)).index_add(0, owners, log_probs), counts)

    @torch.no_grad()
    def _forks_are_alone(self) -> bool:
        """Whether two samples in one row have the log-probabilities that they have in rows of their own."""
        device = next(self._inner[0].parameters()).device
        pair = [Encoded([0, 1, 2, 3, 4], 3), Encoded([0, 1, 2, 5, 6, 7], 3)]
        training = self.training
        self.eval()
        try:
            apart, forked = self(*collate(pair, device)).sums, self(*collate_forked([pair], device)).sums
            return torch.allclose(apart, forked, rtol=1e-3, atol=1e-3)
        except (TypeError, ValueError, RuntimeError, NotImplementedError):  # of attention that takes no such mask
            return False
        finally:
            self.train(training)

    @torch.no_grad()
    def _head_is_last(self) -> bool:
        inner = self._inner[0]
        ids = torch.arange(4, device=next(inner.parameters()).device)[None]
        hidden = inner.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        return torch.allclose(
            inner.get_output_embeddings()(hidden), inner(input_ids=ids, use_cache=False).logits, rtol=1e-3, atol=1e-3
        )


@torch.no_grad()
def score_all(
    scorer: nn.Module,
    groups: Sequence[Sequence[Encoded | Lesson]],
    batch_size: int,
    device: torch.device,
    autocast: bool = False,
) -> AnswerLogProbs:
    """Log-probabilities of many samples, computed once and shared over the processes.

    Args:
        scorer: :class:`AnswerScorer`, possibly wrapped.
        groups: prompts with answers, those of one group with a common opening, all groups of one size; the result has
            their order.
        batch_size: groups of one forward pass of a process.
        device: where the model is.
        autocast: compute in bfloat16, as the passes do that are compared with the result.

    Returns:
        Sums (float64) and counts of shape (groups x samples of each,) on ``device``, the same in every process.
    """
    sharing = dist.is_available() and dist.is_initialized()
    rank, processes = (dist.get_rank(), dist.get_world_size()) if sharing else (0, 1)
    each = len(groups[0]) if groups else 0
    result = torch.zeros(2, len(groups), each, dtype=torch.float64, device=device)
    training = scorer.training
    scorer.eval()
    lengths = [sum(len(sample.ids) for sample in group) for group in groups]
    for part in share(lengths, rank, processes, batch_size) if groups else []:
        chosen = [groups[i] for i in part.positions]
        batch = collate_forked(chosen, device) if each > 1 else collate([group[0] for group in chosen], device)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            answers = scorer(*batch)
        real = torch.tensor(part.weights, device=device) > 0
        positions = torch.tensor(part.positions, device=device)[real]
        for row, values in zip(result, answers, strict=True):
            row[positions] = values.view(-1, each)[real].double()
    if isinstance(scorer, FSDPModule):  # it leaves the root whole after a forward pass without a backward pass
        scorer.reshard()
    if sharing:
        dist.all_reduce(result)
    scorer.train(training)
    return AnswerLogProbs(result[0].flatten(), result[1].flatten().long())


class InitialParameters:
    """The initial parameters by name, read from the base checkpoint's memory-mapped safetensors where they are there.

    A parameter that the files do not hold under its own name and value (fused, tied or newly made by the loader) is
    kept as a copy in main memory; ``kept`` counts those.

    Args:
        model: the model as loaded, before training and before sharding.
        folder: of the base checkpoint.
    """

    def __init__(self, model: nn.Module, folder: Path) -> None:
        from safetensors import safe_open

        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = safe_open(path, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)
        self._copies: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            value = parameter.detach().cpu()
            if name in self._files:
                stored = self._files[name].get_tensor(name)
                if stored.shape == value.shape and torch.equal(stored.to(value.dtype), value):
                    continue
            self._copies[name] = value.clone()

    @property
    def kept(self) -> int:
        """How many parameters are copies in memory."""
        return len(self._copies)

    def __call__(self, name: str) -> Tensor:
        """The initial value of a parameter, on the CPU (a view of the file where it can be)."""
        return self._copies[name] if name in self._copies else self._files[name].get_tensor(name)
