"""Operations on CPU tensors, fake ones above all, that keep for the backward pass what CUDA's would keep.

- Attention: the kernel that `scaled_dot_product_attention` takes on NVIDIA GPUs since Ampere. FlashAttention, for
  bfloat16 without a mask, and the memory-efficient kernel keep queries, keys, values, outputs and a number per row, the
  latter also the mask as numbers. What neither takes keeps the probabilities.
- Dropout keeps its mask as booleans, where the CPU keeps numbers.

Not modeled: cuDNN's scratch memory and recurrent layers, padding that kernels add to odd sizes, and operations, such as
`pow`, that autocast computes in fp32 on CUDA and in bfloat16 on the CPU: with torch's own lists for CUDA, the estimates
of the shipped bf16 recipes are equal, but for those of BERT, which are 0.5 % larger.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


@contextmanager
def cuda_kernels(in_bf16: bool) -> Iterator[None]:
    """Let operations on CPU tensors, in this thread and this block, keep what CUDA's would keep.

    Args:
        in_bf16: Whether the block is also in bfloat16 autocast, as training is: without autocast's cache.
    """
    with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16, cache_enabled=False), _CudaFunctions():
        yield


class _CudaFunctions(TorchFunctionMode):
    """Replaces the functions whose kernels on CUDA keep other tensors than those on the CPU."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if function is F.scaled_dot_product_attention:
            return _attention(*arguments, **options)
        if function is F.dropout:
            return _dropout(*arguments, **options)
        return function(*arguments, **options)


def _dropout(inputs: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or not 0 < p < 1:
        return F.dropout(inputs, p, training, inplace)
    return torch.native_dropout(inputs, p, True)[0]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`scaled_dot_product_attention` by the kernel that CUDA takes."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.bfloat16) for tensor in (query, key, value))
    is_flash = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] == value.shape[-1] <= 256
    if is_flash and attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if query.dtype != torch.float64 and query.shape[1] == key.shape[1]:
        bias = None
        if attn_mask is not None:
            numbers = torch.zeros_like(attn_mask, dtype=query.dtype) if attn_mask.dtype == torch.bool else attn_mask
            bias = numbers.expand(*query.shape[:-1], key.shape[-2])
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale
        )[0]
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
