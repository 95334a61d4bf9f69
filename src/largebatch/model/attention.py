"""Attention in models of `transformers`: its implementation, documents kept apart, parameters that cannot be learned;
and experts under autocast.

This module imports `transformers`, which takes seconds, only for models that come from there.
"""

import sys
from typing import Any

from torch import nn

from largebatch.errors import UserError, reason_of
from largebatch.model.parts import outermost_modules

KEY_BIASES = ("k_proj.bias", "key.bias")
# Implementations for which `transformers` makes a mask from the positions of documents. FlashAttention's look at the
# positions themselves, but only if the micro-batch has one sample, and not every model passes them on (transformers
# 5.23.0, `modeling_flash_attention_utils._is_packed_sequence`).
MASKED_BY_POSITIONS = ("eager", "sdpa", "flex_attention")


def set_attention(model: nn.Module, implementation: str) -> None:
    """Set the implementation of attention, by the name that `transformers` has for it.

    Raises:
        UserError: The model is not of `transformers`, or cannot have this implementation here.
    """
    given = f'compute.attention: "{implementation}"'
    parts = _transformers_models(model)
    if not parts:
        raise UserError(f"{given} needs a model of `transformers`, and {type(model).__name__} is not one; write null")
    for part in parts:
        before = part.config._attn_implementation
        try:
            part.set_attn_implementation(implementation)
        except (ImportError, ValueError) as error:
            raise UserError(f"{given}: {reason_of(error)}; write another implementation, or null") from error
        # For such a model `transformers` only warns.
        if part.config._attn_implementation == before != implementation:
            raise UserError(f"{given}: {type(part).__name__} has attention of its own, {before!r}; write null")


def keep_documents_apart(model: nn.Module, implementation: str | None = None) -> None:
    """Make models of `transformers` keep the documents of a sample apart if they are given `position_ids`.

    Those are the model itself, or its outermost parts that are models of `transformers`.

    Args:
        model: The model, whose forward passes raise UserError if its attention would ignore the positions they are
            given, so that documents would see each other.
        implementation: The implementation of attention that the model will have; None keeps the current one.
    """
    for part in _transformers_models(model):
        from largebatch.model.transformers_internals import mask_by_given_positions

        attention = implementation or part.config._attn_implementation
        refusal = None
        if attention not in MASKED_BY_POSITIONS:
            refusal = (
                f'compute.attention: documents are kept apart by position_ids, which "{attention}" ignores; write one '
                f"of {', '.join(MASKED_BY_POSITIONS)}, or call {type(part).__name__} with input_ids by name and "
                "without position_ids"
            )
        mask_by_given_positions(part, refusal)


def autocast_experts() -> None:
    """Make autocast cast the experts of models of `transformers`, if there can be one."""
    if "transformers" in sys.modules:
        from largebatch.model.transformers_internals import cast_stacked_experts

        cast_stacked_experts()


def _transformers_models(model: nn.Module) -> list[Any]:
    if "transformers" not in sys.modules:
        return []
    from transformers import PreTrainedModel

    # In a list, because the model may itself be one of them.
    return list(outermost_modules(nn.ModuleList([model]), lambda module: isinstance(module, PreTrainedModel)))


def freeze_key_biases(model: nn.Module) -> None:
    """Freeze the biases of attention's keys in a model of `transformers`; call it before building the optimizer.

    A key's bias adds the same number to all scores of a query, which softmax cancels, so the loss does not depend on it
    and its gradient is only rounding. Adam would divide that noise by its own size and take full steps, different ones
    on each strategy and number of processes.

    Raises:
        ValueError: The model has no separate projection of keys with a bias.
    """
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith(KEY_BIASES)]
    if not biases:
        raise ValueError(f"{type(model).__name__} has no parameters named *{' or *'.join(KEY_BIASES)}")
    for bias in biases:
        bias.requires_grad_(False)
