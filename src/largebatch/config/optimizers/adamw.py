"""AdamW."""

from typing import Literal

from largebatch.config.optimizers import ENLARGED_ROUNDING, OptimizerEntry, adam_moments
from largebatch.config.optimizers.sections import WithScaledMoments


class AdamW(WithScaledMoments):
    """AdamW: Adam with decoupled weight decay (arXiv 1711.05101)."""

    name: Literal["adamw"]


ADAMW = OptimizerEntry(
    AdamW,
    "torch.optim:AdamW",
    adam_moments,
    tolerance=ENLARGED_ROUNDING,
    # One kernel for all of a tensor; torch has no fused SGD for sharded tensors.
    constants={"fused": True},
)
