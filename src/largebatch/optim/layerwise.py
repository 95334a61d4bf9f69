"""Optimizers whose update of a layer depends on norms of the whole layer, however strategies shard it."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

TrustRatio = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LayerPart:
    """A part of a layer in a tensor that the optimizer steps; positions count elements in row-major order.

    Args:
        name: The parameter that is the layer.
        start: Position of the part in the whole parameter.
        offset: Position of the part in this process's tensor.
        length: Number of elements; 0 if this process has none of the layer.
    """

    name: str
    start: int
    offset: int
    length: int


class LayerwiseOptimizer(Optimizer):
    """An optimizer that multiplies the update of each layer by a trust ratio, a function of two norms of the layer.

    A layer is a parameter. Parameters in groups with `"layerwise": False` are not adapted: their ratio is 1.
    Until `locate` is called, each tensor counts as a whole layer.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]):
        super().__init__(params, defaults | {"layerwise": True})
        self._parts: Mapping[torch.Tensor, Sequence[LayerPart]] | None = None
        self._numbers: dict[str, int] = {}
        self._sum_over_processes: Callable[[torch.Tensor], torch.Tensor] | None = None

    def locate(
        self,
        parts: Mapping[torch.Tensor, Sequence[LayerPart]],
        layers: Sequence[str],
        sum_over_processes: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        """Say which parts of which layers are in the tensors that this process steps.

        Args:
            parts: The parts in each tensor.
            layers: All layers, in the same order on every process.
            sum_over_processes: Sums a vector over all processes; None if this process has every layer whole. It is
                called once per adapted parameter group, so every process must take the same steps.
        """
        self._parts = parts
        self._numbers = {name: number for number, name in enumerate(layers)}
        self._sum_over_processes = sum_over_processes

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step with the gradients that exist."""
        assert closure is None
        for group in self.param_groups:
            self._step_group(group)

    @abstractmethod
    def _step_group(self, group: dict[str, Any]) -> None:
        """Step the tensors of a parameter group that have gradients, without changing the gradients."""

    def _trust_ratios(
        self, tensors: Sequence[torch.Tensor], updates: Sequence[torch.Tensor], trust_ratio: TrustRatio
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A view of the update of each part of a layer that this process has, and the part's trust ratio, a scalar.

        The ratio is 1 if one of the layer's norms is zero.

        Args:
            tensors: The tensors of the parameter group.
            updates: Gradients or updates of what this process has of the tensors.
            trust_ratio: Maps the norms of the layers' weights and updates, each of shape (layers,), to their ratios.
        """
        weights, views = [], []
        numbers: list[int] = []
        for tensor, update in zip(tensors, updates, strict=True):
            parts = [LayerPart("", 0, 0, update.numel())] if self._parts is None else self._parts[tensor]
            for part in parts:
                weights.append(_view(local_part(tensor), part))
                views.append(_view(update, part))
                numbers.append(len(numbers) if self._parts is None else self._numbers[part.name])
        device = views[0].device if views else None
        index = torch.tensor(numbers, dtype=torch.int64, device=device)
        squares = torch.zeros(2, len(self._numbers) or len(numbers), dtype=torch.float64, device=device)
        for row, parts_of_layers in zip(squares, (weights, views), strict=True):
            if parts_of_layers:
                row.index_add_(0, index, torch.stack(torch._foreach_norm(parts_of_layers)).double().square())
        if self._sum_over_processes is not None:
            squares = self._sum_over_processes(squares)
        weight_norms, norms = squares.sqrt()
        ratios = torch.where((weight_norms > 0) & (norms > 0), trust_ratio(weight_norms, norms), 1.0)
        return [(view, ratio.to(view.dtype)) for view, ratio in zip(views, ratios[index], strict=True)]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process holds, as a view."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _view(tensor: torch.Tensor, part: LayerPart) -> torch.Tensor:
    # A whole parameter need not be in row-major order in memory.
    whole = part.length == tensor.numel()
    return tensor if whole else tensor.view(-1)[part.offset : part.offset + part.length]
