"""Simulations of intervals and verdicts: how often they are right, where the truth is known.

    .venv/bin/python bench/intervals.py

Takes some 5 minutes.
"""

import argparse
from collections.abc import Iterator, Sequence

import numpy as np

from largebatch.batch.noise_scale import measure, noise_scale
from largebatch.errors import UserError
from largebatch.tools.advise.fit import TUNING, fit
from largebatch.tools.sweep.points import BATCH, RATE, Sweep
from largebatch.tools.sweep.results import Group, Results
from record import Figure, Record, add_output_options, take_facts, write_record

DRAWS = 2_000  # of intervals
SWEEPS = 2_000
FITS = 1_000
RATIOS = (0.5, 5, 16, 50)
MEASUREMENTS = (2, 3, 5, 20, 100)
SEEDS = (2, 3, 5, 8)
DIMENSIONS = 500
PARTS = 8
ABOUT = f"""**Noise scale.** Of {DRAWS:,} intervals of 95 % confidence, the share that is reported, and the share of
these that holds the true noise scale. Gradients are normal in {DIMENSIONS} dimensions, in {PARTS} micro-batches.
**Sweep.** Of {SWEEPS:,} sweeps over 3 rates and 2 batch sizes in which the rule holds, the share that says that it does
not. Losses are normal; "unequal": the standard deviation doubles from each rate to the next.
**Fit.** Of {FITS:,} critical batches that `advise --fit` finds where its form holds, the share of intervals of 95 %
confidence that hold the true one, of those that are shown, and the share of which it says that the form fails."""


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


def false_verdicts(random: np.random.Generator, margins: Sequence[float], seeds: int, is_equal: bool) -> Figure:
    """Of sweeps in which the same rate is the best at two batch sizes, each by so many deviations."""
    rates = (1.0, 2.0, 4.0)
    spreads = (1.0, 1.0, 1.0) if is_equal else (1.0, 2.0, 4.0)
    wrong = 0
    for _ in range(SWEEPS):
        groups = [
            Group(
                {BATCH: batch, RATE: rate},
                seeds,
                {},
                dict(enumerate(random.normal(0 if rate == 2 else margin, spread, seeds).tolist())),
            )
            for batch, margin in zip((64, 256), margins, strict=True)
            for rate, spread in zip(rates, spreads, strict=True)
        ]
        table = Results(Sweep("", {}, []), groups).table()
        wrong += "does not hold" in table
    shown = (
        "all rates are equal"
        if not any(margins)
        else f"one is the best by {margins[0]:g} and {margins[1]:g} deviations"
    )
    case = f"{shown}, {seeds} seeds, {'equal' if is_equal else 'unequal'} spreads"
    return Figure(f"{case}: false verdicts", "%", [100 * wrong / SWEEPS], None, 5.5)


def fits(random: np.random.Generator, spreads: Sequence[float], seeds: int) -> Iterator[Figure]:
    """Of critical batches that are fitted to points with such relative spreads and an error of 4 % for tuning."""
    batch = 64.0 * 2 ** np.arange(len(spreads))
    held = failed = reported = 0
    for _ in range(FITS):
        samples = 1e5 * (1 + batch / 256) * np.exp(random.normal(0, TUNING, len(batch)))
        runs = samples[:, None] * (1 + np.array(spreads)[:, None] * random.normal(0, 1, (len(batch), seeds)))
        every = np.zeros(len(batch))
        try:
            found = fit(np.array([batch, runs.mean(1), runs.std(1, ddof=1), np.full(len(batch), seeds), every]))
        except UserError:
            continue
        failed += found.fails
        reported += not found.fails
        held += not found.fails and found.interval[0] <= 256 <= found.interval[1]
    case = f"fit of {len(batch)} sizes with spreads of {100 * spreads[0]:g} to {100 * spreads[-1]:g} %, {seeds} seeds"
    yield Figure(f"{case}: intervals that hold it", "%", [100 * held / reported], 90)
    yield Figure(f"{case}: said to fail", "%", [100 * failed / FITS], None, 2)


def main(words: Sequence[str] | None = None) -> None:
    """Simulate and write."""
    parser = argparse.ArgumentParser(description="Coverage of intervals, and false verdicts.")
    add_output_options(parser, "intervals")
    options = parser.parse_args(words)
    facts = take_facts(("numpy", "scipy"))
    random = np.random.default_rng(0)
    figures = [figure for ratio in RATIOS for count in MEASUREMENTS for figure in coverage(random, ratio, count)]
    figures += [
        false_verdicts(random, margins, seeds, is_equal)
        for margins in ((0, 0), (0.2, 5), (0.5, 5), (1, 5))
        for seeds in SEEDS
        for is_equal in (True, False)
    ]
    figures += [
        figure
        for spreads in ((0.05,) * 5, (0.15,) * 5, (0.3,) * 8, (0.05, 0.1, 0.15, 0.2, 0.3))
        for seeds in (2, 3, 5, 20)
        for figure in fits(random, spreads, seeds)
    ]
    record = Record(
        program="intervals",
        title="Intervals and verdicts",
        about=ABOUT,
        settings={"draws": DRAWS, "sweeps": SWEEPS, "fits": FITS},
        facts=facts,
        comparisons=[],
        figures=figures,
    )
    write_record(record, options)


if __name__ == "__main__":
    main()
