"""Task vector (Ilharco et al. 2023): the model learns the facts, and ends as far (times eta) on the other side."""

import torch

from optout_train.trainer import UnlearnTrainer


class Method(UnlearnTrainer):
    def train(self, *arguments, **named):
        output, eta = super().train(*arguments, **named), self.args.eta
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if "lora_B" in name:  # the change is the product of the factors
                    weight.mul_(-eta)
                elif weight.requires_grad and "lora_A" not in name:
                    before = self.original(name).to(weight)
                    weight.copy_(before + eta * (before - weight))  # what did not move stays to the bit
        return output
