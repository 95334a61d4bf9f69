"""Means over seeds, their errors, and what they allow to say."""

import math
import statistics
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from largebatch.words import counted

CONFIDENCE = 0.95  # one-sided
MAX_SEEDS = 1000


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


def is_clearly_lower(lower: Cell, higher: Cell, num_chosen_from: int) -> bool:
    """Whether the mean of the first is below the second's, with 95 % confidence: Welch's t, one-sided.

    The first has the lowest mean of `num_chosen_from` cells, each of which might have had it: by Bonferroni's rule, the
    probability of an error is divided among them.
    """
    # Without a spread, as of one seed, there is nothing to measure the difference by.
    if lower.std == higher.std == 0:
        return False
    from scipy.stats import ttest_ind

    # Warnings tell of a single seed, whose p-value is NaN.
    with warnings.catch_warnings(action="ignore"):
        found = ttest_ind(lower.values, higher.values, equal_var=False, alternative="less")
    return bool(found.pvalue < (1 - CONFIDENCE) / num_chosen_from)


class Compared(NamedTuple):
    """The losses of a batch size, less those of the run's own, seed by seed."""

    verdict: str  # "within" or "beyond" the tolerance, or "undecided"
    cost: float | None  # the mean difference, above 0 if worse; None if a run diverged, or without pairs of seeds
    margin: float | None  # on each side, of Student's t: 95 % confidence, one-sided; None if it is not known
    missing_seeds: int  # that would decide, if their mean and spread stay

    def __str__(self) -> str:
        known = []
        if self.missing_seeds:
            known.append(f"at least {counted(self.missing_seeds, 'more seed')}")
        if self.margin is not None:
            known.append(f"it costs {self.cost:.4g} ± {self.margin:.2g} (95 %, one-sided)")
        return f"{self.verdict}: {'; '.join(known) or 'a run diverged'}"


def compare(losses: Mapping[int, float], reference: Mapping[int, float], tolerance: float) -> Compared:
    """Whether the difference of two losses, each by seed, is within the tolerance or clearly beyond it."""
    import numpy as np
    from scipy.stats import t

    if math.inf in losses.values():
        return Compared("beyond", None, None, 0)
    pairs = [loss - reference[seed] for seed, loss in losses.items() if seed in reference]
    count = len(pairs)
    mean = statistics.fmean(pairs) if pairs else None
    if mean is None or count < 2:
        return Compared("undecided", mean, None, 2 - count)
    seeds = np.arange(count, MAX_SEEDS)
    margins = t.ppf(CONFIDENCE, seeds - 1) * statistics.stdev(pairs) / np.sqrt(seeds)
    missing = int(np.count_nonzero(margins > abs(mean - tolerance)))
    decided = "within" if mean <= tolerance else "beyond"
    return Compared("undecided" if missing else decided, mean, float(margins[0]), missing)


def largest_within(
    losses: Mapping[int, Mapping[int, float]], tolerance: float
) -> tuple[int | None, dict[int, Compared]]:
    """The largest batch size before the first whose loss is beyond the tolerance of the smallest one's, or None if that
    is undecided; and what was found of each. If a run diverged at the smallest, nothing is found.

    Args:
        losses: The loss of each seed at each batch size; infinite for a run that diverged.
        tolerance: Largest difference.
    """
    own, *others = sorted(losses)
    if math.inf in losses[own].values():
        return None, {}
    found = {size: compare(losses[size], losses[own], tolerance) for size in others}
    largest = own
    for size, compared in found.items():
        if compared.verdict == "undecided":
            return None, found
        if compared.verdict == "beyond":
            break
        largest = size
    return largest, found


def bounds(largest: int | None, tried: Iterable[int]) -> str:
    """What the sizes that were tried say of the critical batch, given the result of `largest_within`."""
    if largest is None:
        return "undecided"
    beyond = [size for size in tried if size > largest]
    return f"at least {largest:,}" + (f" and less than {min(beyond):,}" if beyond else ", the largest that was tried")
