"""Sequences of tokens, some of which follow a rule: the task that docs/cookbook.md adds its recipes to."""

# The page's blocks use and define such names.
# ruff: noqa: F401, F821

from typing import Literal

from largebatch.config import RecipeConfig
from largebatch.config.data import Data
from largebatch.config.models import Model
from largebatch.config.optimizers import ENLARGED_ROUNDING, ROUNDING, OptimizerEntry, adam_moments, adapt_if_decayed
from largebatch.config.optimizers.sections import OptimizerSection
from largebatch.config.optimizers.shipped import SHIPPED
from largebatch.config.sections import BelowOne, PositiveFloat, PositiveInt


class Sequences(Data):
    length: PositiveInt


class TinyGpt(Model):
    hidden_size: PositiveInt
    pretrained: str | None = None


# cookbook: config.py


class Config(RecipeConfig):
    """Sequences."""

    data: Sequences
    model: TinyGpt

    optimizers = (*SHIPPED, CLIPPED_ADAMW, SCALED)

    # cookbook: config.py, in Config
