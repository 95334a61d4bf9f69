"""What the memory and the traffic of a strategy depend on: a model's shapes, and the settings of the engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Self


@dataclass(frozen=True)
class ParameterShape:
    """A parameter of a model.

    Args:
        name: In the model, the first where it has several.
        shape: Its sizes.
        group: The optimizer's parameter group that it is in; None where it is frozen.
        unit: The unit that FSDP2 shards and gathers it with.
        modules: How many modules have it as theirs.
    """

    name: str
    shape: tuple[int, ...]
    group: int | None
    unit: int
    modules: int = 1

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)

    def padded_rows(self, processes: int) -> int:
        """Elements with as many rows as the next multiple of the processes."""
        return processes * prod(self.largest_shard(processes))

    def largest_shard(self, processes: int) -> tuple[int, ...]:
        """The shape of the first process's rows: it has one for every multiple of the processes that is begun."""
        rows, *rest = self.shape or (1,)
        return (padded(rows, processes) // processes, *rest)


@dataclass(frozen=True)
class ModelShape:
    """A model.

    Args:
        parameters: In the order of the model.
        gathered_units: The units of FSDP2 that stay gathered from the forward to the backward pass.
        buffer_bytes: Of what is not trained, such as running statistics; every process has all of it.
        element_bytes: Of a weight, a gradient and each number of an optimizer's state.
    """

    parameters: tuple[ParameterShape, ...]
    gathered_units: frozenset[int]
    buffer_bytes: int
    element_bytes: int

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(parameter.elements for parameter in self.parameters)

    @property
    def trained(self) -> tuple[ParameterShape, ...]:
        """The parameters that get a gradient."""
        return tuple(parameter for parameter in self.parameters if parameter.group is not None)

    @property
    def groups(self) -> list[list[ParameterShape]]:
        """The trained parameters of each of the optimizer's groups."""
        numbers = sorted({parameter.group for parameter in self.trained if parameter.group is not None})
        return [[parameter for parameter in self.trained if parameter.group == number] for number in numbers]


@dataclass(frozen=True)
class ZeroSettings:
    """What a DeepSpeed JSON says of memory and traffic, in elements; defaults are those of DeepSpeed 0.19.8."""

    stage: int
    reduce_bucket_size: int = 500_000_000
    overlap_comm: bool = False
    use_multi_rank_bucket_allreduce: bool = True
    sub_group_size: int = 1_000_000_000
    stage3_param_persistence_threshold: int = 100_000
    stage3_max_reuse_distance: int = 1_000_000_000
    stage3_prefetch_bucket_size: int = 50_000_000

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """From a DeepSpeed JSON's "zero_optimization"."""
        zero: dict[str, Any] = {"overlap_comm": config["stage"] == 3} | dict(config)
        given = {name: zero[name] for name in cls.__dataclass_fields__ if zero.get(name) is not None}
        # A file may write 5e8.
        given = {name: int(value) if isinstance(value, float) else value for name, value in given.items()}
        return cls(**given)


@dataclass(frozen=True)
class Strategy:
    """How the processes share a model.

    Args:
        name: In the table of `plan.strategies`.
        zero: DeepSpeed's settings, for its strategies.
        reshards: Whether FSDP2 gathers its units anew for the backward pass.
    """

    name: str
    zero: ZeroSettings | None = None
    reshards: bool = True


def padded(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple
