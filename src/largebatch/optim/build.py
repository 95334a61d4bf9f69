"""The optimizer that a plan describes."""

from typing import Any

import torch
from torch import nn

from largebatch.optim.groups import parameter_groups
from largebatch.optim.lamb import Lamb
from largebatch.optim.lars import Lars
from largebatch.optim.layerwise import LayerwiseOptimizer
from largebatch.plan import RunPlan

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "lars": Lars,
    "lamb": Lamb,
}


def build_optimizer(model: nn.Module, plan: RunPlan) -> torch.optim.Optimizer:
    """The plan's optimizer over the model's trainable parameters, before `prepare`.

    Its learning rate is 0 until a step's own is set: the plan's schedule is the only source of learning rates.
    """
    options: dict[str, Any] = dict(plan.optimizer_options)
    # One kernel for all of a tensor; torch has none of SGD for sharded ones.
    if plan.optimizer == "adamw":
        options["fused"] = True
    return OPTIMIZERS[plan.optimizer](planned_groups(model, plan), lr=0.0, **options)  # type: ignore[call-arg]


def planned_groups(model: nn.Module, plan: RunPlan) -> list[dict[str, Any]]:
    """The parameter groups that the plan's optimizer must have."""
    layerwise = issubclass(OPTIMIZERS[plan.optimizer], LayerwiseOptimizer)
    return parameter_groups(model, plan.weight_decay, plan.no_decay, layerwise)
