"""Activation checkpointing: the backward pass recomputes a block's activations, so that only its inputs are kept.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174). The block's `forward` runs again,
inside the hooks with which FSDP2 and ZeRO-3 gather its parameters, with the random state and autocast of the first run.

"selective" keeps the results of matrix products and attention, as torchtitan does (arXiv 2410.06511), and of
convolutions, which are matrix products, too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from largebatch.errors import UserError
from largebatch.model.parts import outermost_modules

Context = AbstractContextManager[None]
_aten = torch.ops.aten
KEPT_RESULTS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
]
"""Operations whose results "selective" keeps."""


def checkpoint_activations(model: nn.Module, what: str) -> None:
    """Make each block of a model keep only its inputs and, if `what` is "selective", the results of `KEPT_RESULTS`.

    Classes, names and parameters remain the same.

    Raises:
        UserError: The model has no blocks that are known to recompute the same values.
    """
    blocks = blocks_to_recompute(model)
    if not blocks:
        raise UserError(
            f"compute.activation_checkpointing: {type(model).__name__} has no blocks that can be recomputed, "
            "neither layers that `transformers` marks as such (GradientCheckpointingLayer) nor blocks of its ResNet; "
            'write "none"'
        )
    for block in blocks:
        block.forward = _recomputed(block, what)


def blocks_to_recompute(model: nn.Module) -> list[nn.Module]:
    """The outermost blocks that are known to recompute the same values."""
    # Imported here because it takes seconds.
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.models.resnet.modeling_resnet import ResNetBasicLayer, ResNetBottleNeckLayer

    # `transformers` does not mark the residual blocks of ResNet.
    kinds = (GradientCheckpointingLayer, ResNetBasicLayer, ResNetBottleNeckLayer)
    return list(outermost_modules(model, lambda module: isinstance(module, kinds)))


def _recomputed(block: nn.Module, what: str) -> Callable[..., Any]:
    forward = block.forward
    layers = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    recompute = partial(checkpoint, forward, use_reentrant=False)
    if what == "selective" or layers:
        recompute = partial(recompute, context_fn=partial(_contexts, layers, what))

    @wraps(forward)
    def forward_or_recompute(*arguments: Any, **options: Any) -> Any:
        return (recompute if torch.is_grad_enabled() else forward)(*arguments, **options)

    return forward_or_recompute


def _contexts(layers: Sequence[_BatchNorm], what: str) -> tuple[Context, Context]:
    """Contexts of a block's first and second run."""
    first: Context = nullcontext()
    second: Context = nullcontext()
    if what == "selective":
        first, second = create_selective_checkpoint_contexts(KEPT_RESULTS)  # type: ignore[no-untyped-call]
    if layers:
        # Not without need: torch.compile supports only the contexts of "selective".
        second = statistics_kept(layers, second)
    return first, second


@contextmanager
def statistics_kept(layers: Sequence[_BatchNorm], inside: Context | None = None) -> Iterator[None]:
    """In the block, BatchNorm layers normalize as in training but update throwaway statistics instead of their own.

    Without any, they would save fewer tensors for the backward pass, and torch's `SyncBatchNorm` would refuse bfloat16.
    A momentum of zero would change their own: zero times a value that is not finite is not zero.
    """
    kept = [dict(layer._buffers) for layer in layers]
    for layer, buffers in zip(layers, kept, strict=True):
        layer._buffers.update(
            {name: None if buffer is None else torch.zeros_like(buffer) for name, buffer in buffers.items()}
        )
    try:
        with inside or nullcontext():
            yield
    finally:
        for layer, buffers in zip(layers, kept, strict=True):
            layer._buffers.update(buffers)
