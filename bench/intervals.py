"""Simulations of intervals and verdicts: how often they are right, where the truth is known.

    .venv/bin/python bench/intervals.py

Takes some 5 minutes.
"""

import argparse
from collections.abc import Iterator, Sequence

import numpy as np

from largebatch.batch.noise_scale import measure, noise_scale
from largebatch.tools.sweep.verdicts import Cell, is_clearly_lower
from record import Figure, Record, add_output_options, take_facts, write_record

DRAWS = 2_000  # of intervals
SWEEPS = 20_000
RATIOS = (0.5, 5, 16, 50)
MEASUREMENTS = (2, 3, 5, 20, 100)
SEEDS = (2, 3, 5, 8)
DIMENSIONS = 500
PARTS = 8
ABOUT = f"""**Noise scale.** Of {DRAWS:,} intervals of 95 % confidence, the share that is reported, and the share of
these that holds the true noise scale. Gradients are normal in {DIMENSIONS} dimensions, in {PARTS} micro-batches.
**Sweep.** Of {SWEEPS:,} sweeps in which all rates reach the same loss, the share that says that the rule does not hold.
Losses are normal; "unequal": the standard deviation doubles from each rate to the next."""


def coverage(random: np.random.Generator, ratio: float, count: int) -> Iterator[Figure]:
    """Of intervals from so many measurements, at a noise scale of so many batches."""
    reported = []
    held = 0
    for _ in range(DRAWS):
        # |G| = 1 in the first dimension; the parts' own noise is `PARTS` times that of the batch.
        lines = []
        for _ in range(count):
            parts = random.normal(0, np.sqrt(PARTS * ratio / DIMENSIONS), (PARTS, DIMENSIONS)) / PARTS
            parts[:, 0] += 1 / PARTS
            square_of_sum = (parts.sum(0) ** 2).sum()
            lines.append(measure((parts**2).sum(), square_of_sum, 1 / PARTS, 1))
        found = noise_scale(lines)
        reported.append("samples" in found)
        held += reported[-1] and found["low"] <= ratio <= (found["high"] or np.inf)
    case = f"noise scale {ratio:g} batches, {count} measurements"
    yield Figure(f"{case}: intervals that hold it", "%", [100 * held / max(sum(reported), 1)])
    yield Figure(f"{case}: reported", "%", [100 * float(np.mean(reported))])


def false_verdicts(random: np.random.Generator, num_rates: int, seeds: int, is_equal: bool) -> Figure:
    """Of sweeps over so many rates."""
    spreads = np.ones(num_rates) if is_equal else 2.0 ** np.arange(num_rates)
    wrong = 0
    for _ in range(SWEEPS):
        cells = [Cell(tuple(random.normal(0, spread, seeds).tolist())) for spread in spreads]
        predicted = cells[random.integers(num_rates)]
        best = min(cells, key=lambda cell: cell.mean)
        wrong += best is not predicted and is_clearly_lower(best, predicted, num_rates - 1)
    case = f"{num_rates} rates, {seeds} seeds, {'equal' if is_equal else 'unequal'} spreads"
    return Figure(f"{case}: false verdicts", "%", [100 * wrong / SWEEPS], None, 5.5)


def main(words: Sequence[str] | None = None) -> None:
    """Simulate and write."""
    parser = argparse.ArgumentParser(description="Coverage of intervals, and false verdicts.")
    add_output_options(parser, "intervals")
    options = parser.parse_args(words)
    facts = take_facts(("numpy", "scipy"))
    random = np.random.default_rng(0)
    figures = [figure for ratio in RATIOS for count in MEASUREMENTS for figure in coverage(random, ratio, count)]
    figures += [
        false_verdicts(random, rates, seeds, is_equal)
        for rates in (2, 3, 5)
        for seeds in SEEDS
        for is_equal in (True, False)
    ]
    record = Record(
        program="intervals",
        title="Intervals and verdicts",
        about=ABOUT,
        settings={"draws": DRAWS, "sweeps": SWEEPS},
        facts=facts,
        comparisons=[],
        figures=figures,
    )
    write_record(record, options)


if __name__ == "__main__":
    main()
