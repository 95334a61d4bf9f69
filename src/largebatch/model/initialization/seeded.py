"""Random initial weights: each parameter is a function of the run's seed and its name alone.

So a process needs no other parameter to make one, and the weights are the same on every strategy and number of
processes. (Where machines of different kinds round a normal distribution differently, the run does not start.)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from largebatch.data.order import derive_seed
from largebatch.storage.tensors import fingerprint


@dataclass(frozen=True)
class Normal:
    """Independent values, normally distributed."""

    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class Uniform:
    """Independent values, uniformly distributed from `low` to `high`."""

    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True)
class Constant:
    """The same value for all elements."""

    value: float = 0.0


Distribution = Normal | Uniform | Constant


class SeededWeights:
    """The initial weights of a model with parameters on the meta device, drawn from each one's distribution."""

    def __init__(self, model: nn.Module, distributions: Mapping[str, Distribution], seed: int):
        # The model's own parameters change their shapes when it is cut up.
        self._like = {name: (tuple(value.shape), value.dtype) for name, value in model.named_parameters()}
        self._distributions = distributions
        self._seed = seed
        self.checksums: dict[str, str] = {}

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of a parameter, in row-major order; the whole of it is drawn for that.

        On the CPU, so that the values do not depend on the device that they are for.
        """
        shape, dtype = self._like[name]
        whole = torch.empty(shape, dtype=dtype, device="cpu").reshape(-1)
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "weights", name))
        match self._distributions[name]:
            case Normal(mean, std):
                whole.normal_(mean, std, generator=generator)
            case Uniform(low, high):
                whole.uniform_(low, high, generator=generator)
            case Constant(value):
                whole.fill_(value)
        self.checksums[name] = fingerprint(whole)
        return whole[start:stop]
