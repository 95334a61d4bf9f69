"""What a recipe's JSON may say of its optimizer: one typed section each."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from largebatch.config.sections import BelowOne, NonNegativeFloat, PositiveFloat, Section

ParameterKind = Literal["norm", "bias", "embedding"]


class OptimizerSection(Section):
    """What every optimizer has."""

    weight_decay: NonNegativeFloat
    """Weight decay: an L2 penalty added to the gradient for SGD, decoupled from it for AdamW."""
    no_decay: list[ParameterKind] = Field(default=["norm", "bias"])
    """Kinds of parameters that get no weight decay."""
    clip_norm: PositiveFloat | None = None
    """Clip gradients to this global norm; null is no clipping, on every strategy."""


class Sgd(OptimizerSection):
    """Stochastic gradient descent with momentum, in torch's form: the learning rate is not folded into the velocity,
    so it may change at each step without momentum correction (Goyal et al. 2017, remark 2)."""

    name: Literal["sgd"]
    momentum: BelowOne = 0.9
    """Momentum coefficient."""
    nesterov: bool = False
    """Nesterov's momentum."""

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> "Sgd":
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0; set momentum, or nesterov to false")
        return self


class AdamW(OptimizerSection):
    """AdamW: Adam with decoupled weight decay (arXiv 1711.05101)."""

    name: Literal["adamw"]
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decay rates of the running averages of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""


Optimizer = Annotated[Sgd | AdamW, Field(discriminator="name")]
