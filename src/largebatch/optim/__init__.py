"""Optimizers and their parameter groups."""

from largebatch.optim.build import build_optimizer
from largebatch.optim.groups import planned_groups

__all__ = ["build_optimizer", "planned_groups"]
