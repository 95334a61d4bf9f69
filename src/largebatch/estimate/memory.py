"""The bytes of weights, gradients and optimizer states held by the fullest process under each strategy.

`held` is exact: the tensors of a running job before the optimizer's update (tests/estimate/test_model_states.py counts
them). `phases` are upper estimates of what is also allocated at some moments of a step, of which one has the peak. Not
included are an optimizer's scalar states (such as the step count of each tensor), the temporary tensors of its
arithmetic, and the rounding of the allocator (to 512 bytes per tensor on NVIDIA GPUs).

Weights stay in fp32 under bf16 autocast, so an element is 4 bytes everywhere (8 in fp64).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pkgutil import resolve_name
from typing import NamedTuple

from largebatch.config.optimizers import Shape
from largebatch.estimate.model_shape import ModelShape, ParameterShape, Strategy, elements_of, padded
from largebatch.plan.contract import PAIRS_PER_TILE, RunPlan
from largebatch.plan.strategies import Policy

MAX_FRACTION_OF_GPU = 0.6
"""The fraction of a GPU's memory that model states and transient memory may take if gradients stay whole until the last
micro-batch; the rest is left for activations."""


NUMBERS_PER_PAIR = 20  # NT-Xent's at most: the similarities of two views with two others, held five times


class Phase(NamedTuple):
    """A moment of a step at which memory may be at its peak."""

    activations: float  # the share of a micro-batch's activations that is held
    transient: Mapping[str, int]  # bytes that are not held for the whole step, at most, by cause


@dataclass(frozen=True)
class ModelStates:
    """Bytes on the process that holds the most."""

    by_kind: Mapping[str, int]  # what is held for the whole step
    phases: Sequence[Phase]
    not_cast: int = 0  # bytes of autocast's copies of weights that are not made, as the weights are gathered in bf16

    @property
    def held(self) -> int:
        """What is held for the whole step."""
        return sum(self.by_kind.values())

    def peak(self, activations: int = 0) -> tuple[int, Mapping[str, int]]:
        """The bytes at the peak, and the transient ones among them, where a micro-batch keeps these activations."""

        def size(phase: Phase) -> int:
            return sum(phase.transient.values()) + round(phase.activations * activations)

        peak = max(self.phases, key=size)
        return self.held + size(peak), peak.transient


def model_states(model: ModelShape, strategy: Strategy, plan: RunPlan) -> ModelStates:
    """The bytes on the fullest process, in a step with the most micro-batches."""
    count: Formula = resolve_name(f"{__name__}:{strategy.entry.formulas}")
    held = count(model, strategy, plan.world_size, plan.max_gradient_accumulation_steps > 1)
    size = model.element_bytes
    state_elements = 0
    for shape, group in held.stepped:
        for state in plan.states_of(shape, model.group_options[group]).values():
            # Scalars are not counted.
            if state:
                state_elements += prod(state)
    exchange = Phase(0.0, {"exchanged layers": exchanged(model, strategy, plan.world_size)})
    return ModelStates(
        by_kind={
            # Weights that passes compute with, trained or not, as held between passes.
            "weights": held.weights * size - held.in_bf16 * (size - 2),
            # DeepSpeed's copies of this process's part, which the optimizer steps.
            "masters": held.masters * size,
            # Gradients when all of a step's are reduced.
            "gradients": held.gradients * size,
            # The optimizer's states, such as momentum.
            "optimizer": state_elements * size,
            # Running statistics and the like.
            "buffers": model.buffer_bytes,
        },
        phases=[
            Phase(activations, {cause: elements * size for cause, elements in transient.items() if elements})
            for activations, transient in (*held.phases, exchange)
        ],
        not_cast=2 * held.not_cast,
    )


def coupling_phase(plan: RunPlan, element_bytes: int) -> Phase | None:
    """The moment at which a process has the features of the global batch, if the loss couples it: these, their
    gradient, a copy that is reduced, and a tile of pairs with its gradient."""
    if not plan.coupled_features:
        return None
    features = plan.coupled_numbers * element_bytes
    kept = float(plan.encodes_once(plan.max_gradient_accumulation_steps))
    pairs = min(plan.max_global_batch_size**2, PAIRS_PER_TILE) * NUMBERS_PER_PAIR * element_bytes
    return Phase(kept, {"features of the global batch": 3 * features, "pairs of samples": pairs})


def when_reduced(model: ModelShape, strategy: Strategy, plan: RunPlan, gpu_memory: int | None) -> Policy:
    """Decide when gradients are reduced.

    The recipe's `compute.reduce_gradients` decides. If it is "auto", hsdp reduces with each micro-batch, because it
    does so within a node. fsdp reduces with the last, which sends less, if model states and transient memory then take
    at most `MAX_FRACTION_OF_GPU` of the GPU, and otherwise with each. The other strategies have one policy each.

    Args:
        model: The shapes of the model.
        strategy: How processes share the model, as if gradients were reduced with the last micro-batch.
        plan: The plan, which has the number of processes and the largest number of micro-batches in a step.
        gpu_memory: Memory of the smallest GPU in bytes; None without GPUs, where whole gradients are taken to fit.
    """
    asked = plan.compute.reduce_gradients
    if asked != "auto":
        return asked
    preferred, *others = strategy.entry.reduction_policies
    if not others or preferred == "each_micro_batch" or gpu_memory is None:
        return preferred
    peak, _ = model_states(model, strategy, plan).peak()
    return preferred if peak <= MAX_FRACTION_OF_GPU * gpu_memory else others[0]


class Elements(NamedTuple):
    """Elements on the fullest process, as in `ModelStates`, and the shapes of the tensors that its optimizer steps."""

    weights: int
    masters: int
    gradients: int
    stepped: Sequence[tuple[Shape, int]]  # with the number of the parameter group
    phases: Sequence[Phase]  # with transient elements instead of bytes
    in_bf16: int = 0  # those of `weights` that are stored in bf16
    not_cast: int = 0  # those that autocast makes no copies of


Formula = Callable[[ModelShape, Strategy, int, bool], Elements]
"""From a model, a strategy, the number of processes, and whether a step has several micro-batches."""


def replicated(model: ModelShape, _strategy: Strategy, _world_size: int, _accumulates: bool) -> Elements:
    """Count them where every process has everything; micro-batches are summed in the buckets that are reduced."""
    stepped = [(each.shape, each.group or 0) for each in model.trained]
    in_bf16 = elements_of(parameter for parameter in model.parameters if parameter.stored_in_bf16)
    return Elements(model.elements, 0, model.trained_elements, stepped, [Phase(1.0, {})], in_bf16)


def sharded(model: ModelShape, strategy: Strategy, world_size: int, accumulates: bool) -> Elements:
    """Count them where each process has rows of each parameter."""
    shards = strategy.shards_of(world_size)
    units: Counter[int] = Counter()
    reduced: Counter[int] = Counter()
    for parameter in model.parameters:
        # Counted in elements as large as the weights.
        gathered_bytes = parameter.padded_rows(shards) * parameter.gathered_bytes(model.element_bytes)
        units[parameter.unit] += -(-gathered_bytes // model.element_bytes)
        if parameter.group is not None:
            reduced[parameter.unit] += parameter.padded_rows(shards)
    kept = {unit for unit in units if unit in model.gathered_units or not strategy.reshards}
    freed = sorted((size for unit, size in units.items() if unit not in kept), reverse=True)
    stepped = [(each.largest_shard(shards), each.group or 0) for each in model.trained]
    gradients = sum(prod(shape) for shape, _ in stepped)
    keeps_whole = accumulates and not strategy.reduces_each
    transient = {
        # Whole gradients, each until its shard takes its place in the last micro-batch.
        "accumulated gradients": model.trained_elements - gradients if keeps_whole else 0,
        "gathered until the backward pass": sum(units[unit] for unit in kept),
        # The block in use, and the next one.
        "gathered blocks": sum(freed[:2]),
        # The gradients of a block that are computed, and those of one that are reduced.
        "blocks' gradients": 2 * max(reduced.values()),
    }
    weights = sum(parameter.padded_rows(shards) for parameter in model.parameters) // shards
    in_bf16 = sum(parameter.padded_rows(shards) for parameter in model.parameters if parameter.stored_in_bf16) // shards
    # Autocast makes no copies of weights that are stored in bf16.
    cast = [each for each in model.parameters if each.in_bf16 and not each.stored_in_bf16 and each.unit not in kept]
    return Elements(weights, 0, gradients, stepped, [Phase(1.0, transient)], in_bf16, elements_of(cast))


def zero12(model: ModelShape, strategy: Strategy, world_size: int, accumulates: bool) -> Elements:
    """Count them where each process has whole weights, and a part of each group's flat buffer of masters."""
    zero = strategy.zero
    groups = [padded(elements_of(group), 2 * world_size) for group in model.groups]
    trained = model.trained_elements
    gradients = _gradients_of_partitions(model, world_size)
    # Buckets have their full size, however small the model is.
    buckets = {"reduce buckets": (2 if zero.overlap_comm else 1) * zero.reduce_bucket_size}
    largest = max((parameter.elements for parameter in model.trained), default=0)
    if largest > zero.reduce_bucket_size:
        # It is not copied into a bucket, but reduced where it is.
        buckets["gradient larger than a bucket"] = largest
    # What accumulated gradients take besides `gradients`: at first, and when the first bucket is full, after as large a
    # share of the backward pass. Then `gradients` are allocated for the whole part of the process.
    at_first = 0
    later = 0
    if accumulates and zero.stage == 1:
        # The parameters have gradients of their own until the last micro-batch.
        at_first = trained - gradients
        later = trained
    elif accumulates:
        later = gradients
    phases = [
        Phase(1.0, buckets | {"accumulated gradients": at_first}),
        Phase(1 - min(1, zero.reduce_bucket_size / trained), buckets | {"accumulated gradients": later}),
        Phase(0.0, buckets | {"update's copy of gradients": max(groups) // world_size}),
    ]
    frozen = model.elements - trained
    masters = [group // world_size for group in groups]
    stepped = [((part,), number) for number, part in enumerate(masters)]
    return Elements(sum(groups) + frozen, sum(masters), gradients, stepped, phases)


def exchanged(model: ModelShape, strategy: Strategy, world_size: int) -> int:
    """Elements of the copies that an optimizer makes of layers which it puts together on one process each (Muon's)."""
    layers = max(model.exchanged, key=elements_of, default=None)
    if layers is None:
        return 0
    is_whole = strategy.entry.steps == "whole parameters"
    own = max(elements_of(layers) // strategy.shards_of(world_size), max(layer.elements for layer in layers))
    # What is sent and received, or the layers that a process owns, their results, and four copies of them meanwhile.
    return max((2 * elements_of(layers) if is_whole else 2 * own) + own, 6 * own)


def _gradients_of_partitions(model: ModelShape, world_size: int) -> int:
    """Elements of gradients on the fullest process: those of all parameters that it steps a part of, and padding."""
    held = [0] * world_size
    for group in model.groups:
        size = padded(elements_of(group), 2 * world_size) // world_size
        offset = 0
        for parameter in group:
            end = offset + parameter.elements
            for process in range(offset // size, -(-end // size)):
                held[process] += parameter.elements
            offset = end
        for process in range(offset // size, world_size):
            held[process] += min(size, (process + 1) * size - offset)
    return max(held)


def zero3(model: ModelShape, strategy: Strategy, world_size: int, _accumulates: bool) -> Elements:
    """Count them where each process has a part of each parameter."""
    zero = strategy.zero

    def whole(parameters: Iterable[ParameterShape]) -> list[int]:
        return [padded(parameter.elements, world_size) for parameter in parameters]

    parts = [sum(whole(group)) // world_size for group in model.groups]
    trained = sum(parts)
    threshold = zero.stage3_param_persistence_threshold
    small = whole(each for each in model.parameters if each.elements <= threshold)
    large = whole(each for each in model.parameters if each.elements > threshold)
    # Weights that are used again within the distance stay; the next ones are fetched.
    reach = zero.stage3_max_reuse_distance + zero.stage3_prefetch_bucket_size + max(large, default=0)
    # The bucket is always allocated; gradients are copied into it.
    bucket = {"reduce bucket": zero.reduce_bucket_size}
    passes = {
        "gathered weights": min(sum(large), reach) if world_size > 1 else 0,
        "whole gradients": min(trained * world_size, zero.reduce_bucket_size),
    }
    update = {"update's copy of gradients": min(trained, -(-zero.sub_group_size // world_size))}
    phases = [Phase(1.0, bucket | passes), Phase(0.0, bucket | update)]
    # A single process has nothing to gather.
    gathered = sum(small) if world_size > 1 else 0
    weights = (sum(small) + sum(large)) // world_size + gathered
    return Elements(weights, trained, trained, [((part,), number) for number, part in enumerate(parts)], phases)
