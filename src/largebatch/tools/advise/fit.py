"""The critical batch from the samples that runs at several batch sizes needed to reach the same target.

The form is E = E_min (1 + B / B_crit), with samples E and batch B (`advice`). Both of its parameters are fitted by
weighted least squares to log E. For each B_crit the best E_min has a closed form, so only B_crit is searched, also at
its limits: at 0 the number of steps is the same at every batch, and at infinity the number of samples.
"""

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

from largebatch.errors import UserError
from largebatch.regular_file import read_bytes

TUNING = 0.04
"""How far, relatively, the samples of a tuned batch size may be from those of the best hyperparameters: assumed."""
P_OF_FAILURE = 0.01
"""The form fails if points that follow it would deviate from it as much with a probability below this."""
COLUMNS = ("batch", "samples", "spread", "seeds")
MAX_AMOUNT = 1e18
EDGE = 10.0  # B_crit is searched from e^-10 times the smallest batch to e^10 times the largest: beyond, E cannot tell
NUM_TRIED = 2001
CHI_SQUARE_95 = float(chi2.ppf(0.95, 1))

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Fit:
    """The form, as it was fitted to a number of points."""

    num_points: int
    critical_batch: float  # samples; 0 or infinity if one of these limits fits best
    critical_batch_error: float  # standard error, as below; neither is defined at a limit
    interval: tuple[float, float]  # of the critical batch, with 95 % confidence; its ends may be 0 and infinity
    least_samples: float  # E_min
    least_samples_error: float
    largest_residual: float  # the samples of the point that deviates most, divided by those of the form, minus 1
    worst_batch: float  # the batch size of that point
    chi_square: float
    degrees_of_freedom: int  # 0 if there are too few points to test the form

    @property
    def p(self) -> float:
        """The probability of deviations at least this large if the form holds; 1 if it cannot be tested."""
        return float(chi2.sf(self.chi_square, self.degrees_of_freedom)) if self.degrees_of_freedom else 1.0


def read_points(file: Path) -> Array:
    """The columns of a CSV file, in the order of `COLUMNS`; a header may name them in another order.

    Raises:
        UserError: The file cannot be read, or a line of it is wrong.
    """
    remedy = f"write lines of {', '.join(COLUMNS)}: positive numbers, but the spread may be 0"
    try:
        text = read_bytes(file, follow_links=True).decode("utf-8-sig")
        lines = [(number, row) for number, row in enumerate(csv.reader(text.splitlines()), 1) if any(row)]
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"--fit {file}: {error}; {remedy}") from error
    places = [0, 1, 2, 3]
    headings = [cell.strip().lower() for cell in lines[0][1]] if lines else []
    if any(cell.startswith(COLUMNS[0]) for cell in headings):
        del lines[0]
        places = [next((at for at, cell in enumerate(headings) if cell.startswith(name)), -1) for name in COLUMNS]
        if -1 in places:
            raise UserError(f"--fit {file}: the header has no column {COLUMNS[places.index(-1)]!r}; {remedy}")
    points = []
    for number, row in lines:
        try:
            batch, samples, spread, seeds = (float(row[place]) for place in places)
        except (ValueError, IndexError):
            batch = samples = spread = seeds = math.nan
        if not (batch >= 1 and samples >= 1 and spread >= 0 and seeds >= 1 and batch + samples + spread <= MAX_AMOUNT):
            raise UserError(f"--fit {file}: line {number} is {','.join(row)!r}; {remedy}")
        points.append((batch, samples, spread, seeds))
    if len({batch for batch, *_ in points}) < 2:
        raise UserError(f"--fit {file}: two parameters need points at two or more batch sizes; {remedy}")
    return np.array(points).T


def fit(points: Array) -> Fit:
    """Fit the form to the columns of `read_points`.

    A point has the weight 1 / (SE^2 + TUNING^2), where SE is the standard error of its mean, relative to it.
    """
    batch, samples, spread, seeds = points
    log_batch, log_samples = np.log(batch), np.log(samples)
    weights = 1 / (spread**2 / seeds / samples**2 + TUNING**2)

    def best_at(log_critical: Array) -> tuple[Array, Array, Array]:
        """The best log E_min for each log B_crit, the residuals of the points, and chi-square."""
        deviations = log_samples - np.logaddexp(0, log_batch - log_critical[:, None])
        log_least = np.average(deviations, axis=1, weights=weights)
        residuals = deviations - log_least[:, None]
        return log_least, residuals, (weights * residuals**2).sum(axis=1)

    grid = np.linspace(log_batch.min() - EDGE, log_batch.max() + EDGE, NUM_TRIED)
    tried = best_at(grid)[2]
    best = int(tried.argmin())
    at_limit = best in (0, NUM_TRIED - 1)
    finer = grid[[best]] if at_limit else np.linspace(grid[best - 1], grid[best + 1], NUM_TRIED)
    log_critical = finer[[best_at(finer)[2].argmin()]]
    (log_least,), (residuals,), (chi_square,) = best_at(log_critical)
    likely = np.exp(grid[tried <= chi_square + CHI_SQUARE_95])
    # The derivative of log E by log B_crit at each point, from which the parameters' covariance follows.
    slopes = -1 / (1 + np.exp(log_critical - log_batch))
    slope = np.average(slopes, weights=weights)
    relative_error = 1 / math.sqrt((weights * (slopes - slope) ** 2).sum())
    critical, least = math.exp(log_critical[0]), math.exp(log_least)
    worst = int(np.abs(residuals).argmax())
    return Fit(
        num_points=len(batch),
        critical_batch={0: 0.0, NUM_TRIED - 1: math.inf}.get(best, critical),
        critical_batch_error=critical * relative_error,
        interval=(
            float(likely[0]) if tried[0] > chi_square + CHI_SQUARE_95 else 0.0,
            float(likely[-1]) if tried[-1] > chi_square + CHI_SQUARE_95 else math.inf,
        ),
        least_samples=least,
        least_samples_error=least * math.sqrt(1 / weights.sum() + (slope * relative_error) ** 2),
        largest_residual=math.expm1(residuals[worst]),
        worst_batch=batch[worst],
        chi_square=chi_square,
        degrees_of_freedom=len(batch) - (1 if at_limit else 2),
    )
