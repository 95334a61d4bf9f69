"""The advice: steps and samples to the same loss, for batch sizes.

S = S_min (1 + B_crit / B) and E = B S, with steps S, samples E and batch B. At the critical batch E_min / S_min, a run
takes twice the fewest steps and twice the fewest samples (McCandlish et al. 2018, arXiv 1812.06162, section 2.3).
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from largebatch.words import aligned, digits, span, wrapped


class CriticalBatch(NamedTuple):
    """A critical batch, and how it is known."""

    samples: float
    interval: tuple[float, ...]  # its ends with 95 % confidence, which may be 0 and infinity; empty if unknown
    source: str
    measured: tuple[float, float] = (0.0, math.inf)  # the smallest and the largest batch that it was fitted to

    def knee(self, batches: Sequence[int]) -> int:
        """The batch size that is nearest to it."""
        return min(batches, key=lambda batch: abs(math.log(batch / self.samples)))


def steps_and_samples(critical_batch: float, batch: int, known_run: tuple[int, int] | None) -> tuple[float, float]:
    """S and E at a batch size.

    Args:
        critical_batch: B_crit; may be 0 or infinity.
        batch: B.
        known_run: Steps and batch size of a run that reaches the loss; with None, S / S_min and E / E_min are returned.
    """
    if known_run is None:
        return 1 + critical_batch / batch, 1 + batch / critical_batch if critical_batch else math.inf
    steps, reference = known_run
    is_limit = math.isinf(critical_batch)
    ratio = reference / batch if is_limit else (1 + critical_batch / batch) / (1 + critical_batch / reference)
    return steps * ratio, steps * ratio * batch


def table(critical: CriticalBatch, batches: Sequence[int], known_run: tuple[int, int] | None) -> Iterator[str]:
    """Yield the advice in lines of at most 110 characters; `known_run` as in `steps_and_samples`."""
    interval = f"95 % confidence: {span(critical.interval)}" if critical.interval else "its error is not known"
    yield from wrapped(f"Critical batch {digits(critical.samples)} samples ({interval}), from {critical.source}")
    in_steps = "steps / S_min"
    in_samples = "samples / E_min"
    if known_run:
        yield "If the recipe reaches the loss, after {:,} steps at batch {:,}".format(*known_run)
        in_steps = "steps"
        in_samples = "samples"
    likely = (critical.samples, *critical.interval)
    low, high = critical.measured
    knee = critical.knee(batches)
    rows = {}
    for batch in batches:
        steps, samples = zip(*(steps_and_samples(each, batch, known_run) for each in likely), strict=True)
        mark = " (knee)" if batch == knee else ""
        if not low <= batch <= high:
            mark += " (extrapolated)"
        rows[f"batch {batch:,}{mark}"] = {in_steps: _with_range(steps), in_samples: _with_range(samples)}
    yield from ("", *aligned(rows), "")


def _with_range(values: Sequence[float]) -> str:
    """A number, and the ends of its range, if they differ."""
    value, *ends = values
    return digits(value) + (f" ({span(sorted(ends))})" if len(set(ends)) > 1 else "")
