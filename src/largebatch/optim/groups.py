"""The parameter groups of a plan's optimizer, decided from the model: weight decay and learning rates."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from largebatch.errors import ConfigError
from largebatch.optim.names import names_matching
from largebatch.optim.roles import roles_of
from largebatch.plan import RunPlan


def planned_groups(model: nn.Module, plan: RunPlan) -> list[dict[str, Any]]:
    """The parameter groups that the plan's optimizer must have: the model's trainable parameters, each once.

    Those with weight decay come first. A group may have a `lr_factor`, which the learning rate is multiplied by, and
    the options that the optimizer's entry adds (`group_of`).

    Args:
        model: The model, before `prepare`.
        plan: The plan. Goyal et al. 2017, section 5.1 exempt only BatchNorm's scale and shift from weight decay: its
            `no_decay` is then ["norm"].

    Raises:
        ConfigError: A pattern of the plan matches nothing, or every parameter is frozen.
    """
    optimizer = plan.optimizer
    entry = plan.optimizer_entry
    assert entry is not None
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise ConfigError(f"{type(model).__name__} has no trainable parameter; leave requires_grad of some true")
    roles = roles_of(trainable, model, plan)
    factors = _lr_factors(trainable, plan)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in trainable.items():
        role = roles[name]
        options: dict[str, Any] = {"weight_decay": optimizer.weight_decay if role.decays else 0.0}
        lr_factor = factors.get(name, 1.0)
        if lr_factor != 1.0:
            options["lr_factor"] = lr_factor
        options |= entry.group_of(role)
        group = groups.setdefault((role.decays, *options.items()), {"params": [], **options})
        group["params"].append(parameter)
    return [groups[key] for key in sorted(groups, key=lambda key: not key[0])]


def _lr_factors(trainable: Collection[str], plan: RunPlan) -> dict[str, float]:
    """The learning rate's factor of each parameter that a group of the plan matches."""
    factors: dict[str, float] = {}
    for group in plan.optimizer.groups or ():
        matched = names_matching(group.parameters, trainable, "optimizer.groups", taken=factors)
        factors |= dict.fromkeys(matched, group.lr_factor)
    return factors


def decay_summary(groups: Sequence[Mapping[str, Any]]) -> str:
    """How many of the parameters in groups have no weight decay, in words."""
    exempt = sum(len(group["params"]) for group in groups if group["weight_decay"] == 0)
    return f"none on {exempt:,} of {sum(len(group['params']) for group in groups):,} parameters"


def group_sizes(optimizer: Optimizer) -> list[int]:
    """The number of elements in each parameter group."""
    return [sum(parameter.numel() for parameter in group["params"]) for group in optimizer.param_groups]


def group_options(optimizer: Optimizer) -> list[Mapping[str, Any]]:
    """The hyperparameters of each parameter group, or None, without learning rate and choice of implementation."""
    names = {*optimizer.defaults, "weight_decay", "lr_factor"}
    names -= {"lr", "foreach", "fused", "capturable", "differentiable"}
    return [{name: group.get(name) for name in sorted(names)} for group in optimizer.param_groups]
