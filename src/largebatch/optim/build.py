"""The optimizer that a plan describes, and which parameters get weight decay, decided from the model alone."""

from collections.abc import Callable, Collection, Iterable
from pkgutil import resolve_name
from typing import Any

from torch import nn
from torch.optim import Optimizer

from largebatch.config.optimizers import ParameterKind
from largebatch.errors import ConfigError, reason_of
from largebatch.plan import RunPlan


def build_optimizer(model: nn.Module, plan: RunPlan) -> Optimizer:
    """The plan's optimizer over the model's trainable parameters, before `prepare`.

    Its learning rate is 0 until a step sets its own: the plan's schedule is the only source of learning rates.
    """
    return optimizer_over(planned_groups(model, plan), plan)


def optimizer_over(groups: Iterable[dict[str, Any]], plan: RunPlan) -> Optimizer:
    """The plan's optimizer over any parameter groups, at a learning rate of 0.

    Raises:
        ConfigError: The constructor that the optimizer's entry names cannot be imported, or refuses its arguments.
    """
    entry = plan.optimizer_entry
    assert entry is not None
    options = {**plan.optimizer_options, **entry.constants}
    try:
        constructor: Callable[..., Optimizer] = resolve_name(entry.constructor)
        return constructor(groups, lr=0.0, **options)
    # A task's author may have written it, so it may raise anything.
    except Exception as error:
        given = ", ".join(["groups", "lr=0.0", *(f"{name}={value!r}" for name, value in options.items())])
        raise ConfigError(
            f'optimizer: "{entry.name}" cannot be built by {entry.constructor}({given}): {reason_of(error)}; correct '
            'its OptimizerEntry: `constructor` is "module:class", and is called with the fields of its section'
        ) from error


def planned_groups(model: nn.Module, plan: RunPlan) -> list[dict[str, Any]]:
    """The parameter groups that the plan's optimizer must have."""
    entry, optimizer = plan.optimizer_entry, plan.optimizer
    assert entry is not None
    layerwise = entry.needs == "norms of layers"
    return parameter_groups(model, optimizer.weight_decay, optimizer.no_decay, layerwise)


def parameter_groups(
    model: nn.Module, weight_decay: float, no_decay: Collection[str] = ("norm", "bias"), layerwise: bool = False
) -> list[dict[str, Any]]:
    """The trainable parameters in at most two groups: with weight decay, and without.

    A parameter that several modules share appears once.

    Args:
        model: The model, before `prepare`.
        weight_decay: Weight decay of the first group.
        no_decay: Kinds of parameters that go into the second group. Goyal et al. 2017, section 5.1 exempt only
            BatchNorm's scale and shift: ("norm",).
        layerwise: Whether the groups are for LARS or LAMB, which adapt only the first one.
    """
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                (exempt if _kind_of(module, name) in no_decay else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": exempt, "weight_decay": 0.0}]
    if layerwise:
        groups = [group | {"layerwise": group["params"] is decayed} for group in groups]
    return [group for group in groups if group["params"]]


def _kind_of(module: nn.Module, name: str) -> ParameterKind | None:
    """The kind of the parameter `name` that `module` itself holds; None means an ordinary weight.

    A norm's own bias is of the kind "norm". Normalization layers outside torch are recognized by their class names.
    """
    if "Norm" in type(module).__name__:
        return "norm"
    if name == "bias" or name.endswith("_bias"):
        return "bias"
    # A vision transformer's class token and positions are not modules of their own.
    is_embedding = isinstance(module, nn.Embedding) or name.endswith(("_token", "_embeddings"))
    return "embedding" if is_embedding else None
