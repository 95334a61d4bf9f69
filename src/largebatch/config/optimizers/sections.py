"""What a recipe's JSON may say about its optimizer: the fields that every optimizer has, and those of families."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from largebatch.batch.scaling import DecayRule, MomentRule, scaled_decay, scaled_moments
from largebatch.config.sections import (
    BelowOne,
    Duration,
    NonEmpty,
    NonEmptyList,
    NonNegativeFloat,
    PositiveFloat,
    Section,
)

ParameterKind = Literal["norm", "bias", "embedding", "output"]


class ParameterGroup(Section):
    """Parameters that have a learning rate of their own."""

    parameters: NonEmpty
    """Pattern of the parameters' names in the model, such as "classifier.*", where * is any text. A parameter belongs
    to the first group whose pattern its name matches."""
    lr_factor: PositiveFloat = 1.0
    """Factor of the learning rate, with which weight decay is multiplied, too."""


class OptimizerSection(Section):
    """The fields that every optimizer has; those of a subclass are the options that its constructor is called with."""

    name: str
    """Name of the optimizer."""
    weight_decay: NonNegativeFloat
    """Weight decay: an L2 penalty added to the gradient, or decoupled from it, as is usual for the optimizer."""
    no_decay: list[ParameterKind] = Field(default=["norm", "bias"])
    """Kinds of parameters without weight decay; layer-wise optimizers do not adapt their steps either. Parameters that
    the model itself declares to have none are added: those with a true attribute `_no_weight_decay`, as in mamba_ssm,
    and those named by a method `no_weight_decay()` of a module, as in timm."""
    no_decay_names: list[NonEmpty] = Field(default=[])
    """Patterns of names of further parameters without weight decay, such as "*.A_log", where * is any text."""
    clip_norm: PositiveFloat | None = None
    """Clip gradients to this global norm; null means no clipping, on every strategy."""
    groups: NonEmptyList[ParameterGroup] | None = None
    """Parameters with a learning rate of their own; null: all have the same."""
    ema_half_life: Duration | None = None
    """Half-life of a moving average of the weights: the mean of the weights after each step so far, in which a step
    counts by its samples, and half as much for each half-life since. In samples, tokens or epochs, it does not depend
    on the batch. Evaluations also report the averaged weights, under names that begin with "ema/"; checkpoints have
    them, and `largebatch export --ema` writes them. null: there is none."""

    rules: ClassVar[tuple[str, ...]] = ()
    """Fields that are not options but rules by which options follow the batch; "fixed": they do not follow it."""
    square_root_rules: ClassVar[Mapping[str, str]] = {}
    """Of these fields, the rule that holds only with the square-root rule of the learning rate."""
    names: ClassVar[tuple[str, ...]] = ("no_decay_names",)
    """Fields that are not options but patterns of parameters' names: lists, or mappings from patterns to values."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of the optimizer's constructor, as tuned."""
        return self.model_dump(exclude={*OptimizerSection.model_fields, *self.rules, *self.names})

    @property
    def name_patterns(self) -> dict[str, dict[str, Any]]:
        """For each of the fields `names`, the value of each pattern; True in a list."""
        given = {field: getattr(self, field) for field in self.names}
        return {field: each if isinstance(each, dict) else dict.fromkeys(each, True) for field, each in given.items()}

    def options_for(self, k: float) -> dict[str, Any]:  # noqa: ARG002 - used by those that scale
        """The options for a batch k times as large as the one they were tuned at."""
        return self.options

    def weight_decay_for(self, k: float, lr_factor: float, horizon: float) -> tuple[float, str]:  # noqa: ARG002 - as above
        """Weight decay for k times the batch, `lr_factor` times the learning rate and `horizon` times the samples; and
        how it is computed, "" if it is as tuned."""
        return self.weight_decay, ""


class WithMomentum(OptimizerSection):
    """An optimizer with momentum in torch's form: the learning rate is not folded into the velocity, so it may change
    at each step without momentum correction (Goyal et al. 2017, remark 2)."""

    momentum: BelowOne = 0.9
    """Momentum coefficient."""
    nesterov: bool = False
    """Whether to use Nesterov momentum."""

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0; set momentum, or nesterov to false")
        return self


class WithBetas(OptimizerSection):
    """An optimizer of the Adam family, with weight decay that is decoupled from the gradient."""

    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decay rates of the running averages of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""
    weight_decay_scaling: DecayRule = "fixed"
    """How weight decay follows the run. "timescale": it is multiplied by batch / `learning_rate.reference_batch_size` x
    base_lr / peak, and divided by the samples of the run over `learning_rate.reference_duration`, if that is given. The
    1 / (learning rate x weight decay) steps that AdamW, and Muon with any `scale`, average over then stay the same
    share of the run (Wang and Aitchison 2024, arXiv 2405.13698; Bergsma et al. 2025, arXiv 2505.13738). "power_lines":
    the best share was found to be proportional to (tokens per parameter) ** -0.527 for language models that AdamW
    trains from random weights (Bergsma et al.). So, for the model that was tuned, weight decay is divided by (samples
    of the run over `reference_duration`) ** 0.473, not by the first power. "fixed": it does not."""

    rules: ClassVar[tuple[str, ...]] = ("weight_decay_scaling",)

    def weight_decay_for(self, k: float, lr_factor: float, horizon: float) -> tuple[float, str]:
        return scaled_decay(self.weight_decay_scaling, self.weight_decay, k, lr_factor, horizon)


class WithScaledMoments(WithBetas):
    """An optimizer with AdamW's step whose betas, eps and weight decay may follow the batch size."""

    beta_scaling: MomentRule = "fixed"
    """How betas and eps follow the batch size, which is k times `learning_rate.reference_batch_size`, the one they
    were tuned at. "fixed": they do not. "half_life": the second beta is raised to the power k, which keeps its
    half-life in samples (Marek et al. 2025, arXiv 2507.07101). "sde": each beta becomes 1 - k (1 - beta), and eps is
    divided by the square root of k, to go with the square-root rule of the learning rate (Malladi et al. 2022, arXiv
    2205.10287)."""

    rules: ClassVar[tuple[str, ...]] = ("beta_scaling", *WithBetas.rules)
    square_root_rules: ClassVar[Mapping[str, str]] = {"beta_scaling": "sde"}

    def options_for(self, k: float) -> dict[str, Any]:
        betas, eps = scaled_moments(self.beta_scaling, k, self.betas, self.eps)
        return self.options | {"betas": betas, "eps": eps}
