"""The cross-entropy of a linear layer's outputs for each token, without ever holding the logits of all tokens.

For a vocabulary of 128,256 tokens, each token's logits take 0.5 MB in fp32, and their gradient as much again. Here
tokens are processed in chunks. The forward pass computes each chunk's losses and its part of the gradient of the sum of
all losses (softmax - one-hot). If the backward pass needs the gradient of anything but a multiple of that sum, the
chunks are computed again.

The arithmetic is that of `cross_entropy(linear(...).float())`: under bfloat16 autocast the matrix products are in
bfloat16, softmax and losses in fp32; the weight's gradient is summed over the chunks in the weight's own precision.
`torch.nn.functional.linear_cross_entropy` (since torch 2.13) ignores autocast, and returns the losses of bfloat16
inputs, and the gradients of their weights, in bfloat16.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import linear, nll_loss

from largebatch.data.text import IGNORE_INDEX

# Logits per chunk: 256 MiB in fp32. Smaller chunks make matrix products slower.
MOST_LOGITS = 2**26
# GPUs compute matrix products in tiles, of at most this many tokens; a part of one takes as long as all of it.
TILE = 256


def linear_token_losses(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """The cross-entropy of `linear(inputs, weight, bias)` for each target, zero where the target is `IGNORE_INDEX`.

    Shapes are (..., features), (classes, features), (classes,), and (...) for targets and losses. Losses are in fp32,
    or in fp64 for inputs in fp64.
    """
    kind = inputs.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype
    losses: torch.Tensor = _LinearTokenLosses.apply(  # type: ignore[no-untyped-call]
        inputs.flatten(0, -2), weight, bias, targets, dtype, torch.is_grad_enabled()
    )
    return losses


def precision_of_losses(dtype: torch.dtype) -> torch.dtype:
    """The precision in which the softmax of logits of this precision is computed."""
    return torch.promote_types(dtype, torch.float32)


Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class _LinearTokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        dtype: torch.dtype,
        with_gradients: bool,
    ) -> torch.Tensor:
        ctx.dtype = dtype
        ctx.needed = [with_gradients and needed for needed in ctx.needs_input_grad[:3]]
        ctx.save_for_backward(inputs, weight, bias, targets)
        losses, ctx.gradients = _through_chunks(inputs, weight, bias, targets, None, dtype, ctx.needed)
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (factors,) = upstream
        gradients: Gradients | None = ctx.gradients
        # They are changed in place, so another backward pass must compute them again.
        ctx.gradients = None
        # The gradient of a sum is one number, expanded.
        if gradients is not None and factors.numel() and not any(factors.stride()):
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factors.flatten()[0])
        else:
            inputs, weight, bias, targets = ctx.saved_tensors
            _, gradients = _through_chunks(inputs, weight, bias, targets, factors, ctx.dtype, ctx.needed)
        return *gradients, None, None, None


def _tokens_per_chunk(classes: int) -> int:
    most = max(1, MOST_LOGITS // classes)
    return most - most % TILE if most > TILE else most


def _through_chunks(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    factors: torch.Tensor | None,
    dtype: torch.dtype,
    needed: Sequence[bool],
) -> tuple[torch.Tensor, Gradients]:
    """Losses in the shape of the targets, and the gradient of their sum, weighted by `factors` of the same shape.

    Inputs are of shape (tokens, features), matrix products of `dtype`; `needed` says which of inputs, weight and bias
    need a gradient.
    """
    parameters = weight.to(dtype), None if bias is None else bias.to(dtype)
    # Not a view of another tensor, because engines register hooks on a module's outputs.
    losses = inputs.new_empty(targets.shape, dtype=precision_of_losses(dtype))
    flat_losses, targets = losses.view(-1), targets.flatten()
    factors = None if factors is None else factors.flatten()
    of_inputs = torch.empty_like(inputs) if needed[0] else None
    of_weight = torch.zeros_like(weight) if needed[1] else None
    of_bias = torch.zeros_like(bias) if bias is not None and needed[2] else None
    size = _tokens_per_chunk(len(weight))
    for start in range(0, len(inputs), size):
        chunk = slice(start, start + size)
        chunk_inputs, chunk_targets = inputs[chunk].to(dtype), targets[chunk]
        log_probabilities = linear(chunk_inputs, *parameters).log_softmax(-1, dtype=losses.dtype)
        flat_losses[chunk] = nll_loss(log_probabilities, chunk_targets, ignore_index=IGNORE_INDEX, reduction="none")
        if not any(needed):
            continue
        is_target = chunk_targets != IGNORE_INDEX
        gradient = log_probabilities.exp_()
        gradient[torch.arange(len(gradient), device=gradient.device), chunk_targets.where(is_target, 0)] -= 1
        gradient *= (is_target if factors is None else is_target * factors[chunk]).unsqueeze(1)
        if of_bias is not None:
            of_bias += gradient.sum(0)
        gradient = gradient.to(dtype)
        if of_inputs is not None:
            of_inputs[chunk] = gradient @ parameters[0]
        if of_weight is not None and of_weight.dtype == dtype:
            of_weight.addmm_(gradient.T, chunk_inputs)
        elif of_weight is not None:
            of_weight += gradient.T @ chunk_inputs
    return losses, (of_inputs, of_weight, of_bias)
