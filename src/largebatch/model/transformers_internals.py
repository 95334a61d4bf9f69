"""Replaces a function of `transformers`, as read in 5.23.0: the one by which its decoders find packed samples.

Positions that start over inside a sample keep the documents of a packed sample apart. To find out whether they do,
`masking_utils.find_packed_sequence_indices` reads the positions on the host in each forward pass, even those that the
model itself has just counted, so the host waits for the device. Here documents are kept apart exactly if positions are
given.
"""

from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import masking_utils

_given: bool | None = None  # whether the forward pass that runs was given positions; None if it is not known


def mask_by_given_positions(model: nn.Module) -> None:
    """Make a model of `transformers` keep documents apart if it is called with `position_ids`, and only then."""
    if not hasattr(masking_utils.find_packed_sequence_indices, "by_given_positions"):
        masking_utils.find_packed_sequence_indices = _by_given_positions(masking_utils.find_packed_sequence_indices)
    forward = model.forward

    @wraps(forward)
    def forward_with_given(*arguments: Any, **options: Any) -> Any:
        global _given
        before, _given = _given, are_positions_given(arguments, options)
        try:
            return forward(*arguments, **options)
        finally:
            _given = before

    model.forward = forward_with_given


def are_positions_given(arguments: tuple[Any, ...], options: dict[str, Any]) -> bool | None:
    """Whether a model of `transformers` that is called like this is given positions; None if it is not known."""
    # The first argument is the tokens.
    return None if len(arguments) > 1 else options.get("position_ids") is not None


def _by_given_positions(look: Any) -> Any:
    """The function of `transformers` that looks at positions, replaced where it is known whether they were given."""

    @wraps(look)
    def find(position_ids: torch.Tensor) -> torch.Tensor | None:
        """The number of each token's document in its sample, (batch, tokens); None if all are in one."""
        if _given is None:
            found: torch.Tensor | None = look(position_ids)
            return found
        if not _given:
            return None
        steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        return (steps != 1).cumsum(-1)

    vars(find)["by_given_positions"] = True
    return find
