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
# What rounding may make of a gradient that is added up in another order, at most and, if it is measured, in bf16.
TOLERANCES = {"float64": 1e-7, "float32": 1e-3}
TOLERANCE_IN_BF16 = 0.05


@dataclass(frozen=True)
class Reference:
    """A batch in one backward pass of one process, and each of its samples alone.

    The gradient is a sum over samples unless they change each other's losses, as by BatchNorm.
    """

    observed: Observed
    samples: Sequence[Observed]  # empty if a sample cannot be trained alone
    precision: str

    @property
    def step(self) -> Step:
        return self.observed.steps[0]

    @cached_property
    def weights(self) -> np.ndarray | None:
        """The weight of each sample; None if they change each other's losses, or cannot be told apart."""
        return self.weights_in(self.step.unclipped)

    @cached_property
    def tolerance(self) -> float:
        """The relative difference that rounding makes: in bf16, ten times that of the sum over samples."""
        least = TOLERANCES[self.precision]
        error = 10 * self._as_sum(self.step.unclipped)[1]
        return error if least < error < TOLERANCE_IN_BF16 else least

    def weights_in(self, gradient: Gradients) -> np.ndarray | None:
        """The weight of each sample in a gradient; None if it is not a sum over them, or they cannot be told apart."""
        weights, error = self._as_sum(gradient)
        return weights if error <= self.tolerance else None

    def factors(self, gradient: Gradients) -> Mapping[str, float | None]:
        """By parameter: how many times the reference a gradient is; None if it is no multiple of it."""
        least = NEGLIGIBLE * np.linalg.norm(self._flat(self.step.unclipped))
        factors: dict[str, float | None] = {}
        for name, expected in self.step.unclipped.items():
            size = float(np.linalg.norm(expected))
            if size > least:
                found = gradient.get(name, np.zeros_like(expected))
                factor = float(np.sum(found * expected)) / size**2
                error = np.linalg.norm(found - factor * expected)
                is_multiple = error <= self.tolerance * max(float(np.linalg.norm(found)), size)
                factors[name] = factor if is_multiple else None
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
        return len(self.by_rank[0].steps)

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

    @property
    def norm(self) -> float:
        """What clipping takes for the gradient's norm, as a multiple of it; 0 without clipping."""
        step = self.step
        return step.norm and step.norm / float(np.sqrt(sum(np.sum(each**2) for each in step.unclipped.values())))

    def is_equal_on_all(self, of: str) -> bool:
        """Whether all processes have the same in their first step, "gradients" or "unclipped"."""
        first, *others = (getattr(each.steps[0], of) for each in self.by_rank)
        return all(
            each.keys() == first.keys()
            and all(np.allclose(each[name], first[name], rtol=1e-5, atol=0) for name in first)
            for each in others
        )
