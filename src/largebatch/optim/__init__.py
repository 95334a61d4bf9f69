"""Optimizers and their parameter groups."""

from largebatch.optim.build import build_optimizer, parameter_groups, planned_groups

__all__ = ["build_optimizer", "parameter_groups", "planned_groups"]
