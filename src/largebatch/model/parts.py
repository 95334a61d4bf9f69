"""Parts of a model that others look for: the blocks that it repeats, and its embedding layers."""

from collections.abc import Callable, Iterator

from torch import nn

EMBEDDING_GETTERS = ("get_input_embeddings", "get_output_embeddings")


def outermost_modules(module: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    """The modules inside `module` for which `is_wanted` holds, without those inside another one of them."""
    for child in module.children():
        if is_wanted(child):
            yield child
        else:
            yield from outermost_modules(child, is_wanted)


def lists_of_blocks(model: nn.Module) -> list[nn.ModuleList]:
    """The outermost lists of modules of one class each: the blocks that a model repeats."""
    found = outermost_modules(
        model, lambda module: isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1
    )
    return [module for module in found if isinstance(module, nn.ModuleList)]


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name belongs to an adapter (LoRA) of `peft`."""
    return ".lora_" in name


def without_adapter(name: str) -> str:
    """The name that a parameter has in the model without adapters."""
    return name.replace(".base_layer.", ".")


def embedding_layer(model: nn.Module, getter: str) -> nn.Module | None:
    """The layer that a model of `transformers` returns from one of `EMBEDDING_GETTERS`; None if it has none."""
    try:
        layer: nn.Module | None = getattr(model, getter, lambda: None)()
    except NotImplementedError:
        # Some architectures raise instead of returning None.
        return None
    return layer
