"""Attention that keeps documents apart without a mask of shape (tokens, tokens), on GPUs.

A model of `transformers` describes what its tokens see by a function of two positions, which the implementation of
attention turns into its own kind of mask. The implementations here take the kind of one of torch's kernels:

- "flex": the blocks of 128 x 128 scores that have any to compute (`flex_attention`, arXiv 2412.05496);
- "flash": where each document begins, for FlashAttention over sequences of varying length (`varlen_attn`).

Where no documents are kept apart, both are `scaled_dot_product_attention`, as without them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flex_attention_mask, sdpa_mask

from largebatch.errors import UserError
from largebatch.model.parts import outermost_modules

# Names that `transformers` does not take for its own "flex_attention" and "flash_attention_2".
IMPLEMENTATIONS = {"flex": "document_blocks", "flash": "document_starts"}

# From 2.12 on, torch asks to be told that heads share keys and values.
SHARED_KEYS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


@dataclass(frozen=True)
class Documents:
    """The documents of a micro-batch whose samples are joined to one row of tokens."""

    starts: torch.Tensor  # place of each one's first token, and number of all tokens; shape (documents + 1,), int32
    longest: int  # tokens of the longest


def keep_apart_with(kernel: str, model: nn.Module, device: torch.device) -> None:
    """Make a model of `transformers` keep documents apart with the kernel "flex" or "flash".

    Raises:
        UserError: The device has no such kernel, or the model computes attention in another way.
    """
    given = f'compute.attention: "{kernel}"'
    if device.type != "cuda":
        raise UserError(f'{given} needs an NVIDIA GPU, and this is {device.type}; write "sdpa"')
    # In a list, because it may itself be one of `transformers`.
    models: list[Any] = list(
        outermost_modules(nn.ModuleList([model]), lambda module: isinstance(module, PreTrainedModel))
    )
    unable = [part for part in models if not type(part)._supports_attention_backend] if models else [model]
    if unable:
        raise UserError(
            f"{given} needs a model of `transformers` with exchangeable attention, and {type(unable[0]).__name__} is "
            'not one; write "sdpa"'
        )
    AttentionInterface.register(IMPLEMENTATIONS[kernel], _attention)
    AttentionMaskInterface.register(IMPLEMENTATIONS[kernel], {"flex": _blocks, "flash": _documents}[kernel])
    for part in models:
        part.set_attn_implementation(IMPLEMENTATIONS[kernel])


def _blocks(**options: Any) -> BlockMask | torch.Tensor | None:
    """The mask for `flex_attention`."""
    mask: BlockMask | torch.Tensor | None = (flex_attention_mask if _are_apart(options) else sdpa_mask)(**options)
    return mask


def _documents(**options: Any) -> Documents | torch.Tensor | None:
    """The mask for `varlen_attn`. Its size depends on the data, so the host waits for the device."""
    mask: Documents | torch.Tensor | None = _documents_of(options) if _are_apart(options) else None
    return sdpa_mask(**options) if mask is None else mask


def _are_apart(options: dict[str, Any]) -> bool:
    """Whether tokens may see less than all those before them, in whole samples without padding."""
    is_whole = options["attention_mask"] is None and options["q_length"] == options["kv_length"]
    return is_whole and not options["allow_is_causal_skip"]


def _documents_of(options: dict[str, Any]) -> Documents | None:
    """The longest runs of tokens that see the one before; None if tokens see later ones, or if a model adds rules."""
    batch, tokens, sees, device = (options[name] for name in ("batch_size", "q_length", "mask_function", "device"))
    rows, places = torch.arange(batch, device=device)[:, None], torch.arange(tokens, device=device)[None]
    begins = (places == 0) | ~sees(rows, 0, places, (places - 1).clamp(min=0))
    looks_ahead = (places < tokens - 1) & sees(rows, 0, places, (places + 1).clamp(max=tokens - 1))
    starts = nn.functional.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=batch * tokens)
    longest, sees_later = torch.stack([starts.diff().max(), looks_ahead.any()]).tolist()
    return None if sees_later or options["use_vmap"] else Documents(starts.int(), longest)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Documents | BlockMask | torch.Tensor | None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """Attention by the kernel that the kind of mask belongs to, called and answering as `transformers` has it.

    Queries are of shape (batch, heads, tokens, channels), and outputs of shape (batch, tokens, heads, channels).
    """
    compute: Callable[..., tuple[torch.Tensor, Any]] = sdpa_attention_forward
    if isinstance(attention_mask, Documents | BlockMask):
        if dropout > 0:
            raise UserError(
                f"compute.attention: {type(module).__name__} drops weights of attention with probability {dropout:g}, "
                'which kernels that keep documents apart cannot do; write "sdpa", or model.dropout 0'
            )
        if torch.is_autocast_enabled(query.device.type):
            # Rotary positions leave queries and keys in fp32.
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        compute = _flash if isinstance(attention_mask, Documents) else flex_attention_forward
    return compute(module, query, key, value, attention_mask, dropout=dropout, **options)


def _flash(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise UserError(
                f'compute.attention: {type(module).__name__} computes attention with {name}, which "flash" cannot do; '
                'write "flex"'
            )
    batch, _, tokens, _ = query.shape
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    before = -1 if sliding_window is None else sliding_window - 1
    outputs = varlen_attn(
        query,
        key,
        value,
        documents.starts,
        documents.starts,
        documents.longest,
        documents.longest,
        scale=scaling,
        window_size=(before, 0),
        **SHARED_KEYS,
    )
    assert isinstance(outputs, torch.Tensor)
    return outputs.reshape(batch, tokens, *outputs.shape[1:]), None
