"""The optimizer that a plan describes."""

from collections.abc import Callable, Iterable
from pkgutil import resolve_name

import torch
from torch import nn
from torch.optim import Optimizer

from largebatch.config.optimizers import EMA
from largebatch.errors import ConfigError, reason_of
from largebatch.optim.groups import planned_groups
from largebatch.optim.layerwise import Group, local_part
from largebatch.plan import RunPlan


def build_optimizer(model: nn.Module, plan: RunPlan) -> Optimizer:
    """The plan's optimizer over the model's trainable parameters, before `prepare`.

    Its learning rate is 0 until a step sets its own: the plan's schedule is the only source of learning rates.
    """
    return optimizer_over(planned_groups(model, plan), plan)


def optimizer_over(groups: Iterable[Group], plan: RunPlan) -> Optimizer:
    """The plan's optimizer over any parameter groups, at a learning rate of 0.

    Raises:
        ConfigError: The constructor that the optimizer's entry names cannot be imported, or refuses its arguments.
    """
    entry = plan.optimizer_entry
    assert entry is not None
    options = {**plan.optimizer_options, **entry.constants}
    try:
        constructor: Callable[..., Optimizer] = resolve_name(entry.constructor)
        optimizer = constructor(groups, lr=0.0, **options)
    # A task's author may have written it, so it may raise anything.
    except Exception as error:
        given = ", ".join(["groups", "lr=0.0", *(f"{name}={value!r}" for name, value in options.items())])
        raise ConfigError(
            f'optimizer: "{entry.name}" cannot be built by {entry.constructor}({given}): {reason_of(error)}; correct '
            'its OptimizerEntry: `constructor` is "module:class", and is called with the fields of its section'
        ) from error
    if plan.optimizer.ema_half_life is not None:
        optimizer.register_step_post_hook(_move_averages)
    return optimizer


@torch.no_grad()
def _move_averages(optimizer: Optimizer, *_: object) -> None:
    """After a step, move the averages of the tensors that it stepped by the `ema_weight` of their parameter group.

    They are states of the optimizer, so strategies shard them, and checkpoints have them, as they do momentum.
    """
    for group in optimizer.param_groups:
        stepped = [tensor for tensor in group["params"] if tensor.grad is not None]
        for tensor in stepped:
            if EMA not in optimizer.state[tensor]:
                optimizer.state[tensor][EMA] = tensor.detach().clone()
        if stepped:
            averages = [local_part(optimizer.state[tensor][EMA]) for tensor in stepped]
            torch._foreach_lerp_(averages, [local_part(tensor) for tensor in stepped], group.get("ema_weight", 1.0))
