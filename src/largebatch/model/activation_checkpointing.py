"""Activation checkpointing: a block's activations are computed again in the backward pass instead of being kept.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174). A block keeps its inputs only. Its
`forward` is what is run again, inside of the hooks with which FSDP2 and ZeRO-3 gather the block's parameters. Torch
gives the second run the state of the random generators that the first had, and its autocast.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from largebatch.errors import UserError
from largebatch.model.blocks import outermost


def checkpoint_activations(model: nn.Module) -> None:
    """Have each block of a model keep its inputs only and compute the rest again in the backward pass.

    Classes, names and parameters stay what they are.

    Raises:
        UserError: The model has no blocks that are known to compute the same again.
    """
    blocks = blocks_to_recompute(model)
    if not blocks:
        raise UserError(
            f"compute.activation_checkpointing: {type(model).__name__} has no blocks that can be computed again, "
            "neither layers that `transformers` marks so (GradientCheckpointingLayer) nor those of its ResNet; "
            "write false"
        )
    for block in blocks:
        block.forward = _recomputed(block)


def blocks_to_recompute(model: nn.Module) -> list[nn.Module]:
    """The blocks that are known to compute the same again; of those within one another, the outermost."""
    # Imported only where it is used: it takes seconds.
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.models.resnet.modeling_resnet import ResNetBasicLayer, ResNetBottleNeckLayer

    # `transformers` does not count the residual blocks of ResNet among those that it marks.
    kinds = (GradientCheckpointingLayer, ResNetBasicLayer, ResNetBottleNeckLayer)
    return list(outermost(model, lambda module: isinstance(module, kinds)))


def _recomputed(block: nn.Module) -> Callable[..., Any]:
    forward = block.forward
    layers = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    recompute = partial(checkpoint, forward, use_reentrant=False)
    if layers:
        recompute = partial(recompute, context_fn=partial(_contexts, layers))

    @wraps(forward)
    def forward_or_recompute(*arguments: Any, **options: Any) -> Any:
        return (recompute if torch.is_grad_enabled() else forward)(*arguments, **options)

    return forward_or_recompute


def _contexts(layers: Sequence[_BatchNorm]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Of the first run and of the second."""
    return nullcontext(), _statistics_kept(layers)


@contextmanager
def _statistics_kept(layers: Sequence[_BatchNorm]) -> Iterator[None]:
    """In the block, BatchNorm layers move others than their running statistics, which have moved in the first run.

    Without statistics (as in `RunningStatistics.kept`), they would save fewer tensors than in the first run.
    """
    kept = [dict(layer._buffers) for layer in layers]
    for layer, buffers in zip(layers, kept, strict=True):
        layer._buffers.update(
            {name: None if buffer is None else torch.zeros_like(buffer) for name, buffer in buffers.items()}
        )
    try:
        yield
    finally:
        for layer, buffers in zip(layers, kept, strict=True):
            layer._buffers.update(buffers)
