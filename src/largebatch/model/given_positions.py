"""Decoders of `transformers` that look at the tokens' positions only if these are given.

Positions that start over inside a sample keep the documents of a packed sample apart. To find out whether they do,
`transformers` reads the positions on the host in each forward pass, even those that the model itself has just counted,
so the host waits for the device. Here documents are kept apart exactly if positions are given.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from largebatch.model.parts import outermost_modules

_given: bool | None = None  # whether the forward pass that runs was given positions; None outside of the models here


def keep_apart_by_given_positions(model: nn.Module) -> None:
    """Make models of `transformers` keep documents apart if they are called with `position_ids`, and only then.

    Those are the model itself, or its outermost parts that are models of `transformers`.
    """
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel, masking_utils

    if not hasattr(masking_utils.find_packed_sequence_indices, "by_given_positions"):
        masking_utils.find_packed_sequence_indices = _by_given_positions(masking_utils.find_packed_sequence_indices)
    # In a list, because the model may itself be one of them.
    for part in outermost_modules(nn.ModuleList([model]), lambda module: isinstance(module, PreTrainedModel)):
        part.forward = _noting_positions(part.forward)


def _noting_positions(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def forward_with_given(*arguments: Any, **options: Any) -> Any:
        global _given
        # The first argument is the tokens.
        before, _given = _given, None if len(arguments) > 1 else options.get("position_ids") is not None
        try:
            return forward(*arguments, **options)
        finally:
            _given = before

    return forward_with_given


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
