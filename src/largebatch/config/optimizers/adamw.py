"""AdamW."""

from typing import Literal

from largebatch.config.optimizers.registry import (
    ENLARGED_ROUNDING,
    OptimizerEntry,
    adam_moments,
    register_optimizer,
)
from largebatch.config.optimizers.sections import WithScaledBetas


class AdamW(WithScaledBetas):
    """AdamW: Adam with decoupled weight decay (arXiv 1711.05101)."""

    name: Literal["adamw"]


register_optimizer(
    OptimizerEntry(
        AdamW,
        "torch.optim:AdamW",
        adam_moments,
        tolerance=ENLARGED_ROUNDING,
        # One kernel for all of a tensor; torch has none of SGD for sharded ones.
        constants={"fused": True},
    )
)
