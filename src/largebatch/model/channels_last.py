"""Images with their channels last in memory (NHWC), as tensor cores need them for convolutions.

Only inputs are laid out so: a convolution of such an input has such an output, whatever its weight's layout, and
strategies that shard weights keep them in row-major order.
"""

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from largebatch.errors import UserError


def channels_last_inputs(model: nn.Module) -> None:
    """Make a model lay out its inputs of shape (batch, channels, height, width) with the channels last.

    Raises:
        UserError: It has no weights of such convolutions, so that this would have no effect.
    """
    if all(each.ndim != 4 for each in model.parameters()):
        raise UserError(f"compute.channels_last: {type(model).__name__} has no convolutions of images; write false")
    model.register_forward_pre_hook(lambda _, *inputs: tree_map_only(torch.Tensor, _laid_out, inputs), with_kwargs=True)


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
