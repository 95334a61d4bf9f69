"""The learning rate as a pure function of the progress of training: warmup, then a decay.

Progress is counted in samples trained on, so a growing batch size changes neither warmup nor decay; at a constant batch
size this is the same as counting steps.
"""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """The shape of a learning rate over the run. Places are numbers of samples trained on so far."""

    end: int  # samples of the whole run
    warmup: int = 0  # samples until the peak is reached; 0 means no warmup
    warmup_start_lr: float = 0.0  # learning rate at the start of warmup; the peak, if that is lower
    warmup_shape: Literal["gradual", "constant"] = "gradual"  # grows to the peak, or keeps its first value until then
    decay: Literal["constant", "step", "cosine", "polynomial", "warmup_stable_decay"] = "constant"
    final_fraction: float = 0.0  # learning rate at `end` over the peak, for the decays that begin at `decay_start`
    power: float = 1.0  # exponent of "polynomial"
    milestones: tuple[int, ...] = ()  # places from which "step" multiplies the learning rate by `factor` once more
    factor: float = 1.0
    decay_start: int = 0  # place where "cosine", "polynomial" and "warmup_stable_decay" begin

    def lr_at(self, place: int, peak_lr: float) -> float:
        """Learning rate of the step before which `place` samples were trained on.

        The step at `warmup` is the first with the peak, and milestones count from the start of training (Goyal et al.
        2017, section 2.2). A decay to `final_fraction` would be complete at `end`, where the step after the last would
        begin.

        Args:
            place: Samples trained on before the step.
            peak_lr: Peak for the current batch size.
        """
        if place < self.warmup:
            start_lr = min(self.warmup_start_lr, peak_lr)
            if self.warmup_shape == "constant":
                return start_lr
            return start_lr + (peak_lr - start_lr) * (place / self.warmup)
        return peak_lr * self._decay_fraction(place)

    def _decay_fraction(self, place: int) -> float:
        if self.decay == "constant":
            return 1.0
        if self.decay == "step":
            return self.factor ** sum(place >= milestone for milestone in self.milestones)
        # If warmup ends with the run, there is no decay: the progress of the last step is still 0.
        progress = min(max(place - self.decay_start, 0) / max(self.end - self.decay_start, 1), 1.0)
        remaining = (1 + math.cos(math.pi * progress)) / 2 if self.decay == "cosine" else (1 - progress) ** self.power
        return self.final_fraction + (1 - self.final_fraction) * remaining
