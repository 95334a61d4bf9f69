"""The critical batch from the samples that runs at several batch sizes needed to reach the same target.

The form is E = E_min (1 + B / B_crit), with samples E and batch B (`advice`). Both of its parameters are fitted by
weighted least squares to log E. For each B_crit the best E_min has a closed form, so the search is one of
B_crit alone, up to its limits: at 0 the number of steps is the same at every batch, and at infinity the number of
samples.
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.stats import f as f_distribution

from largebatch.errors import UserError
from largebatch.system.regular_file import read_bytes
from largebatch.tools.options import MAX_AMOUNT
from largebatch.tools.sweep.points import BATCH
from largebatch.words import counted, digits, span

TUNING = 0.04
"""How far, relatively, the samples of a tuned batch size may be from those of the best hyperparameters: assumed."""
P_OF_FAILURE = 0.01
"""The form fails if points that follow it would deviate from it as much with a probability below this."""
EVERY = "every"
COLUMNS = {"batch": 1, "samples": 1, "spread": 0, "seeds": 1, EVERY: 0}
"""The columns of a file, each with its least value. `every` may be left out: the samples from one evaluation to the
next. The target was reached between two of them: on average half of that earlier, with a standard deviation of that /
sqrt(12)."""
MAX_POINTS = 1000
EDGE = 10.0  # B_crit is searched from e^-10 times the smallest batch to e^10 times the largest: beyond, E cannot tell
NUM_TRIED = 2001

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Fit:
    """The form, as it was fitted to points."""

    critical_batch: float  # samples; 0 or infinity if one of these limits fits best
    interval: tuple[float, ...]  # of it, with 95 % confidence, whose ends may be 0 and infinity; empty if unknown
    least_samples: float  # E_min
    deviation: float  # of the point that deviates most, relative to the form's samples
    p: float | None = None  # the probability of such deviations if the form holds; None if that cannot be tested

    @property
    def fails(self) -> bool:
        """Whether the points contradict the form."""
        return self.p is not None and self.p < P_OF_FAILURE

    def in_words(self) -> Iterator[str]:
        """The parameters, and how well the form holds: some sentences."""
        yield f"Fit of E = E_min (1 + B / B_crit), with a tolerance of {100 * TUNING:g} % for the tuning of each point:"
        interval = f"95 %: {span(self.interval)}" if self.interval else "one seed each: its error is not known"
        if self.critical_batch in (0, math.inf):
            sizes = "larger" if self.critical_batch else "smaller"
            yield f"B_crit is not determined ({interval}); add {sizes} batch sizes"
        else:
            yield f"B_crit {digits(self.critical_batch)} samples ({interval})"
            yield f"E_min {digits(self.least_samples)} samples"
        if self.p is None:
            yield "the form is not tested, which takes three batch sizes, and two seeds of one of them"
            yield f"points are up to {100 * self.deviation:.2g} % from it"
        else:
            finding = f"fails (p < {P_OF_FAILURE:g})" if self.fails else "is not contradicted"
            yield f"F test: p = {self.p:.2g}: the form {finding}"


def read_points(file: Path) -> Array:
    """The columns of a CSV file as rows: batch, samples, spread, seeds and every, which is 0 if it is not given.

    A header names them, in any order; further columns are ignored.

    Raises:
        UserError: The file cannot be read, or a line of it is wrong.
    """
    remedy = "give a file with the header batch,samples,spread,seeds and lines of two or more sizes; spreads may be 0"
    try:
        text = read_bytes(file, follow_links=True).decode("utf-8-sig").lower()
    except (OSError, ValueError) as error:
        raise UserError(f"--fit {file}: {error}; {remedy}") from error
    lines = csv.DictReader(text.splitlines(), skipinitialspace=True)
    points = []
    try:
        for line in lines:
            # Spreadsheets write lines of commas alone, too.
            if not any(line.values()):
                continue
            line.setdefault(EVERY, "0")
            point = {name: float(line[name]) for name in COLUMNS}
            in_range = [least <= point[name] <= MAX_AMOUNT for name, least in COLUMNS.items()]
            if not all(in_range) or point[EVERY] >= 2 * point["samples"]:
                raise ValueError
            points.append(list(point.values()))
    except (ValueError, LookupError, TypeError, csv.Error):
        raise UserError(f"--fit {file}: line {lines.line_num} cannot be fitted; {remedy}") from None
    if len(points) > MAX_POINTS:
        raise UserError(f"--fit {file}: it has {len(points):,} points; the most is {MAX_POINTS:,}; {remedy}")
    if len({batch for batch, *_ in points}) < 2:
        raise UserError(f"--fit {file}: it does not have two batch sizes; {remedy}")
    return np.array(points).T


def read_sweep(folder: Path, target: float) -> Array:
    """The same of a sweep over batch sizes, at each of them of its best learning rate.

    Raises:
        UserError: It is not a sweep, or all runs at fewer than two batch sizes have reached the target.
    """
    from largebatch.tools.reported_runs import columns
    from largebatch.tools.sweep.results import Results

    results = Results.read(folder)
    # A batch that grows is no size.
    groups = [group for group in results.groups if isinstance(group.settings.get(BATCH), int)]
    found = [group for group in groups if results.is_best(group)]
    if len(found) < 2:
        raise UserError(
            f"--fit {folder}: of {counted(len(found), 'listed batch size')}, all runs of a rate have finished; it "
            "takes two, as of --batch.global_batch_size=32,64"
        )
    points = []
    for group in found:
        batch = group.settings[BATCH]
        reached = results.training_until(target, group, "samples")
        if missing := len(group.runs) - len(reached.values):
            print(f"batch {batch:,} is left out: {missing} of its runs have not reached {target:g}")
            continue
        (evaluated_at,) = columns(next(iter(group.runs.values())).evaluations, "samples")
        every = np.diff(evaluated_at, prepend=0).max()
        points.append([batch, reached.mean, reached.std, len(reached.values), every])
    sizes = [size for size, *_ in points]
    if len(set(sizes)) < len(sizes):
        raise UserError(f"--fit {folder}: it varies more than batch size and rate; sweep these alone, or write a file")
    if len(points) < 2:
        raise UserError(
            f"--fit {folder}: all runs at {len(points)} of its batch sizes reached {target:g}; it takes two"
        )
    return np.array(points, float).T


def doubts(points: Array) -> Iterator[str]:
    """What is not known about points, but taken as if it were."""
    for batch, _, spread, seeds, every in points.T:
        if seeds > 1 and spread == every == 0:
            yield f"batch {batch:,.0f}: no spread over {seeds:g} seeds; if evaluations were rare, add a column {EVERY}"


def fit(points: Array) -> Fit:
    """Fit the form to the columns of `read_points`.

    A point has the weight 1 / (SE^2 + TUNING^2), where SE is the standard error of its mean, relative to it. The spread
    of a few seeds is itself uncertain: the relative variance is pooled over all batch sizes, and quantiles are those of
    the F distribution with its degrees of freedom. Of one seed each, no error is known.

    Raises:
        UserError: Any critical batch would be as likely.
    """
    batch, samples, spread, seeds, every = points
    samples = samples - every / 2
    log_batch = np.log(batch)
    log_samples = np.log(samples)
    seeds_to_spare = float((seeds - 1).sum())
    variance = ((seeds - 1) * (spread / samples) ** 2).sum() / max(seeds_to_spare, 1)
    errors = np.sqrt(variance / seeds + every**2 / 12 / samples**2 + TUNING**2)
    # Only a part of the errors is estimated: the degrees of freedom after Satterthwaite 1946.
    part = max((variance / seeds).mean() / (errors**2).mean(), 1e-3)
    degrees_of_errors = seeds_to_spare / part**2

    def fitted(log_critical: Array) -> tuple[Array, Array]:
        """The best log E_min for each log B_crit, and the deviations of the points from it, each over its error."""
        shape = np.logaddexp(0, log_batch - np.reshape(log_critical, (-1, 1)))
        log_least = np.average(log_samples - shape, axis=1, weights=errors**-2)
        return log_least, (log_samples - shape - log_least[:, None]) / errors

    grid = np.linspace(log_batch.min() - EDGE, log_batch.max() + EDGE, NUM_TRIED)
    _, deviations = fitted(grid)
    tried = (deviations**2).sum(axis=1)
    best = int(tried.argmin())
    limits = {0: 0.0, NUM_TRIED - 1: math.inf}
    log_critical = grid[best]
    if best not in limits:
        bounds = (grid[best - 1], grid[best + 1])
        log_critical = minimize_scalar(lambda place: (fitted(place)[1] ** 2).sum(), bounds=bounds).x
    (log_least,), deviations = fitted(log_critical)
    deviation = math.expm1(np.abs(deviations * errors).max())
    found = Fit(limits.get(best, math.exp(log_critical)), (), math.exp(log_least), deviation)
    if not seeds_to_spare:
        return found
    likely = np.flatnonzero(tried <= tried[best] + f_distribution.ppf(0.95, 1, degrees_of_errors))
    low, high = (limits.get(int(place), math.exp(grid[place])) for place in likely[[0, -1]])
    if (low, high) == (0, math.inf):
        raise UserError(
            "--fit: the points do not determine a critical batch, but allow any from 0 to infinity; add batch sizes or "
            "seeds, or correct the points, such as spreads far above their samples"
        )
    num_parameters = 1 if best in limits else 2
    p = None
    if len({*batch}) > num_parameters:
        degrees = len(batch) - num_parameters
        p = float(f_distribution.sf((deviations**2).sum() / degrees, degrees, degrees_of_errors))
    return replace(found, interval=(low, high), p=p)
