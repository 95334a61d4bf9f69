"""Which process puts together and steps which layer, for optimizers that need whole layers."""

from collections.abc import Mapping
from math import prod

from largebatch.config.optimizers import Shape


def layer_owners(shapes: Mapping[str, Shape], count: int) -> dict[str, int]:
    """A process for each layer: the largest layer first, to the one that has the least work.

    Args:
        shapes: The shapes of layers that are stepped together, by name, in the same order on every process.
        count: The number of processes.
    """
    work = {name: prod(shape) * min(shape[0], prod(shape[1:])) for name, shape in shapes.items()}
    load = [0] * count
    owners = {}
    for name in sorted(shapes, key=lambda name: -work[name]):
        owners[name] = load.index(min(load))
        load[owners[name]] += work[name]
    return owners
