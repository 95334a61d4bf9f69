"""`torch.compile`, in the same places on every strategy.

The compiled regions are the blocks that a model repeats, or the whole model if it repeats none. All blocks share one
compiled code, so that a deep model compiles as fast as a shallow one; FSDP2 and ZeRO-3 gather weights block by block. A
region's `forward` is replaced, not the module, so that names and the strategies' hooks on modules are unaffected.
"""

import torch
from torch import nn

from largebatch.errors import UserError, reason_of
from largebatch.model.parts import lists_of_blocks
from largebatch.plan.strategies import names_of

# Compiled versions of one function: for blocks that differ, training and evaluation, and batches of several sizes.
# Beyond this number torch continues without compiling, with a warning.
MAX_VERSIONS = 64


def compile_in_place(model: nn.Module, device: torch.device) -> list[nn.Module]:
    """Compile the model's regions, which are returned, when they are first called; to call before the model is wrapped.

    A region called with a second shape is compiled once more, for any size of the dimensions that changed.

    Raises:
        UserError: torch.compile does not work on the device.
    """
    torch._dynamo.config.recompile_limit = MAX_VERSIONS
    # With the compiler's own random numbers, dropout would depend on whether a model is compiled.
    torch._inductor.config.fallback_random = True
    _check_compiler(device)
    regions = [block for blocks in lists_of_blocks(model) for block in blocks] or [model]
    # Under DDP, Dynamo cuts compiled code at the boundaries of DDP's buckets, so that reductions overlap with the rest
    # of the backward pass. Regions that are blocks are boundaries enough, and smaller pieces fuse less.
    torch._dynamo.config.optimize_ddp = regions == [model]
    for region in regions:
        region.forward = torch.compile(region.forward)
    return regions


def refuse_to_compile(region: nn.Module, strategy: str) -> UserError:
    """The error for a region whose weights the strategy does not gather together for all of its compiled code."""
    return UserError(
        f"compute.compile: {strategy} does not gather all weights of {type(region).__name__} for its compiled code; "
        f"write false, or launch with {names_of(lambda entry: not entry.shards.endswith('weights'))}"
    )


def _check_compiler(device: torch.device) -> None:
    # A small function needs what a model needs: a C++ compiler on a CPU; Triton, gcc and Python's headers on a GPU.
    try:
        torch.compile(torch.sin)(torch.ones(1, device=device))
    # Each compiler raises its own exceptions.
    except Exception as error:
        raise UserError(
            f"compute.compile: torch.compile does not work here: {reason_of(error)}; install what is missing "
            f"({'g++' if device.type == 'cpu' else 'triton, gcc and python3-dev'}), or write false"
        ) from error
