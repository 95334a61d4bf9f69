"""The section of the learning rate: how it scales with the batch size, its warmup, and its decays."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from largebatch.batch import Length, Timeline
from largebatch.batch.scaling import ScalingRule, scaling_factor
from largebatch.config.sections import Duration, Fraction, NonEmptyList, PositiveFloat, PositiveInt, Section


class Warmup(Section):
    """Lower learning rates at the start of training (Goyal et al. 2017, section 2.2)."""

    duration: Duration
    """Time until the peak is reached."""
    start: Literal["base_lr", "zero"] = "base_lr"
    """First learning rate: `base_lr` (Goyal et al.; there is no warmup if the scaled rate is not above it), or zero,
    with which the first step changes no weights."""
    shape: Literal["gradual", "constant"] = "gradual"
    """"gradual": the rate grows by the same amount in each step. "constant": it stays at `base_lr` and then jumps to
    the peak, which the paper found to be worse than no warmup."""

    @model_validator(mode="after")
    def _constant_is_not_zero(self) -> Self:
        if self.shape == "constant" and self.start == "zero":
            raise ValueError('a constant warmup at zero would not train; write start "base_lr", or shape "gradual"')
        return self


class ConstantDecay(Section):
    """The peak learning rate until the end."""

    name: Literal["constant"]


class StepDecay(Section):
    """The learning rate is multiplied by `factor` at each of the milestones."""

    name: Literal["step"]
    at: NonEmptyList[Duration]
    """Milestones, counted from the start of training, in increasing order."""
    factor: Annotated[float, Field(gt=0, lt=1)]
    """Factor that the learning rate is multiplied by at each milestone."""


class CosineDecay(Section):
    """Half a cosine from the peak at the end of warmup to `final_fraction` of it at the end of training."""

    name: Literal["cosine"]
    final_fraction: Fraction = 0.0
    """Learning rate at the end, as a fraction of the peak."""


class PolynomialDecay(Section):
    """The peak times a power of the fraction of training that is left after warmup, down to `final_fraction` of it.
    You et al. 2017 (arXiv 1708.03888) use power 2 with LARS."""

    name: Literal["polynomial"]
    power: PositiveFloat
    """Exponent; 1 is a straight line."""
    final_fraction: Fraction = 0.0
    """Learning rate at the end, as a fraction of the peak."""


class WarmupStableDecay(Section):
    """The peak until `decay` before the end, then a straight line to `final_fraction` of it (WSD, arXiv 2404.06395)."""

    name: Literal["warmup_stable_decay"]
    decay: Duration
    """Length of the decay at the end of training."""
    final_fraction: Fraction = 0.0
    """Learning rate at the end, as a fraction of the peak."""


class BatchGrowth(Section):
    """The peak learning rate of the first batch size until the end: the batch grows instead of the rate decaying.

    With SGD, a batch f times as large changes the noise of training like a rate divided by f (Smith et al. 2018, arXiv
    1711.00489): instead of a step decay by 0.2, write a `global_batch_size` that is a list whose sizes grow fivefold.
    """

    name: Literal["batch_growth"]


Decay = Annotated[
    ConstantDecay | StepDecay | CosineDecay | PolynomialDecay | WarmupStableDecay | BatchGrowth,
    Field(discriminator="name"),
]


class LearningRate(Section):
    """The learning rate that was tuned, and how it scales with the batch size."""

    base_lr: PositiveFloat
    """The learning rate that was tuned."""
    reference_batch_size: PositiveInt
    """The global batch size `base_lr` was tuned at; it has no default, because a guess would scale wrongly."""
    reference_duration: Duration | None = None
    """Length of the run in which `base_lr` and the optimizer were tuned at that batch, if it is known."""
    scaling: ScalingRule
    """With k = global_batch_size / reference_batch_size, the peak is base_lr times k, the square root of k, or 1."""
    warmup: Warmup | None = None
    """Warmup, or null for none."""
    decay: Decay
    """Course of the learning rate after warmup."""

    def peak_for(self, global_batch_size: int) -> float:
        """The learning rate after warmup at a batch size."""
        return self.base_lr * scaling_factor(self.scaling, global_batch_size, self.reference_batch_size)

    def horizon_of(self, timeline: Timeline, steps: int) -> float:
        """The length of a run over the one that `base_lr` was tuned in; 1 if that is not known."""
        if self.reference_duration is None:
            return 1.0
        reference = self.reference_duration.length
        if reference.unit == "steps":
            reference = Length("samples", reference.amount * self.reference_batch_size)
        return float(timeline.progress(steps, reference.unit) / reference.exact)
