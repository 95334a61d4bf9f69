"""Operations on CPU tensors, fake ones above all, that keep for the backward pass what CUDA's would keep.

- Autocast: lists say which operations run in bfloat16 and which in fp32, and those of CUDA and of the CPU differ.
  `pow`, for example, is in fp32 on CUDA only, and so keeps its input in fp32. The tables below are CUDA's lists, as in
  torch's ATen/autocast_mode.h; bench/autocast_lists.py compares them with the installed torch's.
- Attention: the kernel that `scaled_dot_product_attention` takes on NVIDIA GPUs since Ampere. FlashAttention, for
  bfloat16 without a mask, and the memory-efficient kernel keep queries, keys, values, outputs and a number per row, the
  latter also the mask as numbers. What neither takes keeps the probabilities.
- Dropout keeps its mask as booleans, where the CPU keeps numbers.

Not modeled: cuDNN's scratch memory and recurrent layers, and padding that kernels add to odd sizes.
`binary_cross_entropy`, which raises an error under CUDA's autocast, is left as it is.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch.library import Library, fallthrough_kernel
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only


def _names(text: str) -> list[str]:
    return text.split()


BF16 = _names("""
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul
    einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
    _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention
""")
"""Operations whose inputs are cast to bfloat16."""

FP32 = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
    kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
""")
"""Operations whose inputs are cast to fp32."""

FP32_RESULT = _names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
"""Operations that compute in fp32 unless they are given another dtype."""

FP32_NORM = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""The same for those that have a variant with a dtype."""

WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
"""Operations whose inputs are cast to the widest of their dtypes, bfloat16 or fp32."""

AUTOCAST = DispatchKey.AutocastCPU


@contextmanager
def cuda_kernels(in_bf16: bool) -> Iterator[None]:
    """Let operations on CPU tensors, in this thread and this block, keep what CUDA's would keep.

    Args:
        in_bf16: Whether the block is also in bfloat16 autocast, as training is: without autocast's cache.
    """
    with ExitStack() as block:
        if in_bf16:
            block.enter_context(_cuda_lists())
            block.enter_context(torch.autocast("cpu", torch.bfloat16))
        block.enter_context(_CudaFunctions())
        yield


@contextmanager
def _cuda_lists() -> Iterator[None]:
    """Replace the operations' autocast on the CPU, which is above autograd, so that autograd sees the casts."""
    kernels: dict[str, Callable[..., Any]] = {}
    kernels |= {name: partial(_in_dtype, _operation(name), torch.bfloat16) for name in BF16}
    kernels |= {name: partial(_in_dtype, _operation(name), torch.float32) for name in FP32}
    kernels |= {name: partial(_with_fp32_result, _operation(name), _operation(name)) for name in FP32_RESULT}
    kernels |= {
        name: partial(_with_fp32_result, _operation(name), _operation(given)) for name, given in FP32_NORM.items()
    }
    kernels |= {name: partial(_in_widest, _operation(name)) for name in WIDEST}
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(AUTOCAST.name)
    of_cpu = {name.removeprefix("aten::") for name in registered if name.startswith("aten::")}
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    register: Callable[..., None] = library.impl
    with warnings.catch_warnings():
        # Replacing them is intended.
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name in of_cpu - kernels.keys() - {"binary_cross_entropy"}:
            register(name, fallthrough_kernel, AUTOCAST.name)
        for name, kernel in kernels.items():
            register(name, partial(_without_autocast, kernel), AUTOCAST.name)
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _operation(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _without_autocast(kernel: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with _ExcludeDispatchKeyGuard(DispatchKeySet(AUTOCAST)):
        return kernel(*arguments, **options)


def _is_cast(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if _is_cast(tensor) else tensor


def _in_dtype(operation: Any, dtype: torch.dtype, *arguments: Any, **options: Any) -> Any:
    arguments, options = tree_map_only(torch.Tensor, partial(_cast, dtype), (arguments, options))
    return operation(*arguments, **options)


def _in_widest(operation: Any, *arguments: Any, **options: Any) -> Any:
    tensors = [each for each in tree_leaves((arguments, options)) if isinstance(each, torch.Tensor)]
    is_wide = any(_is_cast(tensor) and tensor.dtype == torch.float32 for tensor in tensors)
    return _in_dtype(operation, torch.float32 if is_wide else torch.bfloat16, *arguments, **options)


def _with_fp32_result(operation: Any, with_dtype: Any, first: torch.Tensor, *arguments: Any, **options: Any) -> Any:
    names = [argument.name for argument in operation._schema.arguments]
    given = dict(zip(names, (first, *arguments), strict=False)) | options
    if not _is_cast(first) or given.get("dtype") is not None:
        return operation(first, *arguments, **options)
    # Arguments without a default in `with_dtype` may have one in `operation`.
    defaults = {each.name: each.default_value for each in operation._schema.arguments if each.has_default_value()}
    return with_dtype(**(defaults | given | {"dtype": torch.float32}))


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
) -> torch.Tensor:
    """`scaled_dot_product_attention` by the kernel that CUDA takes."""
    if torch.is_autocast_enabled("cpu"):
        cast = partial(_cast, torch.get_autocast_dtype("cpu"))
        query, key, value = map(cast, (query, key, value))
    is_flash = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] == value.shape[-1] <= 256
    outputs: torch.Tensor
    if is_flash and attn_mask is None:
        outputs = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    elif query.dtype != torch.float64 and query.shape[1] == key.shape[1]:
        bias = None
        if attn_mask is not None:
            numbers = torch.zeros_like(attn_mask, dtype=query.dtype) if attn_mask.dtype == torch.bool else attn_mask
            bias = numbers.expand(*query.shape[:-1], key.shape[-2])
        outputs = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale
        )[0]
    else:
        with sdpa_kernel(SDPBackend.MATH):
            outputs = F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    return outputs
