"""Durations in whole optimizer steps."""

import math
from dataclasses import dataclass

from largebatch.config.sections import Duration


@dataclass(frozen=True)
class StepUnits:
    """What one optimizer step is worth in the other units of training length.

    Args:
        global_batch_size: Samples per step.
        num_train_samples: Samples of the training set.
        tokens_per_sample: Tokens per sample, or None where samples have none.
    """

    global_batch_size: int
    num_train_samples: int
    tokens_per_sample: int | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in one pass over the training set; the rest of the shuffled order is dropped."""
        return self.num_train_samples // self.global_batch_size

    def steps_in(self, duration: Duration) -> int:
        """`duration` in optimizer steps, rounded up to whole ones; at least 1.

        Raises:
            ValueError: The duration is in tokens and samples have none.
        """
        if duration.steps is not None:
            return duration.steps
        if duration.epochs is not None:
            # 0.1 epochs of 30 steps are 3 steps, not the 4 that 3.0000000000000004 would round up to.
            return max(1, math.ceil(round(duration.epochs * self.steps_per_epoch, 6)))
        if duration.samples is not None:
            return -(-duration.samples // self.global_batch_size)
        if self.tokens_per_sample is None:
            raise ValueError("is given in tokens, but this data has none; use epochs, steps or samples")
        assert duration.tokens is not None
        return -(-duration.tokens // (self.global_batch_size * self.tokens_per_sample))
