"""What a recipe's JSON may say of its optimizer: one typed section each."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from largebatch.config.sections import BelowOne, NonNegativeFloat, PositiveFloat, Section
from largebatch.scaling import MomentRule

ParameterKind = Literal["norm", "bias", "embedding"]


class OptimizerSection(Section):
    """What every optimizer has."""

    weight_decay: NonNegativeFloat
    """Weight decay: an L2 penalty added to the gradient for SGD and LARS, decoupled from it for AdamW and LAMB."""
    no_decay: list[ParameterKind] = Field(default=["norm", "bias"])
    """Kinds of parameters that get no weight decay, and that LARS and LAMB do not adapt."""
    clip_norm: PositiveFloat | None = None
    """Clip gradients to this global norm; null is no clipping, on every strategy."""


class WithMomentum(OptimizerSection):
    """An optimizer with momentum, in torch's form: the learning rate is not folded into the velocity, so it may change
    at each step without momentum correction (Goyal et al. 2017, remark 2)."""

    momentum: BelowOne = 0.9
    """Momentum coefficient."""
    nesterov: bool = False
    """Nesterov's momentum."""

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0; set momentum, or nesterov to false")
        return self


class Sgd(WithMomentum):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"]


class Lars(WithMomentum):
    """LARS (You et al. 2017, arXiv 1708.03888): SGD with momentum, the step of each layer multiplied by
    trust_coefficient |w| / (|g| + weight_decay |w|)."""

    name: Literal["lars"]
    trust_coefficient: PositiveFloat = 0.001
    """The paper's eta."""


class Adam(OptimizerSection):
    """What the optimizers of Adam's family have."""

    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decay rates of the running averages of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""


class AdamW(Adam):
    """AdamW: Adam with decoupled weight decay (arXiv 1711.05101)."""

    name: Literal["adamw"]
    moments: MomentRule = "fixed"
    """How betas and eps follow the batch size, which is k times `learning_rate.reference_batch_size`, where they were
    tuned. "fixed": not. "half_life": the second beta is taken to the power k, so that its half-life in samples stays
    (Marek et al. 2025, arXiv 2507.07101). "sde": each beta becomes 1 - k (1 - beta), and eps is divided by the square
    root of k, as goes with the learning rate's square-root rule (Malladi et al. 2022, arXiv 2205.10287)."""


class Lamb(Adam):
    """LAMB (You et al. 2019, arXiv 1904.00962): AdamW, the step u of each layer multiplied by |w| / |u|."""

    name: Literal["lamb"]
    eps: PositiveFloat = 1e-6
    """Added to the denominator."""


Optimizer = Annotated[Sgd | AdamW | Lars | Lamb, Field(discriminator="name")]
