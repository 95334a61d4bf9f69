"""The optimizer that a plan describes."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from largebatch.config.optimizers import find_optimizer
from largebatch.named import load_named
from largebatch.optim.groups import parameter_groups
from largebatch.plan import RunPlan


def build_optimizer(model: nn.Module, plan: RunPlan) -> torch.optim.Optimizer:
    """The plan's optimizer over the model's trainable parameters, before `prepare`.

    Its learning rate is 0 until a step's own is set: the plan's schedule is the only source of learning rates.
    """
    return optimizer_over(planned_groups(model, plan), plan)


def optimizer_over(groups: Iterable[dict[str, Any]], plan: RunPlan) -> torch.optim.Optimizer:
    """The plan's optimizer over any parameter groups, at a learning rate of 0."""
    entry = find_optimizer(plan.optimizer, plan.optimizer_owner)
    construct = load_named(entry.constructor)
    optimizer: torch.optim.Optimizer = construct(groups, lr=0.0, **plan.optimizer_options, **entry.constants)
    return optimizer


def planned_groups(model: nn.Module, plan: RunPlan) -> list[dict[str, Any]]:
    """The parameter groups that the plan's optimizer must have."""
    return parameter_groups(model, plan.weight_decay, plan.no_decay, plan.layerwise)
