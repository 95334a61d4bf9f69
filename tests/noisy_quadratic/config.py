"""A quadratic whose gradients are noisy, and whose expected loss under SGD is known in closed form."""

from largebatch.config import RecipeConfig
from largebatch.config.data import Data
from largebatch.config.models import Model
from largebatch.config.sections import PositiveFloat, PositiveInt


class Noise(Data):
    """Targets that are `size` or `-size` in each dimension, at random."""

    size: PositiveFloat
    """Standard deviation of the gradient of a sample, in each dimension."""


class Point(Model):
    """A vector."""

    dimensions: PositiveInt
    """Its length."""


class Config(RecipeConfig):
    """A noisy quadratic."""

    data: Noise
    model: Point
