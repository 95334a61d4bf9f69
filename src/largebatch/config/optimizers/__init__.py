"""Optimizers as configs and plans know them: what their JSON sections share, the registry, and a file for each."""

import importlib
import pkgutil

from largebatch.config.optimizers.registry import (
    ENLARGED_ROUNDING,
    ROUNDING,
    AnyOptimizer,
    OptimizerEntry,
    Tolerance,
    find_optimizer,
    register_optimizer,
    registered_optimizers,
    show_optimizers_of,
)
from largebatch.config.optimizers.sections import (
    OptimizerSection,
    ParameterKind,
    WithBetas,
    WithMomentum,
    WithScaledBetas,
)

__all__ = [
    "ENLARGED_ROUNDING",
    "ROUNDING",
    "AnyOptimizer",
    "OptimizerEntry",
    "OptimizerSection",
    "ParameterKind",
    "Tolerance",
    "WithBetas",
    "WithMomentum",
    "WithScaledBetas",
    "find_optimizer",
    "register_optimizer",
    "registered_optimizers",
    "show_optimizers_of",
]

# Each file of this folder registers its optimizer.
for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
