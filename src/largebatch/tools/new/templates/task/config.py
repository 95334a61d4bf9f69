"""The fields of this task's recipes. Does not import torch, so that plans appear at once."""

from collections.abc import Iterator

from largebatch.config import RecipeConfig, check
from largebatch.config.data import Data
from largebatch.config.models import Model
from largebatch.config.sections import PositiveInt


class Points(Data):
    """Random points, and a function of their coordinates to learn."""

    num_inputs: PositiveInt
    """Coordinates of a point."""


class Perceptron(Model):
    """Two fully connected layers."""

    hidden_size: PositiveInt
    """Width of the layer between them."""


class Config(RecipeConfig):
    """Regression."""

    data: Points
    model: Perceptron

    @check
    def _wide_enough(self) -> Iterator[str]:
        if isinstance(self.data, Points) and self.model.hidden_size < self.data.num_inputs:
            yield f"model.hidden_size: less than data.num_inputs, {self.data.num_inputs}; write at least that"
