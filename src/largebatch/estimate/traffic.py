"""The collectives of an optimizer step under each strategy: what each sends, and to which processes.

Ψ is the size of all gradients in bytes (fp32, like the weights), and A is the number of micro-batches. In a ring of n
processes, each sends N (n - 1) / n bytes to gather N bytes or to reduce-scatter them; an all-reduce does both.

    strategy   gathered                                reduced
    ddp        0                                       all-reduced: Ψ
    fsdp       2 A Ψ, less what stays gathered         Ψ, or A Ψ if reduced with each micro-batch
    hsdp       the same, within each group             the same; then Ψ / shards, all-reduced over the replicas
    zero1      Ψ                                       all-reduced: Ψ
    zero2      Ψ                                       all-reduced: A Ψ
    zero3      Ψ, or up to 2 A Ψ                       A Ψ

An optimizer that puts layers together on one process each (Muon) exchanges their M bytes once in the update: each
process sends its M / n to the owners and gets as much back, or, where all have whole layers, sends its results to all.

With precision "bf16", fsdp and hsdp gather most weights as 2 bytes (`ParameterShape.gathered_bytes`).

These numbers differ from the ZeRO paper's, which are 2 Ψ, 2 Ψ and 3 Ψ for stages 1, 2 and 3 at A = 1 (Rajbhandari et
al. 2020, arXiv 1910.02054, section 7):

- In stages 1 and 2, DeepSpeed all-reduces buckets, and each process discards what is not its own. With
  "zero_optimization" {"use_multi_rank_bucket_allreduce": false} it reduces each part to its owner instead. That sends Ψ
  less, but takes a call per owner of a bucket and, on a GPU with overlap_comm, makes the host wait before each call.
- ZeRO-3 keeps parameters of at most stage3_param_persistence_threshold elements (1e5) gathered, and gathers them once
  after each update. It frees others only if at least stage3_max_reuse_distance elements (1e9) are used before they are
  needed again. It gathers a parameter that two modules share once for each module. Between the two cases the number of
  gathers depends on the order in which modules are used, and the larger number is counted.
- FSDP2 keeps three units gathered from the forward to the backward pass: the root, with everything outside the blocks;
  the tail, with the final norm and the output layer; and an embedding, if it is a unit.

A loss that couples samples gathers the features of the global batch, and reduce-scatters their gradient, once each.

Not counted are scalars (the vote on whether to stop, the norm of each parameter or group), and the statistics of
BatchNorm over all processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Literal

from largebatch.estimate.model_shape import ModelShape, ParameterShape, Strategy, elements_of, padded

Part = Literal["forward", "backward", "update"]
"""Of a step."""


@dataclass(frozen=True)
class Group:
    """Processes that communicate: `size` ranks, each `stride` from the next."""

    size: int
    stride: int = 1

    def on_a_node(self, local_world_size: int) -> int:
        """The number of its processes on one node, where each node has `local_world_size` processes."""
        return max(1, min(self.size, local_world_size // self.stride))


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind in an optimizer step."""

    operation: Literal["gather", "reduce-scatter", "all-reduce", "exchange"]  # what they do
    size: int  # bytes of the whole tensors that they gather or reduce
    calls: int  # the number of collectives that these bytes are divided into
    phase: Part  # the computation that it overlaps; none in the update
    group: Group  # the processes that take part
    times: int = 1  # how often per step: with each micro-batch, or once, with the last one

    @property
    def passes(self) -> int:
        """How often the bytes go around a ring: an all-reduce is a reduce-scatter and a gather."""
        return 2 if self.operation == "all-reduce" else 1

    @property
    def volume(self) -> int:
        """The bytes that each of many processes would send in a step, in a ring."""
        return self.passes * self.times * self.size

    @property
    def sent(self) -> int:
        """The bytes that each process of the group sends in a step."""
        return self.volume * (self.group.size - 1) // self.group.size

    def sent_between_nodes(self, local_world_size: int) -> int:
        """The part of `sent` that leaves a node, divided by the node's processes.

        A ring enters and leaves each node once, so the group's processes on a node share that link. In an exchange,
        each process sends as much to each other one.
        """
        on_a_node = self.group.on_a_node(local_world_size)
        if self.operation == "exchange" and self.group.size > 1:
            return self.sent * (self.group.size - on_a_node) // (self.group.size - 1)
        return 0 if on_a_node == self.group.size else self.sent // on_a_node


@dataclass(frozen=True)
class TrafficCase:
    """What the traffic of an optimizer step depends on."""

    model: ModelShape
    strategy: Strategy  # how the processes share the model
    world_size: int
    micro_batches: int  # micro-batches per process in the step
    recomputes: bool = False  # whether blocks are computed again in the backward pass (activation checkpointing)
    features_bytes: int = 0  # of the global batch, if the loss couples it


Collectives = tuple[Collective, ...]
DDP_BUCKET_BYTES = 25 * 2**20  # gradients that DDP all-reduces at a time: torch's `bucket_cap_mb`


def traffic_of_a_step(case: TrafficCase) -> Collectives:
    """Return the collectives of an optimizer step."""
    if case.world_size == 1:
        return ()
    count: Callable[[TrafficCase], Collectives] = resolve_name(f"{__name__}:{case.strategy.entry.formulas}")
    found = count(case) + exchanged(case) + coupled(case)
    return tuple(each for each in found if each.group.size > 1 and each.size)


def coupled(case: TrafficCase) -> Collectives:
    """The features of a global batch, for a loss that couples it, and their gradient."""
    all_processes = Group(case.world_size)
    return (
        Collective("gather", case.features_bytes, 1, "forward", all_processes),
        Collective("reduce-scatter", case.features_bytes, 1, "backward", all_processes),
    )


def exchanged(case: TrafficCase) -> Collectives:
    """Layers are put together by the optimizer, and taken apart again."""
    holders = Group(case.strategy.shards_of(case.world_size))
    groups = case.model.exchanged
    size = sum(map(elements_of, groups)) * case.model.element_bytes
    calls = len(groups)
    if case.strategy.entry.steps == "whole parameters":
        return (Collective("exchange", size, calls, "update", holders),)
    return (Collective("exchange", size // holders.size, calls, "update", holders, times=2),)


def replicated(case: TrafficCase) -> Collectives:
    """Gradients are all-reduced."""
    size = case.model.trained_elements * case.model.element_bytes
    calls = -(-size // DDP_BUCKET_BYTES)
    return (Collective("all-reduce", size, calls, "backward", Group(case.world_size)),)


def sharded(case: TrafficCase) -> Collectives:
    """Weights are gathered unit by unit; gradients are reduce-scattered and, with replicas, all-reduced over them."""
    model = case.model
    strategy = case.strategy
    shards = Group(strategy.shards_of(case.world_size))
    replicas = Group(case.world_size // shards.size, stride=shards.size)
    again = [each for each in model.parameters if strategy.reshards and each.unit not in model.gathered_units]
    # The rows of each parameter are padded to a multiple of the number of processes.
    reduced = sum(parameter.padded_rows(shards.size) for parameter in model.trained) * model.element_bytes
    trained_units = len({parameter.unit for parameter in model.trained})

    def gathered(parameters: Sequence[ParameterShape], phase: Part) -> Collective:
        size = sum(each.padded_rows(shards.size) * each.gathered_bytes(model.element_bytes) for each in parameters)
        units = len({each.unit for each in parameters})
        return Collective("gather", size, units, phase, shards, case.micro_batches)

    reductions = case.micro_batches if strategy.reduces_each else 1
    return (
        gathered(model.parameters, "forward"),
        gathered(again, "backward"),
        Collective("reduce-scatter", reduced, trained_units, "backward", shards, reductions),
        Collective("all-reduce", reduced // shards.size, trained_units, "backward", replicas),
    )


def zero12(case: TrafficCase) -> Collectives:
    """Gradients are reduced, and weights are gathered after the update."""
    model = case.model
    zero = case.strategy.zero
    # A parameter group is one flat buffer, whose parts start at multiples of 2 elements (4 bytes in fp16).
    groups = [padded(elements_of(group), 2 * case.world_size) for group in model.groups]
    return (
        Collective(
            # Reducing each part to its owner sends as much as a reduce-scatter.
            "all-reduce" if zero.use_multi_rank_bucket_allreduce else "reduce-scatter",
            model.trained_elements * model.element_bytes,
            -(-model.trained_elements // zero.reduce_bucket_size),
            "backward",
            Group(case.world_size),
            case.micro_batches if zero.stage == 2 else 1,
        ),
        Collective("gather", sum(groups) * model.element_bytes, len(groups), "update", Group(case.world_size)),
    )


def zero3(case: TrafficCase) -> Collectives:
    """Weights are gathered for each pass; gradients are reduce-scattered."""
    model = case.model
    zero = case.strategy.zero
    # Each pass uses the parameters of each module once.
    passes = 3 if case.recomputes else 2
    trace = sum(passes * parameter.modules * parameter.elements for parameter in model.parameters)
    threshold = zero.stage3_param_persistence_threshold

    def size(parameter: ParameterShape) -> int:
        # Each parameter is padded to a multiple of the number of processes.
        return padded(parameter.elements, case.world_size) * model.element_bytes

    small = sum(size(each) for each in model.parameters if each.elements <= threshold)
    large = [each for each in model.parameters if each.elements > threshold]
    in_modules = sum(each.modules * size(each) for each in large)

    def gathered(size: int, phase: Part, times: int = 1) -> Collective:
        calls = -(-size // (zero.stage3_prefetch_bucket_size * model.element_bytes))
        return Collective("gather", size, calls, phase, Group(case.world_size), times)

    # Whether large parameters are gathered for each module in each pass, or once for each micro-batch.
    frees = trace >= zero.stage3_max_reuse_distance
    reduced = sum(map(size, model.trained))
    calls = -(-reduced // (zero.reduce_bucket_size * model.element_bytes))
    return (
        Collective("reduce-scatter", reduced, calls, "backward", Group(case.world_size), case.micro_batches),
        gathered(small, "update"),
        gathered(in_modules if frees else sum(map(size, large)), "forward", case.micro_batches),
        gathered(in_modules if frees else 0, "backward", (passes - 1) * case.micro_batches),
    )
