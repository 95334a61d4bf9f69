"""The states that an optimizer keeps for a tensor, compared with those that its entry declares."""

from collections.abc import Mapping
from typing import Any

import torch

from largebatch.config.optimizers import GroupOptions, Shape
from largebatch.errors import BackendMismatch
from largebatch.plan import RunPlan


def split_state(
    state: Mapping[str, Any], like: torch.Tensor, owner: str, plan: RunPlan, group: GroupOptions
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The optimizer's states for one tensor of a parameter group: those with dimensions, and the others as numbers,
    which the host awaits.

    States that are None are omitted.

    Raises:
        BackendMismatch: A state is not what the plan's optimizer declares.
    """
    kept = {kind: _shape_of(value) for kind, value in state.items() if value is not None}
    declared = plan.states_of(tuple(like.shape), group) if state else {}
    if kept != declared:
        raise BackendMismatch(
            f"the optimizer keeps states of these shapes for {owner}: {kept}, but its entry declares {declared}; "
            f"correct `states` in the entry of {plan.optimizer.name!r}"
        )
    vectors = {kind: state[kind] for kind, shape in kept.items() if shape}
    scalars = {kind: float(state[kind]) for kind, shape in kept.items() if not shape}
    return vectors, scalars


def _shape_of(value: object) -> Shape | str:
    """A state's shape, () for a number; the name of any other type."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return () if isinstance(value, int | float) else type(value).__name__
