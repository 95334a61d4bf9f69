"""Muon: the momentum of each weight matrix, made orthogonal, is its step; AdamW for all else."""

from collections.abc import Iterable, Iterator
from math import sqrt
from typing import Any

import torch

from largebatch.config.optimizers.muon import COEFFICIENTS, output_sizes
from largebatch.optim.layerwise import Group, LayerwiseOptimizer, PartsOfLayers

MAX_STACKED = 2**27  # elements of the matrices of one shape that are made orthogonal together: 512 MiB in fp32
SCALES = {
    "adamw_rms": lambda outputs, inputs: 0.2 * sqrt(max(outputs, inputs)),
    "original": lambda outputs, inputs: sqrt(max(1, outputs / inputs)),
    "spectral": lambda outputs, inputs: sqrt(outputs / inputs),
}


class Muon(LayerwiseOptimizer):
    """Muon for the parameter groups with `layerwise`, AdamW for the others; `config.optimizers.muon` has the options.

    A group's `inputs_first` says that weights have shape (inputs, outputs), as GPT-2's; `matrices` is the number of
    matrices in each, one after the other in the outputs, or the outputs of each. Other dimensions of a weight, such as
    a convolution's, count as inputs. Momentum is torch's, an average; the plan has clipped gradients before it.
    """

    def __init__(self, params: Any, **options: Any):
        super().__init__(params, inputs_first=False, matrices=1, **options)
        # Torch's own AdamW: in each step, it is given a group and the states of this optimizer.
        self._adamw = torch.optim.AdamW([torch.empty(0)], fused=True)

    def _step_group(self, group: Group, parts: PartsOfLayers) -> None:
        if not group["layerwise"]:
            self._adamw.param_groups = [{**self._adamw.defaults, **group, "params": parts.tensors}]
            self._adamw.state = self.state
            self._adamw.step()
            return
        gradients = parts.gradients()
        updates = parts.states(self.state, "momentum_buffer")
        if gradients:
            torch._foreach_lerp_(updates, gradients, 1 - group["momentum"])
            if group["nesterov"]:
                updates = list(torch._foreach_lerp(gradients, updates, group["momentum"]))
        if group["lr"] == 0:
            # Nothing moves. So states can be made for tensors that are parts of layers (`backend.state.create_state`).
            return
        layers = parts.whole_layers
        whole = layers.gather(dict(zip(parts.names, updates, strict=True)))
        del updates
        steps = layers.scatter(dict(_orthogonal_steps(whole, group)))
        weights = parts.split(parts.tensors)
        if weights:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            directions = [steps[name].view_as(weight) for name, weight in zip(parts.names, weights, strict=True)]
            torch._foreach_add_(weights, directions, alpha=-group["lr"])


def _orthogonal_steps(layers: dict[str, torch.Tensor], group: Group) -> Iterator[tuple[str, torch.Tensor]]:
    """The step of each layer from its momentum, both whole; layers of one shape are computed together."""
    inputs_first = group["inputs_first"]
    for names in _alike(layers):
        stacked = torch.stack([layers.pop(name) for name in names]).flatten(2)
        if inputs_first:
            stacked = stacked.mT
        for matrices in torch.split(stacked, output_sizes(group["matrices"], stacked.shape[1]), dim=1):
            steps = orthogonalized(matrices, COEFFICIENTS[group["coefficients"]], group["iterations"])
            _, outputs, inputs = steps.shape
            matrices.copy_(steps.mul_(SCALES[group["scale"]](outputs, inputs)))
        yield from zip(names, stacked.mT if inputs_first else stacked, strict=True)


def _alike(layers: dict[str, torch.Tensor]) -> Iterator[list[str]]:
    """The names of layers, in lists of one shape and of at most MAX_STACKED elements."""
    by_shape: dict[torch.Size, list[str]] = {}
    for name, layer in layers.items():
        by_shape.setdefault(layer.shape, []).append(name)
    for shape, names in by_shape.items():
        at_once = max(1, MAX_STACKED // shape.numel())
        for start in range(0, len(names), at_once):
            yield names[start : start + at_once]


def orthogonalized(matrices: torch.Tensor, coefficients: Iterable[float], iterations: int) -> torch.Tensor:
    """Matrices of shape (number, rows, columns) with their singular values moved near 1, by Newton-Schulz iterations.

    Those in fp32 are computed in bf16 on GPUs. Matrices of any norm are treated alike, but for zero, which stays zero.
    """
    a, b, c = coefficients
    # By the largest element first, because squares of small ones would vanish.
    largest = matrices.abs().amax((1, 2), keepdim=True)
    x = matrices / torch.where(largest > 0, largest, 1.0)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1.0)
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:
        x = x.mT
    if x.is_cuda and x.dtype == torch.float32:
        x = x.bfloat16()
    for _ in range(iterations):
        squares = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(squares, squares, squares, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices.dtype)
