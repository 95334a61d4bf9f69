"""The blocks that a model repeats: what is compiled, computed again, or sharded as a unit."""

from collections.abc import Callable, Iterator

from torch import nn


def outermost(module: nn.Module, is_block: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    """The modules inside of `module` for which `is_block` holds; of those within one another, the outermost."""
    for child in module.children():
        if is_block(child):
            yield child
        else:
            yield from outermost(child, is_block)
