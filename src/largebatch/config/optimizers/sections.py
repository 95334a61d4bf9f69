"""What the JSON sections of optimizers have in common."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from largebatch.batch.scaling import MomentRule
from largebatch.config.sections import BelowOne, NonNegativeFloat, PositiveFloat, Section

ParameterKind = Literal["norm", "bias", "embedding"]


class OptimizerSection(Section):
    """What every optimizer has; the fields of its own are the options that its constructor is called with."""

    name: str
    """Which optimizer it is."""
    weight_decay: NonNegativeFloat
    """Weight decay: an L2 penalty added to the gradient, or decoupled from it, as is usual for the optimizer."""
    no_decay: list[ParameterKind] = Field(default=["norm", "bias"])
    """Kinds of parameters that get no weight decay, and that layer-wise optimizers do not adapt."""
    clip_norm: PositiveFloat | None = None
    """Clip gradients to this global norm; null is no clipping, on every strategy."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of the optimizer's constructor, as they were tuned."""
        return self.model_dump(exclude={*OptimizerSection.model_fields})


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


class WithBetas(OptimizerSection):
    """An optimizer of Adam's family."""

    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decay rates of the running averages of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""


class WithScaledBetas(WithBetas):
    """One whose betas and eps may follow the batch size."""

    beta_scaling: MomentRule = "fixed"
    """How betas and eps follow the batch size, which is k times `learning_rate.reference_batch_size`, where they were
    tuned. "fixed": not. "half_life": the second beta is taken to the power k, so that its half-life in samples stays
    (Marek et al. 2025, arXiv 2507.07101). "sde": each beta becomes 1 - k (1 - beta), and eps is divided by the square
    root of k, as goes with the learning rate's square-root rule (Malladi et al. 2022, arXiv 2205.10287)."""

    @property
    def options(self) -> dict[str, Any]:
        return self.model_dump(exclude={*OptimizerSection.model_fields, "beta_scaling"})
