"""The learning rate as a pure function of how far training is: gradual warmup, then a decay.

Nothing is stepped, so nothing can be stepped twice: whoever needs a learning rate asks for it by its place in training.
Places are counted in samples trained on, so that a batch size that grows changes neither warmup nor decay; at a
constant batch size that is the same as counting steps.
"""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """The shape of a learning rate, with every place in samples trained on before.

    Args:
        end: Samples of the whole run.
        warmup: Samples until the peak is reached; 0 is no warmup.
        warmup_start_lr: Learning rate at the start of the warmup, where the peak is not below it.
        warmup_shape: Whether it grows from there to the peak, or stays until the end of the warmup.
        decay: Shape after warmup.
        final_fraction: For "cosine", "linear", "polynomial" and "warmup_stable_decay": learning rate at `end`, as a
            fraction of the peak.
        power: For "polynomial".
        milestones: For "step": the places from which on the learning rate is multiplied by `factor` once more.
        factor: For "step".
        decay_start: Where those with a `final_fraction` begin.
    """

    end: int
    warmup: int = 0
    warmup_start_lr: float = 0.0
    warmup_shape: Literal["gradual", "constant"] = "gradual"
    decay: Literal["constant", "step", "cosine", "linear", "polynomial", "warmup_stable_decay"] = "constant"
    final_fraction: float = 0.0
    power: float = 1.0
    milestones: tuple[int, ...] = ()
    factor: float = 1.0
    decay_start: int = 0

    def lr_at(self, place: int, peak_lr: float) -> float:
        """Learning rate of the step before which `place` samples were trained on.

        Gradual warmup starts at `warmup_start_lr` and grows by a constant amount with each sample, so that the step at
        `warmup` is the first with the peak (Goyal et al. 2017, section 2.2). Milestones count from the start of
        training, as theirs do. A decay to `final_fraction` would be complete at `end`, where the step after the last
        would begin.

        Args:
            place: Samples trained on before the step.
            peak_lr: Peak of the batch size in force.
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
        # A warmup that ends with the run leaves no decay: the last step still has a progress of 0.
        progress = min(max(place - self.decay_start, 0) / max(self.end - self.decay_start, 1), 1.0)
        remaining = (1 + math.cos(math.pi * progress)) / 2 if self.decay == "cosine" else (1 - progress) ** self.power
        return self.final_fraction + (1 - self.final_fraction) * remaining
