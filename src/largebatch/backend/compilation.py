"""`torch.compile`, in the same places on every strategy.

The compiled regions are the blocks that a model repeats, or the whole model. All blocks share one compiled code, so
that a deep model compiles as fast as a shallow one; FSDP2 and ZeRO-3 gather weights block by block. In a whole model,
operations also fuse over the boundaries of blocks, and fewer kernels are launched: a step of ResNet-50 took 0.85 and
one of a GPT of 10.7 million parameters 0.61 of that with compiled blocks (bench/results/gpu). A region's `forward` is
replaced, not the module, so that names and the strategies' hooks on modules are unaffected.

What fails to compile trains eagerly. A compiler that is missing shows before training. Whether the model's own graphs
can be built shows in the first training step, where each region is tried forward and backward on copies of its inputs,
without communication; a process on which that fails goes on eagerly, and at the end of the step's passes all do.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from largebatch.config.sections import Compute
from largebatch.errors import UserError, reason_of
from largebatch.model.parts import convolves, differentiable, repeated_blocks
from largebatch.plan.strategies import StrategyEntry

# Compiled versions of one function: for blocks that differ, training and evaluation, and batches of several sizes.
# Beyond this number torch continues without compiling, with a warning.
MAX_VERSIONS = 64
SMALL_MODEL = 50_000_000
"""Parameters below which launching kernels, not computing, is taken to decide the time of a step."""


def compiles_whole(model: nn.Module, strategy: StrategyEntry, compute: Compute) -> bool:
    """Whether a model is compiled whole, rather than its blocks, if it repeats any."""
    if compute.compile in ("blocks", "model"):
        return compute.compile == "model"
    # Blocks that are computed again need memory more than speed.
    if strategy.shards.endswith("weights") or compute.activation_checkpointing != "none":
        return False
    return convolves(model) or sum(each.numel() for each in model.parameters()) < SMALL_MODEL


class CompiledRegions:
    """A model's regions, compiled when they are first called; to create before the model is wrapped.

    A region called with a second shape is compiled once more, for any size of the dimensions that changed.

    Args:
        model: The model, whose regions' `forward` is replaced.
        device: The process's device.
        strategy: The strategy that will wrap it.
        compute: The recipe's section.
    """

    def __init__(self, model: nn.Module, device: torch.device, strategy: StrategyEntry, compute: Compute):
        torch._dynamo.config.recompile_limit = MAX_VERSIONS
        # With the compiler's own random numbers, dropout would depend on whether a model is compiled.
        torch._inductor.config.fallback_random = True
        self._device = device
        self._strategy = strategy
        self._word = compute.compile
        blocks = [] if compiles_whole(model, strategy, compute) else repeated_blocks(model)
        self.regions = blocks or [model]
        # Why the regions run eagerly; None if they do not. A small module needs what a model needs: a C++ compiler on
        # a CPU; Triton, gcc and Python's headers on a GPU.
        self.why_eager = self._failure_of(nn.SiLU(), torch.compile(nn.SiLU()), [torch.ones(1, device=device)], {})
        # Under DDP, Dynamo cuts compiled code at the boundaries of DDP's buckets, so that reductions overlap with the
        # rest of the backward pass. Regions that are blocks are boundaries enough, and smaller pieces fuse less.
        torch._dynamo.config.optimize_ddp = self.regions == [model]
        for region in self.regions:
            region.forward = self._compiled(region)

    def leave_out(self, region: nn.Module) -> None:
        """Compile nothing, because the strategy does not gather all of a region's weights for its compiled code.

        Raises:
            UserError: The recipe's `compute.compile` is not "auto".
        """
        self.why_eager = (
            f"{self._strategy.name} does not gather all weights of {type(region).__name__} for its compiled code"
        )
        if self._word != "auto":
            raise UserError(f'compute.compile: {self.why_eager}; write "auto", or launch with ddp')

    def _compiled(self, region: nn.Module) -> Callable[..., Any]:
        eager = region.forward
        compiled = torch.compile(eager)
        # Whether passes with and without gradients, which are compiled separately, have been tried.
        tried: set[bool] = set()

        @wraps(eager)
        def forward(*arguments: Any, **options: Any) -> Any:
            if self.why_eager is None and torch.is_grad_enabled() not in tried:
                tried.add(torch.is_grad_enabled())
                self.why_eager = self._failure_of(region, compiled, arguments, options)
            return (compiled if self.why_eager is None else eager)(*arguments, **options)

        return forward

    def _failure_of(self, region: nn.Module, compiled: Callable[..., Any], *given: Any) -> str | None:
        """Why a region cannot be compiled; this leaves its buffers and random numbers as they are."""
        arguments, options = tree_map_only(
            torch.Tensor, lambda each: each.clone() if each.requires_grad else each, given
        )
        trained = differentiable((arguments, options))
        buffers = [(buffer, buffer.clone()) for buffer in region.buffers()]
        try:
            with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
                outputs = differentiable(compiled(*arguments, **options))
                if outputs:
                    # Of a region whose inputs need no gradient, the first.
                    trained = trained or [each for each in region.parameters() if each.requires_grad]
                    torch.autograd.grad(outputs, trained, [each.detach() for each in outputs], allow_unused=True)
        # Each compiler raises its own exceptions.
        except Exception as error:
            return f"torch.compile does not work on {type(region).__name__}: {reason_of(error)}"
        finally:
            for buffer, before in buffers:
                # Autograd may have saved a buffer that several regions share, and would refuse a change that it sees.
                buffer.data.copy_(before)
        return None
