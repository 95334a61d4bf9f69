"""Whole layers, each put together on one process from the parts that others hold, and taken apart again."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from largebatch.config.optimizers import Shape
from largebatch.plan.layer_owners import layer_owners


class LayerPart(NamedTuple):
    """A part of a layer in a tensor that the optimizer steps; positions count elements in row-major order."""

    name: str  # the parameter that is the layer
    start: int  # position of the part in the whole parameter
    offset: int  # position of the part in the process's tensor
    length: int  # number of elements; 0 if the process has none of the layer


@dataclass(frozen=True)
class LayerProcesses:
    """The processes that hold all parts of the layers between them."""

    rank: int  # of this process among them
    held: Sequence[Sequence[Sequence[LayerPart]]]  # for each, the parts in each of its tensors, in the same order
    sum: Callable[[torch.Tensor], torch.Tensor]  # of a vector over them, where they hold different parts
    # Sends the n-th list of vectors to the n-th process, all in one call; returns what each has sent to this one, given
    # the numbers of elements. An empty vector has the dtype and device of the others.
    exchange: Callable[[Sequence[list[torch.Tensor]], list[int], torch.Tensor], Sequence[torch.Tensor]]


class WholeLayers:
    """Layers that are stepped together. Each is owned by a process, and all owners have about the same work.

    Args:
        tensors: The numbers of the tensors, among those of each process, that have parts of the layers.
        shapes: The shapes of all layers, by name, in the same order on every process.
        processes: Those that hold them: a part each, or all of each.
        empty: A vector without elements, of the dtype and device of the others.
    """

    def __init__(
        self, tensors: Sequence[int], shapes: Mapping[str, Shape], processes: LayerProcesses, empty: torch.Tensor
    ):
        self._shapes = shapes
        self._empty = empty
        self._exchange = processes.exchange
        mine = processes.rank
        ranks = range(len(processes.held))
        parts = [[part for number in tensors for part in held[number] if part.length] for held in processes.held]
        stepped = {part.name for some in parts for part in some}
        owners = layer_owners({name: shape for name, shape in shapes.items() if name in stepped}, len(ranks))

        def held(holder: int, owner: int) -> list[LayerPart]:
            """What a process holds of this owner's layers."""
            return [part for part in parts[holder] if owners[part.name] == owner]

        def needed(holder: int, owner: int) -> list[LayerPart]:
            """What of that is sent: an owner that has a whole layer gets nothing of it from other processes."""
            if holder == owner:
                return held(holder, owner)
            whole = {each.name for each in held(owner, owner) if each.length == prod(shapes[each.name])}
            return [each for each in held(holder, owner) if each.name not in whole]

        # For each process, to gather layers and to scatter them.
        self._to_owners = [needed(mine, owner) for owner in ranks]
        self._from_holders = [needed(holder, mine) for holder in ranks]
        self._to_holders = [held(holder, mine) for holder in ranks]
        self._from_owners = [held(mine, owner) for owner in ranks]

    def gather(self, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The whole layers that this process owns; every process gives the parts that it holds."""
        vectors = [[parts[each.name].reshape(-1) for each in ranges] for ranges in self._to_owners]
        pieces: dict[str, dict[int, torch.Tensor]] = {}
        for each, piece in self._exchanged(vectors, self._from_holders):
            pieces.setdefault(each.name, {})[each.start] = piece
        return {
            name: torch.cat([found[start] for start in sorted(found)]).view(self._shapes[name])
            for name, found in pieces.items()
        }

    def scatter(self, layers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parts of all layers that this process holds, as vectors; every process gives the layers that it owns."""
        vectors = [
            [layers[each.name].reshape(-1).narrow(0, each.start, each.length) for each in ranges]
            for ranges in self._to_holders
        ]
        return {each.name: part for each, part in self._exchanged(vectors, self._from_owners)}

    def _exchanged(
        self, sent: Sequence[list[torch.Tensor]], expected: Sequence[list[LayerPart]]
    ) -> Iterator[tuple[LayerPart, torch.Tensor]]:
        """Send vectors to each process, and take apart what each has sent."""
        lengths = [[each.length for each in ranges] for ranges in expected]
        received = self._exchange(sent, [sum(each) for each in lengths], self._empty)
        for ranges, vector, sizes in zip(expected, received, lengths, strict=True):
            yield from zip(ranges, torch.split_with_sizes(vector, sizes), strict=True)
