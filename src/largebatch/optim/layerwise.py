"""Optimizers whose update of a layer depends on the whole layer, however strategies shard it."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from largebatch.config.optimizers import Shape
from largebatch.optim.whole_layers import LayerPart, LayerProcesses, WholeLayers

TrustRatio = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps the norms of the layers' weights and of their gradients or updates, each of shape (layers,), to their ratios."""

BLOCK = 1024  # elements of a block in the buffer of `PartsOfLayers`


Group = dict[str, Any]
"""A parameter group of an optimizer: its tensors, "params", and their options."""


@dataclass(frozen=True)
class Layers:
    """The layers of which an optimizer steps parts."""

    # The parts in each tensor that the optimizer steps on this process; the rest of it is padding.
    parts: Mapping[torch.Tensor, Sequence[LayerPart]]
    shapes: Mapping[str, Shape]  # of all layers, in the same order on every process
    processes: LayerProcesses  # those that hold the layers between them

    @classmethod
    def whole(cls, tensors: Sequence[torch.Tensor]) -> "Layers":
        """Tensors of this process alone, each of which is a whole layer."""
        parts = {}
        shapes = {}
        for number, tensor in enumerate(tensors):
            name = str(number)
            local = local_part(tensor)
            parts[tensor] = [LayerPart(name, 0, 0, local.numel())]
            shapes[name] = tuple(local.shape)
        alone = LayerProcesses(
            rank=0,
            held=[[*parts.values()]],
            sum=lambda vector: vector,
            exchange=lambda sent, _, empty: [torch.cat([empty, *sent[0]])],
        )
        return cls(parts, shapes, alone)


class PartsOfLayers:
    """The parts of layers, except empty ones, in tensors that are stepped together, as lists for `torch._foreach_*`.

    Their updates share a buffer, in which each starts a new block. So the layers' trust ratios, on the device, scale
    all updates by one multiplication, with one ratio per block. A ratio per element would need more buffers of this
    size, and CUDA takes a list of 0-dimensional ratios one by one: a fast `_foreach_mul_` needs lists of equal shapes
    (`check_fast_path_restrictions` in ATen/native/ForeachUtils.h).

    What is copied to the device is copied once, when this is made, because the host waits for such copies.

    Args:
        tensors: The tensors, at least one.
        layers: The layers.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], layers: Layers):
        self.tensors = tensors
        self.layers = layers
        self.tensor_of_part: list[torch.Tensor] = []
        self.names: list[str] = []
        # Of each tensor: the sizes of its parts and of the gaps around them, in turn.
        self._sizes: list[list[int]] = []
        for tensor in tensors:
            found = [part for part in layers.parts[tensor] if part.length]
            self.tensor_of_part += [tensor] * len(found)
            self.names += [part.name for part in found]
            gaps_and_parts = []
            end = 0
            for each in found:
                gaps_and_parts += [each.offset - end, each.length]
                end = each.offset + each.length
            self._sizes.append([*gaps_and_parts, local_part(tensor).numel() - end])

        self._places: list[tuple[torch.Size, tuple[int, ...], int]] = []
        blocks: list[int] = []
        for part in self.split(tensors):
            # Has the strides of the part, unless that has gaps in memory.
            like = torch.empty_like(part, device="meta")
            self._places.append((like.shape, like.stride(), sum(blocks) * BLOCK))
            blocks.append(ceil(like.numel() / BLOCK))

        numbers = {name: number for number, name in enumerate(layers.shapes)}
        layer_of_part = torch.tensor([numbers[name] for name in self.names], dtype=torch.int64)
        layer_of_block = layer_of_part.repeat_interleave(torch.tensor(blocks, dtype=torch.int64))
        self._layer_of_part = layer_of_part.to(tensors[0].device)
        self._layer_of_block = layer_of_block.to(tensors[0].device)

    def split(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Views of the parts in tensors of the same layout, such as gradients or states."""
        views: list[torch.Tensor] = []
        for tensor, sizes in zip(tensors, self._sizes, strict=True):
            local = local_part(tensor)
            if sizes == [0, local.numel(), 0]:
                # A whole parameter need not be in row-major order in memory.
                views.append(local)
            else:
                gaps_and_parts = torch.split_with_sizes(local.detach().view(-1), sizes)
                views += gaps_and_parts[1::2]
        return views

    def gradients(self) -> list[torch.Tensor]:
        """The parts of the tensors' gradients."""
        return self.split([tensor.grad for tensor in self.tensors if tensor.grad is not None])

    def states(self, states: Mapping[torch.Tensor, dict[str, Any]], name: str) -> list[torch.Tensor]:
        """The parts of one of the tensors' states in an optimizer, which begins as zeros."""
        for tensor in self.tensors:
            if name not in states[tensor]:
                states[tensor][name] = torch.zeros_like(tensor)
        return self.split([states[tensor][name] for tensor in self.tensors])

    def new_updates(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A buffer of shape (blocks, BLOCK), uninitialized, and a view of it for each part, of the part's layout."""
        buffer = local_part(self.tensors[0]).new_empty(len(self._layer_of_block), BLOCK)
        return buffer, [buffer.as_strided(*place) for place in self._places]

    def sums_of_squares(self, weights: list[torch.Tensor], updates: list[torch.Tensor]) -> torch.Tensor:
        """The sums of squares per layer, for lists of one tensor per part: shape (2, layers), in float64."""
        squares = torch.zeros(2, len(self.layers.shapes), dtype=torch.float64, device=self._layer_of_part.device)
        if self.tensor_of_part:
            norms = torch.stack(torch._foreach_norm([*weights, *updates]))
            squares.index_add_(1, self._layer_of_part, norms.view(2, -1).double().square())
        return squares

    @cached_property
    def whole_layers(self) -> WholeLayers:
        """The layers in these tensors, and in those that other processes step at the same time."""
        layers = self.layers
        together = set(self.tensors)
        numbers = [number for number, tensor in enumerate(layers.parts) if tensor in together]
        return WholeLayers(numbers, layers.shapes, layers.processes, local_part(self.tensors[0]).new_empty(0))

    def scale(self, buffer: torch.Tensor, ratios: torch.Tensor) -> None:
        """Multiply the updates in a buffer by the ratios of their layers, of shape (layers,)."""
        buffer.mul_(ratios.to(buffer.dtype)[self._layer_of_block].unsqueeze(1))


class LayerwiseOptimizer(Optimizer):
    """An optimizer whose update of a layer depends on the whole layer: on two of its norms, or on all of its elements.

    A layer is a parameter. Those in groups with `"layerwise": False` are stepped element by element: their trust ratio
    is 1. Until `set_layers` is called, each tensor counts as a whole layer.

    Args:
        params: Tensors, or parameter groups.
        options: The learning rate, `lr`, and those of the optimizer's section in `config.optimizers`, for all groups
            that do not have their own.
    """

    def __init__(self, params: Any, **options: Any):
        super().__init__(params, {"layerwise": True} | options)
        self._layers: Layers | None = None
        self._stepped_together: dict[tuple[torch.Tensor, ...], PartsOfLayers] = {}

    def set_layers(self, layers: Layers) -> None:
        """Set the layers of which the tensors of this process hold parts; to be called before the first step.

        The processes are asked for each parameter group that is not stepped element by element, so every one of them
        must take the same steps.
        """
        self._layers = layers
        self._stepped_together.clear()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step with the gradients that exist."""
        assert closure is None
        for group in self.param_groups:
            tensors = [tensor for tensor in group["params"] if tensor.grad is not None]
            # On all processes alike: ZeRO-3 steps some tensors of one group at a time, and empties the other groups.
            if not tensors:
                continue
            key = tuple(tensors)
            parts = self._stepped_together.get(key)
            if parts is None:
                parts = PartsOfLayers(tensors, self._layers or Layers.whole(tensors))
                self._stepped_together[key] = parts
            self._step_group(group, parts)

    @abstractmethod
    def _step_group(self, group: Group, parts: PartsOfLayers) -> None:
        """Step those tensors of a parameter group that have gradients, without changing the gradients.

        There may be no parts of layers in them, while other processes have some.
        """

    def _trust_ratios(
        self, parts: PartsOfLayers, weights: list[torch.Tensor], updates: list[torch.Tensor], trust_ratio: TrustRatio
    ) -> torch.Tensor:
        """The trust ratios of all layers, of shape (layers,); 1 if one of the layer's norms is zero."""
        squares = parts.layers.processes.sum(parts.sums_of_squares(weights, updates))
        weight_norms, norms = squares.sqrt()
        return torch.where((weight_norms > 0) & (norms > 0), trust_ratio(weight_norms, norms), 1.0)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
