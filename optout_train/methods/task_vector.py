"""Task vector (Ilharco et al. 2023): the model learns the facts, and ends as far (times eta) on the other side."""

from typing import Any

import torch

from optout_train.trainer import UnlearnTrainer
from optout_train.transport import Original


class Method(UnlearnTrainer):
    def __init__(self, model: Any, *arguments: Any, base: Any = None, **others: Any) -> None:
        super().__init__(model, *arguments, base=base, **others)
        self.original = None if hasattr(model, "peft_config") else Original(model, base)

    @torch.no_grad()
    def train(self, *arguments: Any, **named: Any) -> Any:
        with torch.enable_grad():
            output = super().train(*arguments, **named)
        for name, weight in self.model.named_parameters():
            if weight.requires_grad and self.original:
                before = self.original(name, weight)
                weight.copy_(before + self.args.eta * (before - weight))  # what did not move stays to the bit
            elif weight.requires_grad and "lora_B" in name:  # the change is the product of the factors
                weight.mul_(-self.args.eta)
        return output
