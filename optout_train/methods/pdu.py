"""PDU (Entesari et al. 2025): a Lagrangian, whose weights of the retain losses rise where these exceed a budget.

Its authors' Lagrangian has weight 100 for the retain loss; here that is 1, and all is over 100.
"""

from torch import Tensor

from optout_train.trainer import UnlearnTrainer

BUDGET, STEP = 0.3, 0.05  # nats a token; the weight rises by so much of what exceeds the budget


class Method(UnlearnTrainer):
    def training_step(self, *arguments, **named) -> Tensor:
        loss = super().training_step(*arguments, **named)
        for name in self.weights.keys() & self.noted.keys() - {"forget"} if self.begins_step else ():
            mean = float(self.accelerator.reduce(self.noted[name], "mean"))
            self.weights[name] = max(0.0, self.weights[name] + STEP * (mean - BUDGET))
        return loss

    def extra_state(self) -> dict[str, float]:
        return self.weights

    def load_extra_state(self, state: dict[str, float]) -> None:
        self.weights.update(state)
