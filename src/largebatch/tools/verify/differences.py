"""The numbers that a run has written, their differences from those of another run, and the limits of rounding."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.linalg import norm
from numpy.typing import NDArray

from largebatch.errors import UserError
from largebatch.storage.run_folder import RunFolder

# A recipe that enlarges rounding errors may differ by this multiple of what the smallest ones grow to.
ROUNDING_FACTOR = 10
# The norm of a gradient is closer to a difference of large numbers than the other measures.
GRAD_NORM_FACTOR = 10
# The usual difference of the first update, relative to it, by precision. Adam's first update is the sign of each
# gradient, which rounding flips where a gradient is nearly zero. If that is one element in 40,000, updates differ by
# 1 %. In bf16 each micro-batch's part of a gradient is rounded by up to 0.4 %, which flips one element in 1,600.
UPDATE = {"fp64": 0.01, "fp32": 0.01, "bf16": 0.05}
# Smaller updates, relative to the weights, are lost in the rounding of fp32, which may be 0.6 % of this.
VISIBLE = 1e-5


Weights = Mapping[str, NDArray[np.float64]]
"""Weights and running statistics by name."""


@dataclass(frozen=True)
class Trained:
    """The numbers of a finished run."""

    metrics: list[dict[str, Any]]  # the logged steps
    evaluations: list[dict[str, Any]]
    weights: Weights  # the final ones
    updated: Weights = field(default_factory=dict)  # those after the first update, for which alone a run is made
    initial: Weights = field(default_factory=dict)  # those before it, which only a reference needs


def read_run(run_dir: Path) -> Trained:
    """Read the numbers of a finished run.

    Raises:
        UserError: The run trained no step, or wrote no weights.
    """
    from safetensors.numpy import load_file

    run = RunFolder(run_dir)
    weights: dict[str, NDArray[np.float64]] = {}
    for file in sorted(run.model_dir.glob("*.safetensors")):
        weights |= {name: np.asarray(tensor, dtype=np.float64) for name, tensor in load_file(file).items()}
    metrics = run.metrics()
    if not metrics:
        raise UserError("the script trained no step")
    if not weights:
        raise UserError("the script wrote no weights: end it with run.finish()")
    return Trained(metrics, run.evaluations(), weights)


Differences = Mapping[str, float]
"""The largest relative differences of a run from its reference by measure, each over all steps."""

MEASURES = (
    "loss",
    "grad_norm",
    "lr",
    # The first update, which is the weights' difference before errors of an optimizer hide in those of rounding.
    "update",
    "parameters",
    "evaluation",
    # The first step, which no earlier rounding has enlarged.
    "first_loss",
    "first_grad_norm",
)


def limits(
    tolerance: float, precision: str, rounding: Differences | None = None, sums_within_the_model: bool = False
) -> Differences:
    """The limits of each difference; learning rates must be equal.

    Args:
        tolerance: The difference that rounding usually makes.
        precision: The recipe's, which decides the limit of the first update.
        rounding: The differences that rounding alone makes in a recipe that enlarges it, by measure. Nothing enlarges
            the rounding of the first step, unless the model itself sums over processes.
        sums_within_the_model: Whether it does so, as synchronized BatchNorm does: then activations are rounded
            differently, and the layers after them enlarge that.
    """
    granted = dict.fromkeys(MEASURES, tolerance)
    granted |= dict.fromkeys(("grad_norm", "first_grad_norm"), GRAD_NORM_FACTOR * tolerance)
    granted["update"] = UPDATE[precision]
    for name, made in (rounding or {}).items():
        if sums_within_the_model or not name.startswith("first_"):
            granted[name] = max(granted[name], ROUNDING_FACTOR * made)
    return granted | {"lr": 0.0}


# Beyond these, mathematical errors could not be told apart from rounding.
MAX_DISTINGUISHABLE = {**limits(1e-3, "fp32"), "update": 0.3, "parameters": 1e-2}


def beyond(differences: Differences, allowed: Differences) -> frozenset[str]:
    """The measures whose differences are larger than their limits."""
    return frozenset(name for name, limit in allowed.items() if not differences[name] <= limit)


def compare(trained: Trained, reference: Trained, without: Set[str] = frozenset()) -> Differences:
    """The largest relative differences; infinite if a step, an evaluation or a weight is missing.

    Args:
        trained: The numbers of a run.
        reference: Those that they should be.
        without: Names of weights that are not compared.
    """
    metrics = trained.metrics
    expected = reference.metrics
    updates = of_updates(trained, reference, without)
    weights = _of_tensors(trained.weights, reference.weights, without)
    return {
        "loss": _of_lines(metrics, expected, "loss"),
        "grad_norm": _of_lines(metrics, expected, "grad_norm"),
        "lr": _of_lines(metrics, expected, "lr"),
        "update": max(updates.values(), default=0.0),
        "parameters": max(weights.values(), default=0.0),
        "evaluation": _of_lines(trained.evaluations, reference.evaluations),
        "first_loss": _of_lines(metrics[:1], expected[:1], "loss"),
        "first_grad_norm": _of_lines(metrics[:1], expected[:1], "grad_norm"),
    }


def _of_lines(lines: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]], *names: str) -> float:
    """The largest relative difference of the numbers with these names; without names, of all that the reference has."""
    if len(lines) != len(reference):
        return math.inf
    largest_ratio = 0.0
    for line, expected in zip(lines, reference, strict=True):
        for name in names or expected:
            found = line.get(name, math.nan)
            if found != expected[name]:
                largest_ratio = max(largest_ratio, _ratio(abs(found - expected[name]), abs(expected[name])))
    return largest_ratio


def factors_of_the_first_step(trained: Trained, reference: Trained) -> tuple[float, float]:
    """The first step's loss and gradient norm, each as a multiple of the reference's."""
    found = trained.metrics[0]
    expected = reference.metrics[0]

    def factor(name: str) -> float:
        return 1.0 if found.get(name) == expected[name] else _ratio(found.get(name, math.nan), expected[name])

    return factor("loss"), factor("grad_norm")


def largest(trained: Trained, expected: Trained, noise: Set[str], usual: float) -> str:
    """Which weights, besides noise, differ most: already in their first update, if it differs by more than usual."""
    updates = of_updates(trained, expected, noise)
    weights = _of_tensors(trained.weights, expected.weights, noise)
    update = max(updates, key=updates.__getitem__, default=None)
    if update is not None and updates[update] > usual:
        return f"the first update differs most in {update}, by {updates[update]:.1e} of its norm"
    return f"the weights that differ most are {max(weights, key=weights.__getitem__)}"


def of_updates(trained: Trained, reference: Trained, without: Set[str] = frozenset()) -> dict[str, float]:
    """The difference of each tensor's first update, relative to its norm, if the reference moves it visibly.

    Empty if no run of the first update was made. Names in `without` are left out.
    """
    found = {}
    expected = {}
    if trained.updated:
        for name, start in reference.initial.items():
            update = reference.updated[name] - start
            # "Not smaller" includes NaN.
            if not norm(update) <= VISIBLE * norm(start):
                expected[name] = update
                end = trained.updated.get(name)
                if end is not None and end.shape == start.shape:
                    found[name] = end - start
    return _of_tensors(found, expected, without)


def _of_tensors(weights: Weights, expected: Weights, without: Set[str]) -> dict[str, float]:
    """The difference of each tensor, relative to its norm; infinite if one of the runs lacks it.

    A tensor near zero, such as a bias whose gradient is only rounding errors, is measured by the norm that it would
    have if its elements were a thousandth of the model's. Names in `without` are left out.
    """
    squares = sum(float(np.square(tensor).sum()) for tensor in expected.values())
    typical = np.sqrt(squares / max(1, sum(tensor.size for tensor in expected.values())))
    differences = {}
    for name in (weights.keys() | expected.keys()) - without:
        differences[name] = math.inf
        if name in weights and name in expected and weights[name].shape == expected[name].shape:
            scale = max(norm(expected[name]), 1e-3 * typical * np.sqrt(expected[name].size))
            differences[name] = _ratio(float(norm(weights[name] - expected[name])), float(scale))
    return differences


def _ratio(difference: float, scale: float) -> float:
    """The ratio, or infinity where it is not finite, because the maximum of NaN and a number may be either."""
    ratio = difference / scale if scale else math.inf
    return ratio if math.isfinite(ratio) else math.inf
