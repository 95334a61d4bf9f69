"""Check the shares of mixtures over 10^9 steps with numpy, which apportions every step by itself.

    python bench/mixture.py

In every step, each source must have given less than one sample more or less than its exact share, no batch may take
back a sample, and all together must have given the samples of the steps. At 1,000 random steps of each ten million, the
counts must be those of `largebatch.batch.mixture`. Takes some five minutes for each mixture.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from largebatch.batch.mixture import Mixture, MixturePhase
from record import RESULTS, take_facts, write_verdicts

# Weights, and a batch that holds at least a sample of each source.
MIXTURES = {"web, code, mathematics": ((70, 20, 10), 13), "uneven": ((617, 299, 84), 12)}
AT_ONCE, COMPARED = 10**7, 1000


def counts_of(steps: np.ndarray, weights: Sequence[int], batch: int) -> np.ndarray:
    """Samples of each source, shape (sources, steps), after so many steps, by largest remainders."""
    products = np.outer(weights, steps * batch)
    shares, remainders = np.divmod(products, sum(weights))
    left = steps * batch - shares.sum(axis=0)
    # A source's place among the remainders, the largest first, and of equal ones the first.
    for number in range(len(weights)):
        mine = remainders[number]
        before = sum(
            (remainders[other] > mine) | ((remainders[other] == mine) & (other < number))
            for other in range(len(weights))
        )
        shares[number] += before < left
    return shares


def row_of(name: str, weights: tuple[int, ...], batch: int, steps: int) -> dict[str, Any]:
    """The verdict on a mixture."""
    mixture = Mixture(tuple(map(str, weights)), (1,) * len(weights), (MixturePhase(0, weights),))
    random, whole = np.random.default_rng(0), sum(weights)
    right, largest = True, 0.0
    for start in range(0, steps, AT_ONCE):
        some = np.arange(start, min(start + AT_ONCE, steps) + 1)
        counts = counts_of(some, weights, batch)
        off = np.abs(counts * whole - np.outer(weights, some * batch)).max() / whole
        largest = max(largest, float(off))
        right &= bool((np.diff(counts) >= 0).all()) and bool((counts.sum(axis=0) == some * batch).all()) and off < 1
        for place in random.integers(0, len(some), COMPARED).tolist():
            right &= mixture.counts_after(int(some[place]) * batch) == tuple(counts[:, place].tolist())
    row = {"mixture": name, "weights": weights, "batch": batch, "steps": steps, "largest difference": round(largest, 6)}
    return row | {"verdict": "right" if right else "wrong"}


def main() -> None:
    """Check and write."""
    parser = argparse.ArgumentParser(description="Check the shares of mixtures in every step.")
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--output", type=Path, default=RESULTS / "mixture/mixture.json")
    options = parser.parse_args()
    facts, rows = take_facts(("numpy",)), []
    for name, (weights, batch) in MIXTURES.items():
        rows.append(row_of(name, weights, batch, options.steps))
        print(*(f"{value!s:<24}" for value in rows[-1].values()), flush=True)
    write_verdicts(rows, "right", facts, options.output)


if __name__ == "__main__":
    main()
