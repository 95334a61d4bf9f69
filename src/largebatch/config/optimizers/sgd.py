"""Stochastic gradient descent."""

from typing import Literal

from largebatch.config.optimizers.registry import ROUNDING, OptimizerEntry, momentum_buffer, register_optimizer
from largebatch.config.optimizers.sections import WithMomentum


class Sgd(WithMomentum):
    """Stochastic gradient descent with momentum. Weight decay is an L2 penalty added to the gradient."""

    name: Literal["sgd"]


register_optimizer(OptimizerEntry(Sgd, "torch.optim:SGD", momentum_buffer, tolerance=ROUNDING))
