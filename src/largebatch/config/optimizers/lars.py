"""LARS; `optim/lars.py` computes it."""

from typing import Literal

from largebatch.config.optimizers import ROUNDING, OptimizerEntry, adapt_if_decayed, momentum_buffer
from largebatch.config.optimizers.sections import WithMomentum
from largebatch.config.sections import PositiveFloat


class Lars(WithMomentum):
    """LARS (You et al. 2017, arXiv 1708.03888): SGD with momentum, with the step of each layer multiplied by
    trust_coefficient |w| / (|g| + weight_decay |w|). Weight decay is an L2 penalty added to the gradient."""

    name: Literal["lars"]
    trust_coefficient: PositiveFloat = 0.001
    """The trust coefficient, eta in the paper."""


LARS = OptimizerEntry(
    Lars,
    "largebatch.optim.lars:Lars",
    momentum_buffer,
    tolerance=ROUNDING,
    needs="norms of layers",
    group_of=adapt_if_decayed,
)
