"""The shapes of a model and the settings of an engine, which memory and traffic depend on."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import pydantic
from pydantic import NonNegativeInt

from largebatch.config.optimizers import GroupOptions, Shape
from largebatch.plan.strategies import StrategyEntry, find_strategy


@dataclass(frozen=True)
class ParameterShape:
    """A parameter of a model."""

    name: str  # its name in the model; the first if it has several
    shape: Shape
    group: int | None  # number of its parameter group in the optimizer; None if it is frozen
    unit: int  # number of the unit that FSDP2 shards and gathers it with
    modules: int = 1  # number of modules that share it
    in_bf16: bool = False  # whether FSDP2 gathers it in bf16, because every use casts it to that
    stored_in_bf16: bool = False  # whether it is also stored in bf16, because it is not trained

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return prod(self.shape)

    def gathered_bytes(self, element_bytes: int) -> int:
        """Bytes of an element when FSDP2 gathers it, in a model whose weights have `element_bytes`."""
        return 2 if self.in_bf16 else element_bytes

    def padded_rows(self, processes: int) -> int:
        """Elements after padding its rows to a multiple of the processes."""
        return processes * prod(self.largest_shard(processes))

    def largest_shard(self, processes: int) -> Shape:
        """The shape of the first process's rows, which are as many as any process has."""
        rows, *rest = self.shape or (1,)
        return (padded(rows, processes) // processes, *rest)


@dataclass(frozen=True)
class ModelShape:
    """A model."""

    parameters: tuple[ParameterShape, ...]  # in the order of the model
    gathered_units: frozenset[int]  # the units of FSDP2 that stay gathered from the forward to the backward pass
    buffer_bytes: int  # bytes of buffers and of copies of running statistics; every process has all of them
    element_bytes: int  # bytes of a weight, of a gradient and of each number of an optimizer's state
    group_options: tuple[GroupOptions, ...] = ({},)  # of each of the optimizer's parameter groups
    exchanged_groups: frozenset[int] = frozenset()  # those whose layers the optimizer puts together

    @property
    def elements(self) -> int:
        """Elements of all parameters."""
        return elements_of(self.parameters)

    @property
    def trained(self) -> tuple[ParameterShape, ...]:
        """The parameters that get a gradient."""
        return tuple(parameter for parameter in self.parameters if parameter.group is not None)

    @property
    def trained_elements(self) -> int:
        """Elements of the parameters that get a gradient."""
        return elements_of(self.trained)

    @property
    def groups(self) -> list[list[ParameterShape]]:
        """The trained parameters of each of the optimizer's groups."""
        numbers = range(len(self.group_options))
        return [[parameter for parameter in self.parameters if parameter.group == number] for number in numbers]

    @property
    def exchanged(self) -> list[list[ParameterShape]]:
        """The groups whose layers the optimizer puts together on one process each."""
        return [self.groups[number] for number in sorted(self.exchanged_groups)]


@pydantic.dataclasses.dataclass(frozen=True)
class ZeroSettings:
    """Settings of a DeepSpeed JSON that decide memory and traffic; sizes in elements, defaults of DeepSpeed 0.19.8."""

    stage: int
    reduce_bucket_size: NonNegativeInt = 500_000_000
    overlap_comm: bool = False
    use_multi_rank_bucket_allreduce: bool = True
    sub_group_size: NonNegativeInt = 1_000_000_000
    stage3_param_persistence_threshold: NonNegativeInt = 100_000
    stage3_max_reuse_distance: NonNegativeInt = 1_000_000_000
    stage3_prefetch_bucket_size: NonNegativeInt = 50_000_000

    # With any other value of these, the counts would be wrong.
    offload_optimizer: None = None
    offload_param: None = None
    round_robin_gradients: Literal[False] = False
    contiguous_gradients: Literal[True] = True
    reduce_scatter: Literal[True] = True

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "ZeroSettings":
        """The settings in "zero_optimization" of a DeepSpeed JSON.

        Raises:
            pydantic.ValidationError: With one of them, memory and traffic cannot be counted.
        """
        given = {name: value for name, value in config.items() if value is not None}
        return cls(**{"overlap_comm": config["stage"] == 3} | given)


NO_ZERO = ZeroSettings(stage=0)


@dataclass(frozen=True)
class Strategy:
    """How the processes share a model."""

    name: str  # name in the table of `plan.strategies`
    zero: ZeroSettings = NO_ZERO  # settings of DeepSpeed, for its strategies
    reshards: bool = True  # whether FSDP2 gathers its units again for the backward pass
    shard_size: int | None = None  # processes that FSDP2 divides a replica of the model over; None means all
    reduces_each: bool = False  # whether FSDP2 reduces gradients with each micro-batch, not only with the last

    @property
    def entry(self) -> StrategyEntry:
        """What is declared about it in the table."""
        return find_strategy(self.name)

    def shards_of(self, world_size: int) -> int:
        """The number of processes that hold a part each of one copy of the model; all, if each holds a whole one."""
        return self.shard_size or world_size


def elements_of(parameters: Iterable[ParameterShape]) -> int:
    """The number of the parameters' elements."""
    return sum(parameter.elements for parameter in parameters)


def padded(size: int, multiple: int) -> int:
    """The smallest multiple that is not below the size."""
    return -(-size // multiple) * multiple
