"""Uses of internals of `transformers`, as read in 5.23.0: how its decoders find packed samples, how it loads and
saves, and how experts multiply.

Positions that start over inside a sample keep the documents of a packed sample apart. To find out whether they do,
`masking_utils.find_packed_sequence_indices` reads the positions on the host in each forward pass, even those that the
model itself has just counted, so the host waits for the device. Here documents are kept apart exactly if positions are
given.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, masking_utils
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.integrations import moe

from largebatch.errors import UserError, reason_of

Tensors = dict[str, torch.Tensor]


class _DocumentFinder:
    """Stands in for the function of `transformers` that looks at positions.

    Args:
        look: That function, which answers where it is not known whether positions were given.
    """

    def __init__(self, look: Callable[[torch.Tensor], torch.Tensor | None]):
        self.look = look
        self.given: bool | None = None  # whether the forward pass that runs was given positions; None if it is unknown

    def __call__(self, position_ids: torch.Tensor) -> torch.Tensor | None:
        """The number of each token's document in its sample, (batch, tokens); None if all are in one."""
        if self.given is None:
            return self.look(position_ids)
        if not self.given:
            return None
        steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        return (steps != 1).cumsum(-1)


def mask_by_given_positions(model: nn.Module, refusal: str | None) -> None:
    """Make a model of `transformers` keep documents apart if it is called with `position_ids`, and only then.

    With a refusal, such calls raise a UserError with this message.
    """
    finder = masking_utils.find_packed_sequence_indices
    if not isinstance(finder, _DocumentFinder):
        finder = _DocumentFinder(finder)
        masking_utils.find_packed_sequence_indices = finder
    forward = model.forward

    @wraps(forward)
    def forward_with_given(*arguments: Any, **options: Any) -> Any:
        # The first argument is the tokens; if there are more, it is not known what they are.
        given = None if len(arguments) > 1 else options.get("position_ids") is not None
        if refusal is not None and given is not False:
            raise UserError(refusal)
        before = finder.given
        finder.given = given
        try:
            return forward(*arguments, **options)
        finally:
            finder.given = before

    model.forward = forward_with_given


def cast_stacked_experts() -> None:
    """Let autocast cast the stacked weights of experts, too. It does not know torch's `grouped_mm`, and `transformers`
    casts the inputs to the weights' precision, so that bf16 training would multiply them in fp32.
    """
    product = moe._grouped_mm
    if hasattr(product, "__wrapped__"):
        return

    @wraps(product)
    def product_under_autocast(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        kind = weight.device.type
        # The product needs rows of a multiple of 16 bytes.
        if torch.is_autocast_enabled(kind) and not any(size % 8 for size in weight.shape[-2:]):
            weight = weight.to(torch.get_autocast_dtype(kind))
        result: torch.Tensor = product(input, weight, offs)
        return result

    moe._grouped_mm = product_under_autocast


def loaded_names(model: nn.Module, stored: Iterable[str]) -> dict[str, str | None]:
    """By the names of stored tensors, those that `from_pretrained` gives them; None for what it merges or splits."""
    if not isinstance(model, PreTrainedModel):
        return {name: name for name in stored}
    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    found = {name: rename_source_key(name, renamings, converters) for name in stored}
    return {name: renamed if converter is None else None for name, (renamed, converter) in found.items()}


def stored_form(config: Mapping[str, Any], tensors: Tensors) -> Callable[[Tensors], Tensors]:
    """How `save_pretrained` stores one of a model's tensors: the function maps it, by its name, to one or more by the
    names that model hubs, other libraries and other versions of `transformers` have for them.

    A tensor stays as it is if its model is not of `transformers` or cannot be built, or if it is stored in one with
    others.

    Args:
        config: The model's `config.json`.
        tensors: All of its tensors, on the meta device.
    """
    name = (config.get("architectures") or [""])[0]
    model_class = getattr(transformers, name, None)
    if model_class is None:
        return dict
    try:
        with torch.device("meta"):
            model = model_class(model_class.config_class(**config))
    # Of any kind: whoever loads the model meets it, too, but has its weights.
    except Exception as error:
        what = "tensors have the names that they have in memory"
        print(f"note: {what}, because transformers cannot build {name}: {reason_of(error)}", file=sys.stderr)
        return dict

    def store(some: Tensors) -> Tensors:
        stored: Tensors = revert_weight_conversion(model, some)
        return stored

    one_by_one = [(name, each.shape) for key in tensors for name, each in store({key: tensors[key]}).items()]
    together = [(name, each.shape) for name, each in store(tensors).items()]
    return store if sorted(one_by_one) == sorted(together) else dict


def without_ignored(model: nn.Module, unknown: Iterable[str]) -> list[str]:
    """The names of stored tensors that a model does not have, without those that its class leaves unread, and
    without the masks and frequencies that files of early versions of `transformers` hold."""
    constants = r"(attn|attention)\.bias$|\.(causal_mask|masked_bias|inv_freq)$"
    patterns = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), constants]
    return [name for name in unknown if not any(re.search(pattern, name) for pattern in patterns)]
