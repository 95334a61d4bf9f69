"""What is plotted: a panel a quantity, with a series for each run that has it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from largebatch.errors import counted
from largebatch.tools.report.results import evaluated, lower_is_better
from largebatch.tools.report.runs import Line, ReportedRun, is_number

Array = NDArray[np.float64]

BINS = 400
"""Of a long curve's range of steps; each is about a pixel wide."""
LARGE_RANGE = 10.0
"""Ratio of the largest to the smallest value from which on a scale is logarithmic where it may be."""


@dataclass(frozen=True)
class Points:
    """A curve; all of shape (points,)."""

    steps: Array  # optimizer steps completed
    samples: Array  # samples trained on
    values: Array  # the quantity


@dataclass(frozen=True)
class Series:
    """A quantity of one run."""

    run: int  # number of the run, from 0
    drawn: Points  # the logged values; where there are too many, the lowest and the highest of each bin, and the ends
    means: Points | None  # where there are too many: their means in each bin
    num_logged: int  # logged values
    num_not_finite: int  # how many more were logged that cannot be drawn


@dataclass(frozen=True)
class Panel:
    """One plot."""

    key: str  # the first part of its files' names
    title: str  # what is plotted
    label: str  # the label of its vertical axis, with the unit
    series: list[Series]  # one per run that has it; not empty
    logarithmic: bool = False  # whether the vertical axis is logarithmic
    from_zero: bool = False  # whether its vertical axis begins at 0

    @property
    def remarks(self) -> list[str]:
        """What else there is to know of the plot."""
        remarks = ["logarithmic scale"] if self.logarithmic else []
        if any(series.means for series in self.series):
            logged = max(series.num_logged for series in self.series)
            remarks.append(f"{logged:,} values: means of {BINS} equal parts of a run, and faintly each part's extremes")
        not_finite = sum(series.num_not_finite for series in self.series)
        if not_finite:
            remarks.append(f"not finite, and left out: {counted(not_finite, 'value')}")
        return remarks


def panels_of(runs: Sequence[ReportedRun]) -> list[Panel]:
    """The plots of runs: what none of them has is left out."""
    units = {run.plan.get("loss_unit") for run in runs}
    loss_label = f"mean per {str(units.pop())[:-1]}" if len(units) == 1 else "loss"
    # From one milestone to the next a decay by steps is a factor, and a warmup from 0 has no logarithm.
    by_factors = all(run.plan.get("schedule", {}).get("decay") == "step" for run in runs)
    grows = any(len(run.plan.get("timeline", {}).get("phases", [])) > 1 for run in runs)
    panels = [
        _panel(runs, "loss", "Training loss", loss_label, may_be_logarithmic=True),
        *(
            _panel(
                runs, name, f"Evaluation: {name}", name, may_be_logarithmic=lower_is_better(name), of_evaluations=True
            )
            for name in evaluated(runs)
        ),
        _panel(runs, "lr", "Learning rate", "learning rate", may_be_logarithmic=by_factors),
        _panel(runs, "grad_norm", "Gradient norm", "global norm before clipping", may_be_logarithmic=True),
        _panel(runs, "samples_per_second", "Throughput", "samples per second", from_zero=True),
        _panel(runs, "tokens_per_second", "Throughput in tokens", "tokens per second", from_zero=True),
        _panel(runs, "mfu", "Model FLOPs utilization", "% of the devices' peak", factor=100.0, from_zero=True),
    ]
    if grows:
        panels.append(_panel(runs, "global_batch_size", "Global batch size", "samples per step", from_zero=True))
    return [panel for panel in panels if panel.series]


def _panel(
    runs: Sequence[ReportedRun],
    name: str,
    title: str,
    label: str,
    factor: float = 1.0,
    may_be_logarithmic: bool = False,
    from_zero: bool = False,
    of_evaluations: bool = False,
) -> Panel:
    found = [
        _series(number, run.evaluations if of_evaluations else run.metrics, name, factor)
        for number, run in enumerate(runs)
    ]
    series = [one for one in found if one is not None]
    logarithmic = may_be_logarithmic and _has_large_range(one.drawn.values for one in series)
    return Panel(f"evaluation_{name}" if of_evaluations else name, title, label, series, logarithmic, from_zero)


def _series(number: int, lines: Sequence[Line], name: str, factor: float = 1.0) -> Series | None:
    logged = [line for line in lines if name in line and is_number(line, "samples")]
    lines = [line for line in logged if is_number(line, name)]
    if not lines:
        return None
    not_finite = len(logged) - len(lines)
    columns = np.array([[line["step"], line["samples"], factor * line[name]] for line in lines], dtype=float).T
    if len(lines) <= 2 * BINS:
        return Series(number, Points(*columns), None, len(lines), not_finite)
    bins = _bins(columns[0])
    kept = extremes(columns[2], bins)
    means = np.array([columns[:, start:stop].mean(axis=1) for start, stop in bins]).T
    return Series(number, Points(*columns[:, kept]), Points(*means), len(lines), not_finite)


def _bins(steps: Array) -> list[tuple[int, int]]:
    """Ranges of indices whose steps are in an equal share of the run; those without any are left out."""
    edges = np.linspace(steps[0], steps[-1], BINS + 1)[1:-1]
    bounds = [0, *np.searchsorted(steps, edges, side="right").tolist(), len(steps)]
    return [(start, stop) for start, stop in pairwise(bounds) if start < stop]


def extremes(values: Array, bins: Sequence[tuple[int, int]]) -> list[int]:
    """Indices of the lowest and the highest value of each range, and of the ends.

    So a spike of a single step stays, in its place and height.
    """
    found = {0, len(values) - 1}
    for start, stop in bins:
        found |= {start + int(values[start:stop].argmin()), start + int(values[start:stop].argmax())}
    return sorted(found)


def _has_large_range(values: Iterable[Array]) -> bool:
    together = np.concatenate([np.empty(0), *values])
    return len(together) > 0 and together.min() > 0 and bool(together.max() > LARGE_RANGE * together.min())
