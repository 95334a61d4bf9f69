"""What the optimizer gets in a layout, beside what it gets in one process and from each sample alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from largebatch.tools.audit.loop import Layout
from largebatch.tools.audit.observe import Gradients, Observed, Step

# A parameter whose gradient is so small a part of all is rounding, such as the bias of an attention's keys.
NEGLIGIBLE = 1e-10
# Samples can be told apart if the smallest singular value of their gradients is so large a part of the largest.
INDEPENDENT = 1e-5
# What rounding may make of a gradient, as a part of it, by torch's default dtype.
TOLERANCES = {"float64": 1e-7, "float32": 1e-3}
# What it may make at most, as multiples of what it makes if the samples are in reverse order, as in bf16.
MULTIPLES_OF_NOISE = 5
MAX_NOISE = 0.02


@dataclass(frozen=True)
class Reference:
    """A batch in one backward pass of one process, and each of its samples alone.

    The gradient is a sum over samples unless they change each other's losses, as by BatchNorm.
    """

    observed: Observed
    samples: Sequence[Observed]  # empty if a sample cannot be trained alone
    noise: Gradients  # by how much the gradient differs if the samples are in reverse order
    precision: str

    @property
    def step(self) -> Step:
        return self.observed.steps[0]

    @cached_property
    def weights(self) -> np.ndarray | None:
        """The weight of each sample; None if they change each other's losses, or cannot be told apart."""
        return self.weights_in(self.step.unclipped)

    @cached_property
    def relative_noise(self) -> float:
        """The noise as a part of the gradient."""
        return float(np.linalg.norm(self._flat(self.noise)) / np.linalg.norm(self._flat(self.step.unclipped)))

    def weights_in(self, gradient: Gradients) -> np.ndarray | None:
        """The weight of each sample in a gradient; None if it is not a sum over them, or they cannot be told apart."""
        weights, error = self._as_sum(gradient)
        return weights if error <= max(TOLERANCES[self.precision], MULTIPLES_OF_NOISE * self.relative_noise) else None

    def factors(self, gradient: Gradients) -> Mapping[str, float | None]:
        """By parameter: how many times the reference a gradient is; None if it is no multiple of it."""
        least = NEGLIGIBLE * float(np.linalg.norm(self._flat(self.step.unclipped)))
        factors: dict[str, float | None] = {}
        for name, expected in self.step.unclipped.items():
            size = float(np.linalg.norm(expected))
            noise = MULTIPLES_OF_NOISE * float(np.linalg.norm(self.noise.get(name, 0)))
            if size > max(least, noise):
                found = gradient.get(name, np.zeros_like(expected))
                factor = float(np.sum(found * expected)) / size**2
                error = np.linalg.norm(found - factor * expected)
                rounding = max(TOLERANCES[self.precision] * size, noise) * max(float(np.linalg.norm(found)) / size, 1)
                factors[name] = factor if error <= rounding else None
        return factors

    def _as_sum(self, gradient: Gradients) -> tuple[np.ndarray | None, float]:
        """The weights of the sum over samples that is closest to a gradient, and its relative error."""
        found = self._flat(gradient)
        if not self.samples or len(found) < len(self.samples):
            return None, np.inf
        basis = np.stack([self._flat(each.steps[0].unclipped) for each in self.samples], axis=1)
        weights = np.zeros(len(self.samples))
        # A sample without a target has no gradient.
        has_target = np.linalg.norm(basis, axis=0) > 0
        weights[has_target], _, _, singular = np.linalg.lstsq(basis[:, has_target], found, rcond=None)
        if not has_target.any() or singular[-1] < INDEPENDENT * singular[0]:
            return None, np.inf
        return weights, float(np.linalg.norm(basis @ weights - found) / np.linalg.norm(found))

    def _flat(self, gradient: Gradients) -> np.ndarray:
        """A gradient as one vector, with zeros for parameters that have none."""
        expected = self.step.unclipped
        return np.concatenate([gradient.get(name, np.zeros_like(each)).ravel() for name, each in expected.items()])


@dataclass(frozen=True)
class Outcome:
    """The reference's samples in another layout."""

    layout: Layout
    by_rank: Sequence[Observed]
    reference: Reference

    @property
    def num_steps(self) -> int:
        return min(len(each.steps) for each in self.by_rank)

    @property
    def step(self) -> Step:
        """The first one of the first process."""
        return self.by_rank[0].steps[0]

    @cached_property
    def factors(self) -> Mapping[str, float | None]:
        """By parameter; None for one whose gradient is no multiple of that of one process."""
        return self.reference.factors(self.step.unclipped)

    @cached_property
    def weights(self) -> np.ndarray | None:
        """How much each sample counts, as a multiple of what it does in one process, if that can be told."""
        expected = self.reference.weights
        found = self.reference.weights_in(self.step.unclipped)
        if expected is None or found is None:
            return None
        weights: np.ndarray = np.divide(found, expected, out=np.ones_like(found), where=expected != 0)
        return weights


def step_that_differs(by_rank: Sequence[Observed], of: str) -> int | None:
    """The first step in which processes have different "gradients" or "unclipped"; None if there is none."""
    for index, (first, *others) in enumerate(zip(*(each.steps for each in by_rank), strict=False)):
        if not all(_is_equal(getattr(each, of), getattr(first, of)) for each in others):
            return index
    return None


def _is_equal(found: Gradients, expected: Gradients) -> bool:
    return found.keys() == expected.keys() and all(
        np.allclose(found[name], expected[name], rtol=1e-5, atol=0) for name in expected
    )
