"""The advice: steps, samples and time to the same loss, for batch sizes and numbers of GPUs.

S = S_min (1 + B_crit / B) and E = B S, with steps S, samples E and batch B. At the critical batch E_min / S_min, a run
takes twice the fewest steps and twice the fewest samples (McCandlish et al. 2018, arXiv 1812.06162, section 2.3).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from largebatch.words import aligned, digits, span, wrapped


@dataclass(frozen=True)
class CriticalBatch:
    """A critical batch, and a run that reached the loss."""

    samples: float
    interval: tuple[float, ...]  # its ends with 95 % confidence, which may be 0 and infinity; empty if unknown
    source: str
    run: tuple[int, int] | None = None  # steps and batch size of the run; with None, S_min is not known
    measured: tuple[float, float] = (0.0, math.inf)  # the smallest and the largest batch that it was fitted to

    @property
    def units(self) -> tuple[str, str, str]:
        """The units of steps, samples and time."""
        return ("steps", "samples", "hours") if self.run else ("steps / S_min", "samples / E_min", "seconds / S_min")

    def knee(self, batches: Sequence[int]) -> int:
        """The batch size that is nearest to it."""
        return min(batches, key=lambda batch: abs(math.log(batch / self.samples)))


class OnGpus(NamedTuple):
    """A batch size on a number of GPUs."""

    batch: int
    gpus: int
    strategy: str
    step_seconds: list[float]  # at least and at most
    time: list[float]  # to the loss, in the unit of `CriticalBatch.units`


def steps_and_samples(critical_batch: float, batch: int, run: tuple[int, int] | None) -> tuple[float, float]:
    """S and E at a batch size; S / S_min and E / E_min without a run."""
    if run is None:
        return 1 + critical_batch / batch, 1 + batch / critical_batch if critical_batch else math.inf
    steps, reference = run
    is_limit = math.isinf(critical_batch)
    ratio = reference / batch if is_limit else (1 + critical_batch / batch) / (1 + critical_batch / reference)
    return steps * ratio, steps * ratio * batch


def table(critical: CriticalBatch, batches: Sequence[int], on_gpus: Sequence[OnGpus]) -> Iterator[str]:
    """Yield the advice in lines of at most 110 characters."""
    interval = f"95 % confidence: {span(critical.interval)}" if critical.interval else "its error is not known"
    yield from wrapped(f"Critical batch {digits(critical.samples)} samples ({interval}), from {critical.source}")
    if critical.run:
        yield "To the loss after {:,} steps at batch {:,}".format(*critical.run)
    in_steps, in_samples, in_time = critical.units
    likely = (critical.samples, *critical.interval)
    knee = critical.knee(batches)
    rows = {}
    for batch in batches:
        steps, samples = zip(*(steps_and_samples(each, batch, critical.run) for each in likely), strict=True)
        cells = {in_steps: _with_range(steps), in_samples: _with_range(samples)}
        low, high = critical.measured
        is_beyond = "" if low <= batch <= high else " (extrapolated)"
        rows[f"batch {batch:,}{' (knee)' if batch == knee else ''}{is_beyond}"] = cells
    yield from ("", *aligned(rows), "")
    fastest = {each.gpus: each for each in sorted(on_gpus, key=lambda each: each.time, reverse=True)}
    rows = {}
    for each in on_gpus:
        cells = {"strategy": each.strategy, "step, s": span(each.step_seconds), in_time: span(each.time)}
        rows[f"batch {each.batch:,} on {each.gpus:,}{' (fastest)' if each in fastest.values() else ''}"] = cells
        cells[f"GPU-{in_time}"] = span(each.gpus * time for time in each.time)
    yield from (*aligned(rows), "")


def _with_range(values: Sequence[float]) -> str:
    """A number, and the ends of its range, if they differ."""
    value, *ends = values
    return digits(value) + (f" ({span(sorted(ends))})" if len(set(ends)) > 1 else "")
