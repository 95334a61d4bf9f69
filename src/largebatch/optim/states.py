"""The states that an optimizer keeps for a tensor, compared with those that its entry declares."""

from collections.abc import Mapping
from typing import Any

import torch

from largebatch.errors import BackendMismatch
from largebatch.plan import RunPlan


def split_state(
    state: Mapping[str, Any], like: torch.Tensor, owner: str, plan: RunPlan
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The optimizer's states for one tensor: those with dimensions, and the others as numbers, which the host awaits.

    States that are None are omitted.

    Raises:
        BackendMismatch: A state is not what the plan's optimizer declares.
    """
    declared = plan.states_of(tuple(like.shape))
    if state and (unkept := declared.keys() - state.keys()):
        raise BackendMismatch(
            f"the optimizer keeps no state {min(unkept)!r} for {owner}, although its entry declares one; correct "
            f"`states` in the entry of {plan.optimizer.name!r}"
        )
    vectors: dict[str, torch.Tensor] = {}
    scalars: dict[str, float] = {}
    for kind, value in state.items():
        if value is None:
            continue
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        if declared.get(kind) != shape or not isinstance(value, torch.Tensor | int | float):
            given = f"of shape {shape}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise BackendMismatch(
                f"the optimizer's state {kind!r} for {owner} is {given}, but its entry declares "
                f"{declared.get(kind, 'none')}; correct `states` in the entry of {plan.optimizer.name!r}"
            )
        if isinstance(value, torch.Tensor) and shape:
            vectors[kind] = value
        else:
            scalars[kind] = float(value)
    return vectors, scalars
