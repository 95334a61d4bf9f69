"""How many samples come from each source of a mixture: a pure function of the samples so far, in whole numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class MixturePhase:
    """The weights from a number of samples on."""

    first_sample: int
    weights: tuple[int, ...]  # of the sources; their ratios count


@dataclass(frozen=True)
class Mixture:
    """The sources of a mixture, and their weights in each phase, of which the first begins with training."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]  # training samples of each source, after which it starts over
    phases: tuple[MixturePhase, ...]

    def counts_after(self, num_samples: int) -> tuple[int, ...]:
        """The samples that each source has given after this many samples in all.

        From the beginning of a phase on, they are its samples, apportioned by largest remainders (Hamilton): each count
        is less than one from the exact share. If each weight is 0 or at least one sample of a global batch, no batch
        takes back what an earlier one was given, and the batch's own counts are the differences.
        """
        counts = [0] * len(self.names)
        ends = [*(phase.first_sample for phase in self.phases[1:]), num_samples]
        for phase, end in zip(self.phases, ends, strict=True):
            size = min(end, num_samples) - phase.first_sample
            if size > 0:
                counts = [before + more for before, more in zip(counts, apportion(size, phase.weights), strict=True)]
        return tuple(counts)

    def epochs(self, num_samples: int) -> list[float]:
        """How many times each source is seen in this many samples."""
        return [count / size for count, size in zip(self.counts_after(num_samples), self.sizes, strict=True)]


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """`total` in shares of these ratios, rounded by largest remainders; of equal ones, the first.

    >>> apportion(10, (1, 1, 1))
    [4, 3, 3]
    """
    whole = sum(weights)
    shares = [total * weight // whole for weight in weights]
    remainders = [total * weight % whole for weight in weights]
    largest = sorted(range(len(weights)), key=lambda number: -remainders[number])
    for number in largest[: total - sum(shares)]:
        shares[number] += 1
    return shares


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the ratios of decimal fractions: 0.1 is 1/10.

    >>> whole_weights([0.7, 0.3])
    (7, 3)
    """
    fractions = [Fraction(str(weight)) for weight in weights]
    denominator = math.lcm(*(each.denominator for each in fractions))
    whole = [int(each * denominator) for each in fractions]
    return tuple(number // math.gcd(*whole) for number in whole)
