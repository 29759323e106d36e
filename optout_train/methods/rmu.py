"""RMU (Li et al. 2024): draw a layer's states of the forget answers to a random direction, and hold those of the rest.

Of sixteen layers it is the eighth, its authors' number 7 from 0. Only what is below is trained.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from optout_train.data import part_of
from optout_train.losses import nll
from optout_train.trainer import UnlearnTrainer, answer_logits


class Method(UnlearnTrainer):
    def __init__(self, model: Any, args: Any, sets: Any, **others: Any) -> None:
        layers = model.get_decoder().layers
        below = layers[: max(1, len(layers) // 2)]
        self.layer = below[-1]
        model.requires_grad_(False)
        for module in (model.get_input_embeddings(), *below):
            module.requires_grad_(True)
        generator = torch.Generator().manual_seed(args.seed)
        drawn = torch.rand(1, model.config.get_text_config().hidden_size, generator=generator)
        self.wanted = args.eta * drawn / drawn.norm()  # one random positive direction, eta long
        super().__init__(model, args, sets, **others)

    def make_lessons(self) -> None:
        """The states of kept answers under the original weights stand in the samples' column ``shares``."""
        super().make_lessons()
        for name in self.examples.kept:
            made = self.examples.read(name, self.args.num_train_epochs)
            for number, sample in made.items():
                with torch.no_grad():
                    states = self.states(self.model, self._prepare_inputs(part_of([sample], [0])))
                made[number] = sample._replace(shares=states.cpu())

    def states(self, model: Any, part: Mapping[str, Tensor]) -> Tensor:
        """The layer's states where answer tokens are predicted, (n, width)."""
        found: list[Any] = []
        handle = self.layer.register_forward_hook(lambda _, __, output: found.append(output))
        answer_logits(model, self.accelerator.unwrap_model(model), part)
        handle.remove()
        states = found[0][0] if isinstance(found[0], tuple) else found[0]
        return states.flatten(0, 1)[part["positions"]].float()

    def values(self, model: Any, part: Mapping[str, Tensor], token: Any) -> Tensor:
        """Minus the mean squared distance of each answer token's state from where it is to be."""
        wanted = part.get("shares", self.wanted.to(part["targets"].device))
        return -(self.states(model, part) - wanted).square().mean(1)

    def forget_values(self, model: Any, batch: Mapping[str, Any]) -> Tensor:
        return nll(self.answers(model, batch["forget"]))
