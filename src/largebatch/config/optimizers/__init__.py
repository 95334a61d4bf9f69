"""Optimizers: their sections of a recipe's JSON, and their entries.

Each entry of the package has a file, and `shipped` lists them. A task's `Config` may list entries of its own.
"""

from largebatch.config.optimizers.entries import (
    ENLARGED_ROUNDING,
    ROUNDING,
    OptimizerEntry,
    ParameterRole,
    Tolerance,
    adam_moments,
    adapt_if_decayed,
    momentum_buffer,
)
from largebatch.config.optimizers.sections import OptimizerSection, WithBetas, WithMomentum, WithScaledBetas

__all__ = [
    "ENLARGED_ROUNDING",
    "ROUNDING",
    "OptimizerEntry",
    "OptimizerSection",
    "ParameterRole",
    "Tolerance",
    "WithBetas",
    "WithMomentum",
    "WithScaledBetas",
    "adam_moments",
    "adapt_if_decayed",
    "momentum_buffer",
]
