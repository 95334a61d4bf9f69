"""`torch.compile`, on every strategy in the same places.

The regions that are compiled are the blocks that a model repeats, or the whole model where it repeats none ("regional
compilation"): one compiled code serves all blocks, so that compiling takes no longer for a deep model, and blocks are
what FSDP2 and ZeRO-3 gather the weights of. A region's `forward` is replaced, not the module: names stay what they are,
and what strategies hang on modules (gathering weights, reducing gradients) goes on around the compiled code.
"""

import torch
from torch import nn

from largebatch.errors import UserError
from largebatch.model.blocks import outermost
from largebatch.plan.strategies import names_of

# Of one function: the blocks of a network that are not alike, in training and evaluation, in batches of several sizes.
# Beyond it torch goes on without compiling, and says so in a warning.
MOST_VERSIONS = 64


def compile_in_place(model: nn.Module, device: torch.device) -> list[nn.Module]:
    """Have the model's regions compiled when they are first called; before the strategy wraps it.

    Shapes are taken as fixed, until a region is called with another one: it is then compiled once more, for any size of
    the dimensions that have changed (torch's default).

    Args:
        model: The model as the recipe built it.
        device: Where it will be trained.

    Returns:
        The regions.

    Raises:
        UserError: There is nothing to compile with.
    """
    _check_compiler(device)
    torch._dynamo.config.recompile_limit = MOST_VERSIONS
    # Random numbers of its own would make dropout depend on whether a model is compiled.
    torch._inductor.config.fallback_random = True
    regions = [block for blocks in outermost(model, _is_list_of_blocks) for block in blocks.children()] or [model]
    for region in regions:
        region.forward = torch.compile(region.forward)
    return regions


def refuse_to_compile(region: nn.Module, strategy: str) -> UserError:
    """Of a region whose weights the strategy gathers in parts, by code of its own that torch.compile would cut."""
    return UserError(
        f"compute.compile: {strategy} gathers the weights of {type(region).__name__} part by part, and it is compiled "
        f"as a whole; write false, or launch with {names_of(lambda entry: not entry.shards.endswith('weights'))}"
    )


def _is_list_of_blocks(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1


def _check_compiler(device: torch.device) -> None:
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise UserError(
                "compute.compile: on a CPU torch.compile needs a C++ compiler, and there is none; install g++, or "
                "write false"
            ) from error
    else:
        from torch.utils._triton import has_triton

        if not has_triton():
            raise UserError(
                "compute.compile: on this GPU torch.compile needs Triton, which is not installed or does not know the "
                "GPU; pip install triton, or write false"
            )
