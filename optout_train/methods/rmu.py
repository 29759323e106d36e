"""RMU (Li et al. 2024): draw a layer's states of the forget answers to a random direction, and hold those of the rest.

Of sixteen layers it is the eighth, its authors' number 7 from 0. Only what is below is trained.
"""

import torch
from torch import Tensor

from optout_train.data import part_of
from optout_train.losses import nll
from optout_train.trainer import UnlearnTrainer, answer_logits


class Method(UnlearnTrainer):
    def __init__(self, model, args, sets, **others) -> None:
        layers = model.get_decoder().layers
        below = layers[: max(1, len(layers) // 2)]
        model.requires_grad_(False)
        for module in (model.get_input_embeddings(), *below):
            module.requires_grad_(True)
        super().__init__(model, args, sets, **others)
        self.layer, generator = below[-1], torch.Generator().manual_seed(args.seed)
        drawn = torch.rand(1, model.config.get_text_config().hidden_size, generator=generator)
        self.wanted = (args.eta * drawn / drawn.norm()).to(args.device)  # one random positive direction, eta long

    def make_lessons(self) -> None:
        """The states of kept answers under the original weights stand in the samples' column ``shares``."""
        super().make_lessons()
        for name in self.examples.kept:
            made = self.examples.read(name, self.args.num_train_epochs)
            for number, sample in made.items():
                with torch.no_grad():
                    states = self.states(self.model, self._prepare_inputs(part_of([sample], [0])))
                made[number] = sample._replace(shares=states.cpu())

    def states(self, model, part: dict[str, Tensor]) -> Tensor:
        """The layer's states where answer tokens are predicted, (n, width)."""
        found: list[Tensor] = []
        handle = self.layer.register_forward_hook(lambda _, __, output: found.append(output))
        answer_logits(model, self.accelerator.unwrap_model(model), part)
        handle.remove()
        return found[0].flatten(0, 1)[part["positions"]].float()

    def values(self, model, part: dict[str, Tensor], token) -> Tensor:
        """Minus the mean squared distance of each answer token's state from where it is to be."""
        return -(self.states(model, part) - part.get("shares", self.wanted)).square().mean(1)

    def forget_values(self, model, batch) -> Tensor:
        return nll(self.answers(model, batch["forget"]))
