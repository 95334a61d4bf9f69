"""Means over seeds, their errors, and what they allow to say."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from largebatch.words import counted

# Standard errors of a difference, from which on it is called one.
CLEAR = 2.0
CONFIDENCE = 0.95  # of a critical batch
MAX_SEEDS = 1000

Verdict = Literal["holds", "does not hold", "cannot be told"]


@dataclass(frozen=True)
class Cell:
    """The results of the seeds at the same settings."""

    values: tuple[float, ...]
    diverged: int = 0  # how many of these runs diverged

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values)

    @property
    def std(self) -> float:
        """Sample standard deviation over the seeds; 0 of one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def standard_error(self) -> float:
        """That of the mean; 0 of one seed, about which it says nothing."""
        return self.std / math.sqrt(len(self.values))


def verdict(lower: Cell, higher: Cell) -> Verdict:
    """Whether the first is lower than the second: by more than twice the standard error of the difference of means."""
    error = math.hypot(lower.standard_error, higher.standard_error)
    difference = higher.mean - lower.mean
    if min(len(lower.values), len(higher.values)) < 2 or abs(difference) <= CLEAR * error:
        return "cannot be told"
    return "holds" if difference > 0 else "does not hold"


def largest_within(losses: Mapping[int, Mapping[int, float]], tolerance: float) -> tuple[int | None, str]:
    """The largest batch size whose loss is within the tolerance of the smallest one's, and the finding in words.

    Both are of the same seeds, so their differences are compared: Student's t, 95 % one-sided, at each size. The first
    size that is clearly worse ends the search, whatever the larger ones reach.

    Args:
        losses: The loss of each seed at each batch size; infinite for a run that diverged.
        tolerance: Largest difference.
    """
    import numpy as np
    from scipy.stats import t

    largest, *others = sorted(losses)
    reference = losses[largest]
    if math.inf in reference.values():
        return None, f"no critical batch: a run diverged at the run's own {largest:,}; write an earlier or later --at"
    for size in others:
        if math.inf in losses[size].values():
            return largest, f"the critical batch is {largest:,}: at {size:,}, a run diverged"
        pairs = [loss - reference[seed] for seed, loss in losses[size].items() if seed in reference]
        count = len(pairs)
        if count < 2:
            return None, f"undecided at batch {size:,}: {counted(2 - count, 'more seed')}, at least"
        mean = statistics.fmean(pairs)
        seeds = np.arange(count, MAX_SEEDS)
        errors = t.ppf(CONFIDENCE, seeds - 1) * statistics.stdev(pairs) / np.sqrt(seeds)
        found = f"the difference is {mean:+.4g} ± {errors[0]:.2g} at {size:,}"
        if mean - errors[0] > tolerance:
            return largest, f"the critical batch is {largest:,}; {found}"
        if mean + errors[0] > tolerance:
            more = int(np.count_nonzero(errors > abs(mean - tolerance)))
            return None, f"undecided: {counted(more, 'more seed')}; {found}"
        largest = size
    return largest, f"the critical batch is at least {largest:,}, the largest that was tried"
