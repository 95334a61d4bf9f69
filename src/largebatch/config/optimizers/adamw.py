"""AdamW."""

from typing import ClassVar, Literal

from largebatch.batch.scaling import DecayRule, weight_decay_factor
from largebatch.config.optimizers import ENLARGED_ROUNDING, OptimizerEntry, adam_moments
from largebatch.config.optimizers.sections import WithScaledBetas


class AdamW(WithScaledBetas):
    """AdamW: Adam with decoupled weight decay (arXiv 1711.05101)."""

    name: Literal["adamw"]
    weight_decay_scaling: DecayRule = "fixed"
    """How weight decay follows the run. "timescale": it is multiplied by batch / `learning_rate.reference_batch_size` x
    base_lr / peak, and divided by the samples of the run over `learning_rate.reference_duration`, if that is given. The
    1 / (learning rate x weight decay) steps that AdamW averages over then stay the same share of the run (Wang and
    Aitchison 2024, arXiv 2405.13698; Bergsma et al. 2025, arXiv 2505.13738). "fixed": it does not."""

    rules: ClassVar[tuple[str, ...]] = (*WithScaledBetas.rules, "weight_decay_scaling")

    def weight_decay_for(self, k: float, lr_factor: float, horizon: float) -> float:
        is_fixed = self.weight_decay_scaling == "fixed"
        return self.weight_decay * (1 if is_fixed else weight_decay_factor(k, lr_factor, horizon))


ADAMW = OptimizerEntry(
    AdamW,
    "torch.optim:AdamW",
    adam_moments,
    tolerance=ENLARGED_ROUNDING,
    # One kernel for all of a tensor; torch has no fused SGD for sharded tensors.
    constants={"fused": True},
)
