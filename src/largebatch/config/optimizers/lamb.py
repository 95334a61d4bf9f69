"""LAMB; `optim/lamb.py` computes it."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from largebatch.config.optimizers import ENLARGED_ROUNDING, OptimizerEntry, adam_moments, adapt_if_decayed
from largebatch.config.optimizers.sections import WithBetas
from largebatch.config.sections import PositiveFloat


class Lamb(WithBetas):
    """LAMB (You et al. 2019, arXiv 1904.00962): AdamW with the step u of each layer multiplied by |w| / |u|.
    Weight decay is decoupled from the gradient."""

    name: Literal["lamb"]
    eps: PositiveFloat = 1e-6
    """Added to the denominator."""
    weight_decay_scaling: Literal["fixed", "timescale"] = "fixed"
    """How weight decay follows the run. "timescale": as for AdamW. It is an approximation: a step shrinks a layer by
    rate x weight_decay x trust ratio, so LAMB averages over 1 / (trust ratio) times as many steps as AdamW, and their
    share of the run stays as far as that ratio does. The norms of layers grow with rate^2 x steps, which only
    `learning_rate.scaling` "sqrt" keeps when the batch changes; other scalings are refused. "fixed": it does not."""

    square_root_rules: ClassVar[Mapping[str, str]] = {"weight_decay_scaling": "timescale"}


LAMB = OptimizerEntry(
    Lamb,
    "largebatch.optim.lamb:Lamb",
    adam_moments,
    tolerance=ENLARGED_ROUNDING,
    needs="norms of layers",
    group_of=adapt_if_decayed,
)
