"""The learning rate as a pure function of the step: gradual warmup, then a decay.

Nothing is stepped, so nothing can be stepped twice: whoever needs a learning rate asks for it by the step.
"""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule, with every duration in optimizer steps.

    Args:
        peak_lr: Learning rate after warmup.
        total_steps: Steps of the whole run.
        warmup_steps: Steps until `peak_lr` is reached; 0 is no warmup.
        warmup_start_lr: Learning rate of step 0 where there is a warmup.
        decay: Shape after warmup.
        final_fraction: For "cosine", "linear" and "warmup_stable_decay": learning rate at `total_steps`, as a
            fraction of the peak.
        milestones: For "step": the steps from which on the learning rate is multiplied by `factor` once more.
        factor: For "step".
        decay_steps: For "warmup_stable_decay": length of the decay at the end.
    """

    peak_lr: float
    total_steps: int
    warmup_steps: int = 0
    warmup_start_lr: float = 0.0
    decay: Literal["constant", "step", "cosine", "linear", "warmup_stable_decay"] = "constant"
    final_fraction: float = 0.0
    milestones: tuple[int, ...] = ()
    factor: float = 1.0
    decay_steps: int = 0

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0.

        Warmup starts at `warmup_start_lr` and grows by a constant amount at each step, so that step `warmup_steps` is
        the first with the peak (Goyal et al. 2017, section 2.2). Milestones count from the start of training, as
        theirs do. A decay to `final_fraction` would be complete at step `total_steps`, one after the last.
        """
        if step < self.warmup_steps:
            growth = (self.peak_lr - self.warmup_start_lr) / self.warmup_steps
            return self.warmup_start_lr + growth * step
        return self.peak_lr * self._decay_fraction(step)

    def _decay_fraction(self, step: int) -> float:
        if self.decay == "constant":
            return 1.0
        if self.decay == "step":
            return self.factor ** sum(step >= milestone for milestone in self.milestones)
        start = self.total_steps - self.decay_steps if self.decay == "warmup_stable_decay" else self.warmup_steps
        # A warmup that ends with the run leaves no decay: the last step still has a progress of 0.
        progress = min(max(step - start, 0) / max(self.total_steps - start, 1), 1.0)
        remaining = (1 + math.cos(math.pi * progress)) / 2 if self.decay == "cosine" else 1 - progress
        return self.final_fraction + (1 - self.final_fraction) * remaining
