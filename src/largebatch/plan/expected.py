"""The published figure of a recipe: in words, and compared with the evaluations of a run.

A run is inside if it lies in the range that holds one more of the source's runs with a probability of 95 %: the mean ±
t s sqrt(1 + 1 / n), with the standard deviation s of n seeds, and the quantile t of Student's distribution with n - 1
degrees of freedom.
"""

import math
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from largebatch.batch.student_t import student_t
from largebatch.config.sections import Expected
from largebatch.plan.contract import RunPlan

Verdict = Literal["inside", "outside", "unknown"]


@dataclass(frozen=True)
class Comparison:
    """How a run compares with its figure; with `reached`, numbers are amounts of training in the unit of `after`."""

    metric: str
    source: str
    found: float | None  # None if the run has not come so far, or does not reach the target
    low: float | None  # the range, as above; None for a single seed
    high: float | None
    verdict: Verdict

    def __str__(self) -> str:
        found = "not reached" if self.found is None else f"{self.found:,.6g}"
        if self.low is None:
            return f"{self.metric}: {found}; of one seed, no range is known ({self.source})"
        verdict = "not decided by" if self.verdict == "unknown" else self.verdict
        return f"{self.metric}: {found}, {verdict} {self.low:,.6g} to {self.high:,.6g} ({self.source})"


def range_of(expected: Expected) -> tuple[float, float] | None:
    """The range that holds one more of the source's runs with a probability of 95 %; None for a single seed."""
    if expected.seeds == 1:
        return None
    center = expected.after.length.amount if expected.reached else expected.value
    margin = student_t(expected.seeds - 1) * expected.spread * math.sqrt(1 + 1 / expected.seeds)
    return center - margin, center + margin


def compare(plan: RunPlan, evaluations: Sequence[Mapping[str, Any]]) -> Comparison | None:
    """Compare the lines of evaluations.jsonl with the figure of the plan; None if it has none."""
    expected = plan.expected
    if expected is None:
        return None
    low, high = range_of(expected) or (None, None)
    length = expected.after.length
    lines = [
        (line["step"], value)
        for line in evaluations
        if "step" in line and (value := number(line, expected.metric)) is not None
    ]
    found: float | None = None
    is_over = False
    if expected.reached:
        is_reached = operator.ge if expected.reached == "at_least" else operator.le
        for step, value in lines:
            place = float(plan.timeline.progress(step, length.unit))
            if is_reached(value, expected.value):
                found = place
                break
            # A run that has passed the range without reaching the target is outside, too.
            is_over = high is not None and place > high
    else:
        due = plan.timeline.steps_in(length)
        found = next((value for step, value in lines if step >= due), None)
    verdict: Verdict = "unknown"
    if low is not None and high is not None and (found is not None or is_over):
        verdict = "inside" if found is not None and low <= found <= high else "outside"
    return Comparison(expected.metric, expected.source, found, low, high, verdict)


def describe_figure(expected: Expected) -> list[str]:
    """The figure as lines of text."""
    length = expected.after.length
    spread = ""
    of = "one seed"
    if expected.seeds > 1:
        spread = f" ± {expected.spread:,.6g}"
        of = f"mean and standard deviation of {expected.seeds:,} seeds"
    if expected.reached:
        word = expected.reached.replace("_", " ")
        text = f"{expected.metric} {word} {expected.value:.6g} first after {length.amount:,g}{spread} {length.unit}"
    else:
        text = f"{expected.metric} {expected.value:.6g}{spread} after {length}"
    lines = [f"{text}: {of}"]
    if ends := range_of(expected):
        lines.append("95 % of such runs are between {:,.6g} and {:,.6g}".format(*ends))
    return [*lines, f"published in {expected.source}"]


def number(line: Mapping[str, Any], name: str) -> float | None:
    """The number of this name in a line of a run's numbers; None if there is none, or it is not finite."""
    value = line.get(name)
    return value if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None
