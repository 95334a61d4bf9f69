"""CPU versions of the operations that synchronized BatchNorm is made of on GPUs, and that torch has for CUDA only.

Their arithmetic follows the documented formulas in fp64. What CUDA's kernels demand of types and layouts
(aten/src/ATen/native/cuda/Normalization.cuh) is asserted, and that inputs and gradients have one layout: if gradients
are channels-last, kernels read inputs like that, too, without asking.
"""

from functools import cache
from unittest.mock import patch

import torch
from torch import nn

# Registrations end with this object.
_library = torch.library.Library("aten", "IMPL")


@cache
def register() -> None:
    """Give them to torch's dispatcher, for the rest of the process, and let `nn.SyncBatchNorm` take CPU tensors."""
    forward = nn.SyncBatchNorm.forward

    def forward_on_cpu(layer, inputs):
        # One of the devices that it takes.
        with patch.object(torch._C, "_get_privateuse1_backend_name", return_value="cpu"):
            return forward(layer, inputs)

    nn.SyncBatchNorm.forward = forward_on_cpu
    for function in (
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    ):
        _library.impl(function.__name__, function, "CPU")


def batch_norm_stats(inputs, eps):
    values = _rows(inputs)
    kind = _accumulated(inputs.dtype)
    return values.mean(0).to(kind), (values.var(0, correction=0) + eps).rsqrt().to(kind)


def batch_norm_gather_stats_with_counts(inputs, means, inverse_stds, running_mean, running_var, momentum, eps, counts):
    kind = inputs.dtype if running_mean is None else running_mean.dtype
    assert counts.dtype == kind
    assert means.dtype == inverse_stds.dtype == _accumulated(kind)
    assert counts.min() > 0
    n = counts.double().unsqueeze(1)
    mean = (means.double() * n).sum(0) / n.sum()
    squares = (inverse_stds.double() ** -2 - eps) * n + (means.double() - mean).square() * n
    if running_mean is not None:
        running_mean.lerp_(mean.to(kind), momentum)
        running_var.lerp_((squares.sum(0) / (n.sum() - 1)).to(kind), momentum)
    return mean.to(means.dtype), (squares.sum(0) / n.sum() + eps).rsqrt().to(means.dtype)


def batch_norm_elemt(inputs, weight, bias, mean, inverse_std, _eps):
    outputs = (_rows(inputs) - mean) * inverse_std
    if weight is not None:
        outputs = outputs * weight + bias
    return _of_shape(outputs, inputs)


def batch_norm_backward_reduce(gradients, inputs, mean, inverse_std, weight, of_inputs, of_weight, of_bias):
    assert gradients.stride() == inputs.stride()
    rows = _rows(gradients)
    sums, products = rows.sum(0), (rows * (_rows(inputs) - mean)).sum(0)
    nothing = mean.new_empty(0)
    return (
        sums.to(mean.dtype) if of_inputs else nothing,
        products.to(mean.dtype) if of_inputs else nothing,
        (products * inverse_std).to(weight.dtype) if of_weight else nothing,
        sums.to(weight.dtype) if of_bias else nothing,
    )


def batch_norm_backward_elemt(gradients, inputs, mean, inverse_std, weight, sums, products, counts):
    assert gradients.stride() == inputs.stride()
    assert counts.dtype == torch.int32
    assert counts.is_contiguous()
    total = counts.sum()
    centered = _rows(gradients) - sums / total - (_rows(inputs) - mean) * inverse_std**2 * products / total
    return _of_shape(centered * inverse_std * (1 if weight is None else weight), inputs)


def _accumulated(kind: torch.dtype) -> torch.dtype:
    return torch.promote_types(kind, torch.float32)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """All values of each channel, in fp64: (values, channels)."""
    return tensor.double().transpose(0, 1).flatten(1).T


def _of_shape(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    by_channel = rows.T.reshape(like.size(1), like.size(0), *like.shape[2:])
    return torch.empty_like(like).copy_(by_channel.transpose(0, 1))
