"""Random starting weights: each parameter a function of the run's seed and its name alone.

So a process needs no other parameter to make one, and the weights are the same on every strategy and number of
processes. (Where machines of different kinds round a normal distribution differently, the run does not start.)
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from largebatch.order import derive_seed


@dataclass(frozen=True)
class Normal:
    """Independent values, normally distributed."""

    mean: float
    std: float

    def fill(self, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Set all elements."""
        tensor.normal_(self.mean, self.std, generator=generator)


@dataclass(frozen=True)
class Uniform:
    """Independent values, uniformly distributed from `low` to `high`."""

    low: float
    high: float

    def fill(self, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Set all elements."""
        tensor.uniform_(self.low, self.high, generator=generator)


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float

    def fill(self, tensor: torch.Tensor, generator: torch.Generator) -> None:  # noqa: ARG002 - nothing is drawn
        """Set all elements."""
        tensor.fill_(self.value)


Distribution = Normal | Uniform | Constant


class DrawnWeights:
    """The starting weights of a model that was built without.

    Args:
        model: The model, with its parameters on the meta device.
        distributions: What each parameter is drawn from, by its name.
        seed: The run's.
    """

    def __init__(self, model: nn.Module, distributions: Mapping[str, Distribution], seed: int):
        # The model's own parameters change their shapes when it is cut up.
        self._like = {name: (tuple(value.shape), value.dtype) for name, value in model.named_parameters()}
        self._distributions = distributions
        self._seed = seed
        self.checksums: dict[str, int] = {}

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of a parameter, in row-major order; the whole of it is drawn for that.

        On the CPU, so that the values do not depend on the device that they are for.
        """
        shape, dtype = self._like[name]
        whole = torch.empty(shape, dtype=dtype, device="cpu").reshape(-1)
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "weights", name))
        self._distributions[name].fill(whole, generator)
        self.checksums[name] = zlib.crc32(whole.view(torch.uint8).numpy().data)
        return whole[start:stop]
