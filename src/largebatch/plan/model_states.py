"""The bytes of weights, gradients and optimizer states that the fullest process holds under each strategy.

`held` is exact: what the tensors of a running job come to before an optimizer's update (tests/plan/test_model_states.py
counts them). `beside` is what comes and goes within a step, each with its reason: about that much, and not all at once.
Left out of both are activations, an optimizer's single numbers (the steps it counts for each tensor), the temporary
tensors of its arithmetic, and what an allocator rounds up (512 bytes a tensor on NVIDIA GPUs).

Weights stay in fp32, also under bf16 autocast, so an element is 4 bytes everywhere (8 in fp64).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from largebatch.plan.contract import RunPlan
from largebatch.plan.model_shape import ModelShape, ParameterShape, Strategy, ZeroSettings, padded


@dataclass(frozen=True)
class ModelStates:
    """Bytes on the process that holds most.

    Args:
        weights: What passes compute with, trained or not, between passes.
        masters: DeepSpeed's copies of this process's part, which the optimizer steps.
        gradients: When all of a step's are reduced.
        optimizer: Momentum, or Adam's two moments.
        buffers: Running statistics and the like.
        beside: What is held for a while within a step besides, about, by reason.
    """

    weights: int
    masters: int
    gradients: int
    optimizer: int
    buffers: int
    beside: Mapping[str, int]

    @property
    def held(self) -> int:
        """Everything but `beside`."""
        return self.weights + self.masters + self.gradients + self.optimizer + self.buffers

    @property
    def with_beside(self) -> int:
        """With all of `beside` at once."""
        return self.held + sum(self.beside.values())


def optimizer_states(plan: RunPlan) -> int:
    """Numbers that the plan's optimizer keeps for each weight."""
    if plan.optimizer in ("adamw", "lamb"):
        return 2
    return 1 if plan.optimizer_options["momentum"] else 0


def model_states(
    model: ModelShape, strategy: Strategy, world_size: int, states_per_weight: int, micro_batches: int
) -> ModelStates:
    """What the fullest process holds.

    Args:
        model: The model.
        strategy: How it is shared.
        world_size: Processes.
        states_per_weight: `optimizer_states`.
        micro_batches: Of each process in an optimizer step.
    """
    accumulates = micro_batches > 1
    if strategy.zero is None:
        count = _fsdp if strategy.name == "fsdp" else _ddp
        weights, gradients, beside = count(model, strategy, world_size, accumulates)
        masters, optimized = 0, gradients
    else:
        count_zero = _zero3 if strategy.zero.stage == 3 else _zero12
        weights, masters, gradients, beside = count_zero(model, strategy.zero, world_size, accumulates)
        optimized = masters
    size = model.element_bytes
    return ModelStates(
        weights=weights * size,
        masters=masters * size,
        gradients=gradients * size,
        optimizer=optimized * states_per_weight * size,
        buffers=model.buffer_bytes,
        beside={reason: elements * size for reason, elements in beside.items() if elements},
    )


def _ddp(model: ModelShape, _: Strategy, world_size: int, accumulates: bool) -> tuple[int, int, dict[str, int]]:
    trained = _elements(model.trained)
    # Gradients are views of the buckets only once they are reduced; one process has none.
    own = trained if accumulates and world_size > 1 else 0
    return model.elements, trained, {"gradients of micro-batches": own}


def _fsdp(model: ModelShape, strategy: Strategy, world_size: int, accumulates: bool) -> tuple[int, int, dict[str, int]]:
    def rows(parameters: tuple[ParameterShape, ...]) -> int:
        # The first process has a row of each parameter for every multiple of the processes that is begun.
        return sum(parameter.padded_rows(world_size) // world_size for parameter in parameters)

    units: dict[int, int] = {}
    for parameter in model.parameters:
        units[parameter.unit] = units.get(parameter.unit, 0) + parameter.padded_rows(world_size)
    stay = {unit for unit in units if unit in model.gathered_units or not strategy.reshards}
    others = sorted((size for unit, size in units.items() if unit not in stay), reverse=True)
    reduced: Counter[int] = Counter()
    for parameter in model.trained:
        reduced[parameter.unit] += parameter.padded_rows(world_size)
    beside = {
        # Whole ones, until the last micro-batch.
        "gradients of micro-batches": _elements(model.trained) if accumulates else 0,
        "gathered until the backward pass": sum(units[unit] for unit in stay),
        # One in use, and the next.
        "gathered blocks": sum(others[:2]),
        # One that is computed, and one that is reduced.
        "blocks' gradients": 2 * max(reduced.values()),
    }
    return rows(model.parameters), rows(model.trained), beside


def _zero12(
    model: ModelShape, zero: ZeroSettings, world_size: int, accumulates: bool
) -> tuple[int, int, int, dict[str, int]]:
    groups = [padded(_elements(group), 2 * world_size) for group in model.groups]
    trained = _elements(model.trained)
    gradients = _gradients_of_partitions(model, world_size)
    # In stage 1 they are the parameters' own until the last micro-batch.
    accumulated = gradients if zero.stage == 2 else trained
    # They have their whole size, however small the model is.
    buckets = (2 if zero.overlap_comm else 1) * zero.reduce_bucket_size
    beside = {
        "gradients of micro-batches": accumulated if accumulates else 0,
        "reduce buckets": buckets,
        "update's copy of gradients": max(groups) // world_size,
    }
    frozen = model.elements - trained
    return sum(groups) + frozen, sum(groups) // world_size, gradients, beside


def _gradients_of_partitions(model: ModelShape, world_size: int) -> int:
    """Elements of gradients on the fullest process: whole ones of all that it steps a part of, and its padding."""
    changes: Counter[int] = Counter()

    def keep(first: int, end: int, elements: int) -> None:
        changes[first] += elements
        changes[end] -= elements

    for group in model.groups:
        elements = _elements(group)
        size = padded(elements, 2 * world_size) // world_size
        offset = 0
        for parameter in group:
            keep(offset // size, -(-(offset + parameter.elements) // size), parameter.elements)
            offset += parameter.elements
        full = -(-elements // size)
        keep(elements // size, full, full * size - elements)
        keep(full, world_size, size)
    return max(accumulate(change for _, change in sorted(changes.items())))


def _zero3(model: ModelShape, zero: ZeroSettings, world_size: int, _: bool) -> tuple[int, int, int, dict[str, int]]:
    def part(parameter: ParameterShape) -> int:
        return padded(parameter.elements, world_size) // world_size

    trained = sum(part(parameter) for parameter in model.trained)
    small: list[int] = []
    large: list[int] = []
    for parameter in model.parameters:
        is_small = parameter.elements <= zero.stage3_param_persistence_threshold
        (small if is_small else large).append(padded(parameter.elements, world_size))
    # What is used again within the distance stays; what comes next is fetched.
    reach = zero.stage3_max_reuse_distance + zero.stage3_prefetch_bucket_size + max(large, default=0)
    beside = {
        "gathered weights": min(sum(large), reach) if world_size > 1 else 0,
        # The bucket is there all the time, full or not; gradients come to be put into it.
        "reduce bucket": zero.reduce_bucket_size,
        "whole gradients": min(
            sum(padded(parameter.elements, world_size) for parameter in model.trained), zero.reduce_bucket_size
        ),
        "update's copy of gradients": min(trained, -(-zero.sub_group_size // world_size)),
    }
    # One process has nothing to gather.
    gathered = sum(small) if world_size > 1 else 0
    return sum(part(parameter) for parameter in model.parameters) + gathered, trained, trained, beside


def _elements(parameters: tuple[ParameterShape, ...] | list[ParameterShape]) -> int:
    return sum(parameter.elements for parameter in parameters)
