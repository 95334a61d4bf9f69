"""What the optimizer gets in a layout, beside what it gets in one process and from each sample alone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.linalg import lstsq, norm

from largebatch.errors import UserError
from largebatch.tools.audit.loop import Layout, Loop
from largebatch.tools.audit.observe import Observed
from largebatch.words import counted, some

# A parameter whose gradient is so small a part of all is rounding, such as the bias of an attention's keys.
NEGLIGIBLE = 1e-10
# Samples can be told apart if the smallest singular value of their gradients is so large a part of the largest.
INDEPENDENT = 1e-5
# What rounding may make of a gradient, as a part of it, by torch's default dtype.
TOLERANCES = {"float64": 1e-7, "float32": 1e-3}
# What it may make at most, as multiples of what it makes if the samples are in reverse order, as in bf16.
MULTIPLES_OF_NOISE = 5
# Factors that differ from 1 by less are shown as 1.
SAME_FACTOR = 1e-4
# A sample that weighs less is lost.
NO_WEIGHT = 0.01


@dataclass(frozen=True)
class Outcome:
    """The reference's samples in another layout."""

    by_rank: Sequence[Observed]
    num_steps: int
    # How the gradient of the first step differs: "multiple" of that of one process, of which only the "update" may
    # differ, "unequal" weights of samples, some of which are "lost", "coupled" samples, which change each other's; or
    # its process's "own", or "clipped" by itself; or another number of "steps".
    kind: str
    said: str  # the same in words
    factors: Mapping[str, float]  # those of its parameters


@dataclass(frozen=True)
class Reference:
    """A batch in one backward pass of one process, and each of its samples alone.

    The gradient is a sum over samples unless they change each other's losses, as by BatchNorm.
    """

    loop: Loop
    parts: Mapping[str, slice]  # the place of each parameter in a gradient
    gradient: np.ndarray
    noise: np.ndarray  # by how much the gradient differs if the samples are in reverse order
    update: np.ndarray
    update_noise: np.floating  # what rounding may make of it
    samples: Sequence[np.ndarray]  # the gradient of each; empty if a sample cannot be trained alone

    def outcome(self, layout: Layout, num_samples: int) -> Outcome:
        """Train on the samples in a layout, and compare."""
        by_rank = self.loop.call(layout, range(num_samples))
        num_steps = min(len(each.gradients) for each in by_rank)
        if num_steps != 1:
            return Outcome(by_rank, num_steps, "steps", f"{counted(num_steps, 'step')} instead of one", {})
        if any(each.parts != self.parts for each in by_rank):
            raise UserError(f"{layout}: the returned model has other parameters than in one process")
        gradient = by_rank[0].unclipped[0]
        factors = self._factors(gradient)
        kind, said = self._difference(gradient, factors)
        is_same = np.allclose([*factors.values()], 1, rtol=SAME_FACTOR)
        if is_same and norm(by_rank[0].update - self.update) > self.update_noise:
            kind = "update"
            said = f"the same, but the update is {norm(by_rank[0].update) / norm(self.update):.4g} times as large"
        if step_that_differs(each.unclipped for each in by_rank):
            kind = "own" if step_that_differs(each.gradients for each in by_rank) else "clipped"
        return Outcome(by_rank, num_steps, kind, said, factors)

    def _difference(self, gradient: np.ndarray, factors: Mapping[str, float]) -> tuple[str, str]:
        """Its kind, and the same in words."""
        others = [name for name, factor in factors.items() if np.isnan(factor)]
        if not others:
            times = span(factors.values())
            return "multiple", "the same" if times == "1" else f"{times} times"
        weights = self.weights_in(gradient)
        expected = self.weights_in(self.gradient)
        if weights is None or expected is None:
            return "coupled", "another gradient" + (f" of {some(others)}" if len(others) < len(factors) else "")
        ratios = np.divide(weights, expected, out=np.ones_like(weights), where=expected != 0)
        if lost := [str(sample) for sample in np.flatnonzero(np.abs(ratios) < NO_WEIGHT)]:
            return "lost", f"without samples {some(lost)} of {len(ratios)}"
        return "unequal", f"samples count {span(ratios)} times"

    def weights_in(self, gradient: np.ndarray) -> np.ndarray | None:
        """The weight of each sample in a gradient; None if it is not a sum over them, or they cannot be told apart."""
        if not self.samples:
            return None
        basis = np.stack(self.samples, axis=1)
        weights, _, rank, _ = lstsq(basis, gradient, rcond=INDEPENDENT)
        # A sample without a target has no gradient.
        told_apart = rank == np.count_nonzero(basis.any(axis=0))
        error = norm(basis @ weights - gradient) / norm(gradient)
        return weights if told_apart and error <= self._rounding() / norm(self.gradient) else None

    def _factors(self, gradient: np.ndarray) -> Mapping[str, float]:
        """By parameter: how many times the reference a gradient is; NaN if it is no multiple of it."""
        factors = {}
        for name, part in self.parts.items():
            expected = self.gradient[part]
            size = norm(expected)
            rounding = self._rounding(part)
            if size > rounding:
                factor = float(gradient[part] @ expected / size**2)
                error = norm(gradient[part] - factor * expected)
                factors[name] = factor if error <= rounding * max(abs(factor), 1) else np.nan
        return factors

    def _rounding(self, part: slice = slice(None)) -> np.floating:
        """What rounding may make of the gradient."""
        return max(
            TOLERANCES[self.loop.precision] * norm(self.gradient[part]),
            MULTIPLES_OF_NOISE * norm(self.noise[part]),
            NEGLIGIBLE * norm(self.gradient),
        )


def step_that_differs(by_rank: Iterable[Sequence[np.ndarray]]) -> int:
    """The number of the first step in which processes have different gradients; 0 if there is none."""
    for number, gradients in enumerate(zip(*by_rank, strict=False), start=1):
        if not np.allclose(gradients, gradients[0], rtol=1e-5, atol=0):
            return number
    return 0


def span(values: Iterable[float]) -> str:
    """The smallest and the largest of several numbers."""
    ends = min(values), max(values)
    return " to ".join(dict.fromkeys(f"{end:.4g}" for end in ends))
