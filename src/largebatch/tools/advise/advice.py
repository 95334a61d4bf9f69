"""The advice: steps, samples and hours to the same loss, for batch sizes and numbers of GPUs.

S = S_min (1 + B_crit / B) and E = B S, with steps S, samples E and batch B. At the critical batch E_min / S_min, a run
takes twice the fewest steps and twice the fewest samples (McCandlish et al. 2018, arXiv 1812.06162, section 2.3).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from largebatch.estimate.table import aligned, digits, wrapped

NOISE_SCALE = (
    "A noise scale stands in for the critical batch. It predicts the order of magnitude (McCandlish et al. 2018, "
    "section 2.2) and grows during training, and its error is only that of the measurement. `largebatch "
    "critical-batch` measures the critical batch itself."
)


@dataclass(frozen=True)
class CriticalBatch:
    """A critical batch, and how certain it is."""

    samples: float
    standard_error: float | None  # None if unknown
    interval: tuple[float, float] | None  # with 95 % confidence; the ends may be 0 and infinity
    source: str
    is_noise_scale: bool = False  # whether a noise scale stands in for it


@dataclass(frozen=True)
class KnownRun:
    """A run that reached the loss."""

    steps: int
    batch: int  # samples per step


@dataclass(frozen=True)
class OnGpus:
    """A batch size on a number of GPUs."""

    batch: int
    gpus: int
    strategy: str
    step_seconds: tuple[float, float]  # at least and at most
    steps: float  # to the loss, or a multiple of the fewest

    @property
    def hours(self) -> list[float]:
        """Hours to the loss, or relative to each other if the steps are: at least and at most."""
        return [self.steps * seconds / 3600 for seconds in self.step_seconds]

    @property
    def cost(self) -> float:
        """GPU-hours, in the middle of their range."""
        return self.gpus * sum(self.hours) / 2


def relative_steps(critical_batch: float, batch: float, reference: float = math.inf) -> float:
    """S(batch) / S(reference); the infinite batch takes the fewest steps, S_min."""
    if math.isinf(critical_batch):
        return reference / batch
    return (1 + critical_batch / batch) / (1 + critical_batch / reference)


def steps_and_samples(critical_batch: float, batch: int, known: KnownRun | None) -> tuple[float, float]:
    """S and E at a batch size; S / S_min and E / E_min without a known run."""
    if known is None:
        return relative_steps(critical_batch, batch), 1 + batch / critical_batch if critical_batch else math.inf
    steps = known.steps * relative_steps(critical_batch, batch, known.batch)
    return steps, steps * batch


def fastest(on_gpus: Sequence[OnGpus]) -> list[OnGpus]:
    """For each number of GPUs, the batch size that takes the least time."""
    best: dict[int, OnGpus] = {}
    for each in sorted(on_gpus, key=lambda each: (each.gpus, each.hours)):
        best.setdefault(each.gpus, each)
    return list(best.values())


def table(
    critical: CriticalBatch, known: KnownRun | None, batches: Sequence[int], on_gpus: Sequence[OnGpus]
) -> list[str]:
    """The advice as lines of at most 110 characters."""
    error = f" ± {digits(critical.standard_error)}" if critical.standard_error else ""
    interval = f"95 % confidence: {_range(critical.interval)}" if critical.interval else "its error is not known"
    texts = [f"Critical batch {digits(critical.samples)}{error} samples ({interval}), from {critical.source}"]
    texts += [NOISE_SCALE] if critical.is_noise_scale else []
    texts += [f"To the loss after {known.steps:,} steps at batch {known.batch:,}"] if known else []
    knee = min(batches, key=lambda batch: abs(math.log(batch / critical.samples)))
    rows = {}
    for batch in batches:
        values = steps_and_samples(critical.samples, batch, known)
        ends = [steps_and_samples(end, batch, known) for end in critical.interval or ()]
        cells = [with_range(*numbers) for numbers in zip(values, *ends, strict=True)]
        headings = ("steps", "samples") if known else ("steps / S_min", "samples / E_min")
        rows[f"batch {batch:,}{' (knee)' if batch == knee else ''}"] = dict(zip(headings, cells, strict=True))
    lines = [line for text in texts for line in wrapped(text)]
    return [*lines, "", *aligned(rows), *(_lines_on_gpus(critical, known is not None, on_gpus) if on_gpus else ())]


def _lines_on_gpus(critical: CriticalBatch, in_hours: bool, on_gpus: Sequence[OnGpus]) -> list[str]:
    """Time and cost on each number of GPUs, and what more GPUs gain."""
    best, rows = fastest(on_gpus), {}
    for each in on_gpus:
        cells = {"strategy": each.strategy, "step, s": _range(each.step_seconds)}
        if in_hours:
            cells |= {"hours": _range(each.hours), "GPU-hours": _range([each.gpus * hours for hours in each.hours])}
        speed = sum(best[0].hours) / sum(each.hours)
        cells |= {"speed": digits(speed), "cost": digits(each.cost / best[0].cost)}
        rows[f"batch {each.batch:,} on {each.gpus:,}{' *' if each in best else ''}"] = cells
    first = f"{best[0].gpus:,} GPUs at batch {best[0].batch:,}"
    texts = [f"* The fastest batch size on this number of GPUs. Speed and cost are relative to {first}."]
    for fewer, more in pairwise(best):
        steps = [
            relative_steps(each, fewer.batch, more.batch) for each in (critical.samples, *(critical.interval or ()))
        ]
        speeds = [sum(fewer.hours) / sum(more.hours) * each / steps[0] for each in steps]
        costs = [more.gpus / fewer.gpus / speed for speed in speeds]
        texts.append(
            f"At {more.gpus:,} GPUs and batch {more.batch:,}: {with_range(*speeds)} times as fast as {fewer.gpus:,} "
            f"GPUs at batch {fewer.batch:,}, {with_range(*costs)} times the cost."
        )
    return ["", *aligned(rows), "", *(line for text in texts for line in wrapped(text))]


def with_range(value: float, *ends: float) -> str:
    """A number, and the ends of its range, if they differ."""
    return digits(value) + (f" ({_range(sorted(ends))})" if len(set(ends)) > 1 else "")


def _range(ends: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(digits(end) if end >= 1 else f"{end:.2g}" for end in ends))
