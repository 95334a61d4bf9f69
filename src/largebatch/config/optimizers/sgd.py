"""Stochastic gradient descent."""

from typing import Literal

from largebatch.config.optimizers import ROUNDING, OptimizerEntry, momentum_buffer
from largebatch.config.optimizers.sections import WithMomentum


class Sgd(WithMomentum):
    """Stochastic gradient descent with momentum. Weight decay is an L2 penalty added to the gradient."""

    name: Literal["sgd"]


SGD = OptimizerEntry(
    Sgd,
    "torch.optim:SGD",
    momentum_buffer,
    tolerance=ROUNDING,
    # All tensors in a few kernels. It is torch's default on GPUs, so this makes CPUs take, and test, the same path.
    constants={"foreach": True},
)
