"""How many samples come from each source of a mixture: a pure function of the samples so far, in whole numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Mixture:
    """The sources of a mixture, and their weights."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]  # training samples of each source, after which it starts over
    weights: tuple[int, ...]  # of the sources; their ratios count

    def counts_after(self, num_samples: int) -> tuple[int, ...]:
        """The samples that each source has given after this many samples in all.

        They are apportioned by largest remainders (Hamilton): each count is less than one from the exact share. If each
        weight is 0 or at least one sample of a global batch, no batch takes back what an earlier one was given, and the
        batch's own counts are the differences.
        """
        whole = sum(self.weights)
        counts = [num_samples * weight // whole for weight in self.weights]
        remainders = [num_samples * weight % whole for weight in self.weights]
        # Of equal ones, the first.
        largest = sorted(range(len(counts)), key=lambda number: -remainders[number])
        for number in largest[: num_samples - sum(counts)]:
            counts[number] += 1
        return tuple(counts)

    def epochs(self, num_samples: int) -> list[float]:
        """How many times each source is seen in this many samples."""
        return [count / size for count, size in zip(self.counts_after(num_samples), self.sizes, strict=True)]


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the ratios of decimal fractions: 0.1 is 1/10.

    >>> whole_weights([0.7, 0.3])
    (7, 3)
    """
    fractions = [Fraction(str(weight)) for weight in weights]
    denominator = math.lcm(*(each.denominator for each in fractions))
    whole = [int(each * denominator) for each in fractions]
    return tuple(number // math.gcd(*whole) for number in whole)
