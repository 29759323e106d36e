"""What is kept of the frozen initial model: its log-probabilities on the forget set, its parameters for transport."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lm_eval_elude.core.chat import Encoded
from lm_eval_elude.core.logprobs import AnswerLogProbs, answer_log_probs
from optout_train.data import collate, share


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

    def forward(self, ids: Tensor, labels: Tensor) -> AnswerLogProbs:
        """Sums and counts of the labelled tokens' log-probabilities, each (batch,).

        Padding is on the right, where a causal model does not look, so no attention mask is needed.
        """
        inner = self._inner[0]  # in a list, so that it is not registered a second time
        if self.all_logits:
            return answer_log_probs(inner(input_ids=ids, use_cache=False).logits, nn.Identity(), labels)
        hidden = inner.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        return answer_log_probs(hidden, inner.get_output_embeddings(), labels)

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
    scorer: nn.Module, samples: Sequence[Encoded], batch_size: int, device: torch.device, autocast: bool = False
) -> AnswerLogProbs:
    """Log-probabilities of many samples, computed once and shared over the processes.

    Args:
        scorer: :class:`AnswerScorer`, possibly wrapped.
        samples: prompts with answers; the result has their order.
        batch_size: samples of one forward pass of a process.
        device: where the model is.
        autocast: compute in bfloat16, as the passes do that are compared with the result.

    Returns:
        Sums (float64) and counts of shape (samples,) on ``device``, the same in every process.
    """
    sharing = dist.is_available() and dist.is_initialized()
    rank, processes = (dist.get_rank(), dist.get_world_size()) if sharing else (0, 1)
    result = torch.zeros(2, len(samples), dtype=torch.float64, device=device)
    training = scorer.training
    scorer.eval()
    for part in share([len(sample.ids) for sample in samples], rank, processes, batch_size) if samples else []:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            answers = scorer(*collate([samples[i] for i in part.positions], device))
        real = torch.tensor(part.weights, device=device) > 0
        positions = torch.tensor(part.positions, device=device)[real]
        result[0, positions] = answers.sums[real].double()
        result[1, positions] = answers.counts[real].double()
    if isinstance(scorer, FSDPModule):  # it leaves the root whole after a forward pass without a backward pass
        scorer.reshard()
    if sharing:
        dist.all_reduce(result)
    scorer.train(training)
    return AnswerLogProbs(result[0], result[1].long())


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
