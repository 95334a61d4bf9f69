"""The bytes that a strategy sends in an optimizer step.

Ψ is the bytes of all gradients, which are fp32 like weights, whatever the precision; A is the number of micro-batches.
In a ring of n processes, each sends N (n - 1) / n to gather N bytes, or to reduce and scatter them; an all-reduce does
both. They count as N, N and 2 N in a `volume`, which is the traffic of each of many processes.

    strategy                        gathered             reduced     total
    ddp                             0                    2 Ψ         2 Ψ
    fsdp                            2 A Ψ                Ψ           (2 A + 1) Ψ, less what stays gathered
    zero1                           Ψ                    2 Ψ         3 Ψ
    zero2                           Ψ                    2 A Ψ       (2 A + 1) Ψ
    zero3                           Ψ to 2 A Ψ           A Ψ         up to 3 A Ψ

These differ from the ZeRO paper's 2 Ψ, 2 Ψ and 3 Ψ for A = 1 (Rajbhandari et al. 2020, arXiv 1910.02054, section 7):

- DeepSpeed all-reduces the buckets of stages 1 and 2, and discards what is not its own. With "zero_optimization"
  {"use_multi_rank_bucket_allreduce": false} it reduces each part to its owner instead, which sends Ψ less, but takes a
  call per owner of a bucket and, on a GPU with overlap_comm, makes the host wait before each call.
- ZeRO-3 keeps parameters of at most stage3_param_persistence_threshold elements (1e5) gathered, and gathers them once
  after each update. It frees others only if at least stage3_max_reuse_distance elements (1e9) come before they are used
  again. It gathers parameters shared by two modules once for each.
- FSDP2 keeps two units gathered from the forward to the backward pass: the root, with everything outside of blocks, and
  the tail that Accelerate makes of the final norm and the output layer.

Scalars are not counted (a vote on a stop, a norm for each parameter or group), nor what the loss itself
exchanges: features of a loss that couples samples, statistics of BatchNorm over all processes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from largebatch.named import load_named
from largebatch.plan.model_shape import ModelShape, Strategy, padded
from largebatch.plan.strategies import find_strategy


@dataclass(frozen=True)
class Traffic:
    """The volume of an optimizer step in bytes; `least` and `most` differ if it depends on the order of modules."""

    least: int
    most: int

    def sent(self, world_size: int) -> tuple[int, int]:
        """The bytes that each process sends in a ring: least and most."""
        return self.least * (world_size - 1) // world_size, self.most * (world_size - 1) // world_size


def traffic_of_a_step(
    model: ModelShape, strategy: Strategy, world_size: int, micro_batches: int, recomputes: bool = False
) -> Traffic:
    """The volume of a step's collectives, with this many micro-batches per process.

    With `recomputes`, blocks are computed again in the backward pass (activation checkpointing).
    """
    if world_size == 1:
        return Traffic(0, 0)
    count: Formula = load_named(find_strategy(strategy.name).traffic)
    least, most = count(model, strategy, world_size, micro_batches, recomputes)
    return Traffic(least * model.element_bytes, most * model.element_bytes)


Formula = Callable[[ModelShape, Strategy, int, int, bool], tuple[int, int]]
"""Maps the arguments of `traffic_of_a_step` to elements, least and most."""


def replicated(model: ModelShape, _: Strategy, __: int, ___: int, ____: bool) -> tuple[int, int]:
    """Gradients are all-reduced."""
    volume = 2 * sum(parameter.elements for parameter in model.trained)
    return volume, volume


def fsdp(model: ModelShape, strategy: Strategy, world_size: int, micro_batches: int, _: bool) -> tuple[int, int]:
    """Rows are gathered by units, gradients reduced and scattered."""
    # The rows of each parameter are padded to a multiple of the processes.
    whole = sum(parameter.padded_rows(world_size) for parameter in model.parameters)
    again = sum(
        parameter.padded_rows(world_size)
        for parameter in model.parameters
        if strategy.reshards and parameter.unit not in model.gathered_units
    )
    reduced = sum(parameter.padded_rows(world_size) for parameter in model.trained)
    volume = micro_batches * (whole + again) + reduced
    return volume, volume


def zero12(model: ModelShape, strategy: Strategy, world_size: int, micro_batches: int, _: bool) -> tuple[int, int]:
    """Gradients are reduced, and weights gathered after the update."""
    assert strategy.zero is not None
    psi = sum(parameter.elements for parameter in model.trained)
    # A group is one flat buffer, whose parts start at multiples of 2 elements (4 bytes in fp16).
    gathered = sum(padded(sum(parameter.elements for parameter in group), 2 * world_size) for group in model.groups)
    reductions = micro_batches if strategy.zero.stage == 2 else 1
    volume = (2 if strategy.zero.use_multi_rank_bucket_allreduce else 1) * reductions * psi + gathered
    return volume, volume


def zero3(
    model: ModelShape, strategy: Strategy, world_size: int, micro_batches: int, recomputes: bool
) -> tuple[int, int]:
    """Weights are gathered for each pass, gradients reduced and scattered."""
    zero = strategy.zero
    assert zero is not None
    # Each parameter is padded to a multiple of the processes.
    reduced = micro_batches * sum(padded(parameter.elements, world_size) for parameter in model.trained)
    least = most = 0
    # Each pass uses the parameters of each module once.
    passes = 3 if recomputes else 2
    trace = sum(passes * parameter.modules * parameter.elements for parameter in model.parameters)
    for parameter in model.parameters:
        size = padded(parameter.elements, world_size)
        if parameter.elements <= zero.stage3_param_persistence_threshold:
            # After the update.
            least, most = least + size, most + size
            continue
        all_uses = passes * micro_batches * parameter.modules * size
        least += all_uses if zero.stage3_max_reuse_distance == 0 and not recomputes else micro_batches * size
        most += micro_batches * size if trace < zero.stage3_max_reuse_distance else all_uses
    return reduced + least, reduced + most
