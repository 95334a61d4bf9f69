"""Means over seeds, their errors, and what they allow to say."""

import math
import statistics
from dataclasses import dataclass
from typing import Literal

# Standard errors of a difference, from which on it is called one.
CLEAR = 2.0

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
    if min(len(lower.values), len(higher.values)) < 2:
        return "cannot be told"
    error = math.hypot(lower.standard_error, higher.standard_error)
    difference = higher.mean - lower.mean
    if abs(difference) <= CLEAR * error or difference == 0:
        return "cannot be told"
    return "holds" if difference > 0 else "does not hold"
