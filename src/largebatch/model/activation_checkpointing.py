"""Activation checkpointing: the backward pass recomputes a block's activations, so that only its inputs are kept.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174). The block's `forward` runs again,
inside the hooks with which FSDP2 and ZeRO-3 gather its parameters, with the random state and autocast of the first run.

"selective" keeps the results of matrix products and attention, as torchtitan does (arXiv 2410.06511), and of
convolutions, which are matrix products, too.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from largebatch.errors import UserError
from largebatch.model.parts import outermost_modules

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
    recompute = partial(checkpoint, forward, use_reentrant=False)
    if what == "selective":
        recompute = partial(recompute, context_fn=partial(create_selective_checkpoint_contexts, KEPT_RESULTS))

    @wraps(forward)
    def forward_or_recompute(*arguments: Any, **options: Any) -> Any:
        return (recompute if torch.is_grad_enabled() else forward)(*arguments, **options)

    return forward_or_recompute
