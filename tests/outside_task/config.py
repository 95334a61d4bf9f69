"""Segmentation of made-up maps whose pixels are labeled in part: a task of another kind, with its own optimizer."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from largebatch.config import RecipeConfig, check
from largebatch.config.data import Data
from largebatch.config.models import Model
from largebatch.config.optimizers import ENLARGED_ROUNDING, OptimizerEntry
from largebatch.config.optimizers.sections import OptimizerSection
from largebatch.config.optimizers.shipped import SHIPPED
from largebatch.config.sections import BelowOne, NonNegativeInt, PositiveFloat, PositiveInt, Section


class Maps(Data):
    """Discs on a square; of each map, another part of the pixels is labeled."""

    side: PositiveInt
    """Pixels along a side."""
    stretch: PositiveInt = 1
    """Maps that are this many times as large; more than 1 stands for data that are not on every machine."""

    @property
    def loss_unit(self) -> str:
        return "pixels"

    @property
    def loss_weight_per_sample(self) -> int | None:
        return None


class Layers(Model):
    """Convolutions of 3 x 3 pixels, and one of a single pixel."""

    channels: list[PositiveInt] = Field(min_length=1)
    """Channels of each layer."""


class Border(Section):
    """Pixels at the border that are not predicted."""

    width: NonNegativeInt = 1
    """How many along each side."""


class Softsign(OptimizerSection):
    """Momentum whose elements are pressed between -1 and 1."""

    name: Literal["softsign"]
    beta: BelowOne = 0.9
    """Decay rate of the running average of the gradient."""
    softness: PositiveFloat = 1e-3
    """Size of an average that makes half a step."""


SOFTSIGN = OptimizerEntry(
    Softsign,
    f"{__package__}.softsign:Softsign",
    lambda _, shape: {"step": (), "average": shape},
    ENLARGED_ROUNDING,
)


class Config(RecipeConfig):
    """Segmentation."""

    data: Maps
    model: Layers
    border: Border = Border()

    optimizers = (*SHIPPED, SOFTSIGN)

    def tiny_data(self) -> dict[str, Any] | None:
        if self.data.stretch == 1:
            return None
        return {"data": {"side": 8, "num_train_samples": 64, "num_eval_samples": 16}, "border.width": 1}

    @check
    def _something_inside_of_the_border(self) -> Iterator[str]:
        side = self.data.side * self.data.stretch
        if 2 * self.border.width >= side:
            yield f"border.width: {self.border.width} leaves nothing of {side} pixels; write at most {(side - 1) // 2}"
