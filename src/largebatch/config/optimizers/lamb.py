"""LAMB; `optim/lamb.py` computes it."""

from typing import Literal

from largebatch.config.optimizers import ENLARGED_ROUNDING, OptimizerEntry, adam_moments, adapt_if_decayed
from largebatch.config.optimizers.sections import WithBetas
from largebatch.config.sections import PositiveFloat


class Lamb(WithBetas):
    """LAMB (You et al. 2019, arXiv 1904.00962): AdamW with the step u of each layer multiplied by |w| / |u|.
    Weight decay is decoupled from the gradient."""

    name: Literal["lamb"]
    eps: PositiveFloat = 1e-6
    """Added to the denominator."""


LAMB = OptimizerEntry(
    Lamb,
    "largebatch.optim.lamb:Lamb",
    adam_moments,
    tolerance=ENLARGED_ROUNDING,
    needs="norms of layers",
    group_of=adapt_if_decayed,
    explanation="each layer's step is scaled by norms of the whole layer, except where no_decay exempts it",
)
