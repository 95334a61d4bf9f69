"""Images with their channels last in memory (NHWC), as tensor cores need them for convolutions.

Only inputs are laid out so: a convolution of such an input has such an output, whatever its weight's layout, and
strategies that shard weights keep them in row-major order.
"""

from typing import Any

import torch
from torch import nn


def channels_last_inputs(model: nn.Module) -> None:
    """Make a model lay out its inputs of shape (batch, channels, height, width) with the channels last."""
    model.register_forward_pre_hook(_lay_out, with_kwargs=True)


def _lay_out(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(_laid_out, inputs)), {name: _laid_out(value) for name, value in options.items()}


def _laid_out(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value
