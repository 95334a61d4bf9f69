"""Parts of a model that others look for: the blocks that it repeats, and its embedding layers."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

EMBEDDING_GETTERS = ("get_input_embeddings", "get_output_embeddings")


def outermost_modules(module: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    """The modules inside `module` for which `is_wanted` holds, without those inside another one of them."""
    for child in module.children():
        if is_wanted(child):
            yield child
        else:
            yield from outermost_modules(child, is_wanted)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that a model repeats: those in its outermost lists of modules of one class each."""
    lists: Iterator[Any] = outermost_modules(
        model, lambda module: isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1
    )
    return [block for blocks in lists for block in blocks]


def convolves(model: nn.Module) -> bool:
    """Whether a model has more convolutions than linear layers."""
    modules = list(model.modules())
    return sum(isinstance(each, _ConvNd) for each in modules) > sum(isinstance(each, nn.Linear) for each in modules)


def differentiable(values: Any) -> list[torch.Tensor]:
    """The tensors with gradients among nested values, such as a model's outputs."""
    return [each for each in tree_leaves(values) if getattr(each, "requires_grad", False)]


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name belongs to an adapter (LoRA) of `peft`."""
    return ".lora_" in name


def without_adapter(name: str) -> str:
    """The name that a parameter has in the model without adapters."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def has_inputs_first(module: nn.Module) -> bool:
    """Whether the first dimension of the module's weight is its inputs: in GPT-2's linear layers."""
    # It is found by its module's name, because importing the class takes seconds.
    return type(module).__module__ == "transformers.pytorch_utils"


def cast_weights(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """The layers whose weight autocast casts and no other module shares, each with this weight."""
    modules: list[Any] = [*model.modules()]
    users = Counter(parameter for module in modules for parameter in module.parameters(recurse=False))
    # With `target_parameters`, peft itself adds the product of an adapter's weights to the weight.
    for module in modules:
        if type(module).__name__ == "ParamWrapper":
            users.update([module.get_param(), *module.lora_A.parameters(), *module.lora_B.parameters()])
    for module in modules:
        # Autocast casts it to its own precision before every use.
        is_cast = isinstance(module, nn.Linear | _ConvNd) or has_inputs_first(module)
        # None for a layer that computes its weight, for example by weight normalization: the parameters are not cast.
        weight = module._parameters.get("weight")
        if is_cast and weight is not None and users[weight] == 1:
            yield module, weight


def store_frozen_in_bf16(model: nn.Module) -> None:
    """Store in bf16 those weights that are not trained, that no modules share, and that autocast casts anyway."""
    for module, weight in cast_weights(model):
        if not weight.requires_grad:
            module.weight = nn.Parameter(weight.to(torch.bfloat16), requires_grad=False)


def embedding_layer(model: nn.Module, getter: str) -> nn.Module | None:
    """The layer that a model of `transformers` returns from one of `EMBEDDING_GETTERS`; None if it has none."""
    try:
        layer: nn.Module | None = getattr(model, getter, lambda: None)()
    except NotImplementedError:
        # Some architectures raise instead of returning None.
        return None
    return layer
