"""The fields of this task's recipes. Does not import torch, so that plans appear at once."""

from largebatch.config import RecipeConfig
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
