"""UNDO (Lee et al. 2025): distil a model that has forgotten into its own weights, shrunk by eta and noised."""

import torch
from torch import nn

from optout_train.methods import undial
from optout_train.teacher import Teacher

NOISE = 0.1  # in Xavier's size; its authors take .01 to .1


class Method(undial.Method):
    def make_lessons(self) -> None:
        self.teach(0.0)
        Teacher(self.model, self.encode, self.args.seed).distil(self.examples, self.args.num_train_epochs)
        noise(self.model, self.args.eta, self.args.seed)


@torch.no_grad()
def noise(model: nn.Module, share: float, seed: int) -> None:
    """Shrink each matrix (experts in one parameter are some) by a share of itself, and add as much noise."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        for weight in parameter if parameter.ndim == 3 else [parameter] if parameter.ndim == 2 else []:
            drawn = nn.init.xavier_normal_(torch.empty(weight.shape), generator=generator)
            weight.mul_(1 - share).add_(drawn.to(weight), alpha=share * NOISE)
