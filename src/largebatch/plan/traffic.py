"""What a strategy sends in an optimizer step.

Ψ is the bytes of all gradients, which are fp32, as weights are, whatever the precision; A is the number of
micro-batches. A ring of n processes gathers N bytes, or reduces and scatters them, with N (n - 1) / n sent by each; an
all-reduce is both. So they count N, N and 2 N in a `volume`, which is each process's traffic where there are many.

    strategy                        gathered             reduced     together
    ddp                             0                    2 Ψ         2 Ψ
    fsdp                            2 A Ψ                Ψ           (2 A + 1) Ψ, less what stays gathered
    zero1                           Ψ                    2 Ψ         3 Ψ
    zero2                           Ψ                    2 A Ψ       (2 A + 1) Ψ
    zero3                           Ψ to 2 A Ψ           A Ψ         up to 3 A Ψ

What differs from the ZeRO paper's 2 Ψ, 2 Ψ and 3 Ψ for A = 1 (Rajbhandari et al. 2020, arXiv 1910.02054, section 7):

- DeepSpeed all-reduces the buckets of stages 1 and 2, and throws away what is not its own. With "zero_optimization"
  {"use_multi_rank_bucket_allreduce": false} it reduces each part to its owner instead: Ψ less, for as many calls to a
  bucket as it has owners, and, on a GPU with overlap_comm, a wait of the host before each of them.
- ZeRO-3 keeps parameters of at most stage3_param_persistence_threshold elements gathered (1e5; after each update they
  are gathered once), and frees others only if stage3_max_reuse_distance elements (1e9) or more come before they are
  used again. It gathers what two modules share for each of them.
- FSDP2 keeps two units gathered from the forward to the backward pass: the root, with what is in no block, and what
  Accelerate makes the tail, the final norm with the output layer.

Not counted are single numbers (a vote on a stop, a norm for each parameter or group), and what the loss itself
exchanges: features of a loss that couples samples, statistics of BatchNorm over all processes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from largebatch.named import load_named
from largebatch.plan.model_shape import ModelShape, Strategy, padded
from largebatch.plan.strategies import find_strategy


@dataclass(frozen=True)
class Traffic:
    """Of an optimizer step.

    Args:
        least: Volume in bytes.
        most: The same as `least`, but where it depends on the order in which modules are used.
    """

    least: int
    most: int

    def sent(self, world_size: int) -> tuple[int, int]:
        """The bytes that each process sends in a ring: least and most."""
        return self.least * (world_size - 1) // world_size, self.most * (world_size - 1) // world_size


def traffic_of_a_step(
    model: ModelShape, strategy: Strategy, world_size: int, micro_batches: int, recomputes: bool = False
) -> Traffic:
    """The volume of a step's collectives.

    Args:
        model: The model.
        strategy: How it is shared.
        world_size: Processes.
        micro_batches: Of each process in the step.
        recomputes: Whether blocks are computed again in the backward pass (activation checkpointing).
    """
    if world_size == 1:
        return Traffic(0, 0)
    count: Formula = load_named(find_strategy(strategy.name).traffic)
    least, most = count(model, strategy, world_size, micro_batches, recomputes)
    return Traffic(least * model.element_bytes, most * model.element_bytes)


Formula = Callable[[ModelShape, Strategy, int, int, bool], tuple[int, int]]
"""From the arguments of `traffic_of_a_step` to elements, least and most."""


def replicated(model: ModelShape, _: Strategy, __: int, ___: int, ____: bool) -> tuple[int, int]:
    """Gradients are all-reduced."""
    volume = 2 * sum(parameter.elements for parameter in model.trained)
    return volume, volume


def fsdp(model: ModelShape, strategy: Strategy, world_size: int, micro_batches: int, _: bool) -> tuple[int, int]:
    """Rows are gathered by units, gradients reduced and scattered."""
    # Each parameter's rows are filled up to a multiple of the processes.
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
    # A group is one flat buffer, whose parts begin at multiples of 2 elements: at 4 bytes for fp16.
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
    # Each parameter is filled up to a multiple of the processes.
    reduced = micro_batches * sum(padded(parameter.elements, world_size) for parameter in model.trained)
    least = most = 0
    # In a forward and a backward pass, each module's parameters come once.
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
