"""What the results of an experiment allow to say."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from experiments import Experiment, Ordering
from largebatch.tools.sweep.verdicts import Cell, is_clearly_lower
from runs import ANY_RULE, Point, Result

Verdict = Literal["holds", "does not hold", "cannot be told"]


def cells_of(results: Iterable[Result], experiment: Experiment, base_lr: float) -> dict[tuple[str, int], Cell]:
    """The results by rule and batch size; those at the reference stand under every rule."""
    found: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        if result.point.base_lr != base_lr:
            continue
        rules = experiment.rules if result.point.rule == ANY_RULE else [result.point.rule]
        for rule in rules:
            found.setdefault((rule, result.point.batch), []).append(result)
    return {
        place: Cell(tuple(each.value for each in group), sum(each.diverged for each in group))
        for place, group in found.items()
    }


def best_base_lr(results: Mapping[Point, Result], experiment: Experiment) -> float:
    """The base learning rate with the lowest mean at the reference batch size."""
    rates: dict[float, list[float]] = {}
    for point, result in results.items():
        if point.rule == ANY_RULE and point.base_lr in experiment.base_lrs:
            rates.setdefault(point.base_lr, []).append(result.value)
    return min(rates, key=lambda rate: statistics.fmean(rates[rate]))


def verdict(lower: Cell, higher: Cell) -> Verdict:
    """Whether the first is lower than the second, with 95 % confidence: Welch's t, two-sided."""
    if is_clearly_lower(lower, higher, 2):
        return "holds"
    return "does not hold" if is_clearly_lower(higher, lower, 2) else "cannot be told"


def verdicts(
    cells: Mapping[tuple[str, int], Cell], orderings: Sequence[Ordering]
) -> list[tuple[Ordering, Cell, Cell, Verdict]]:
    """The verdict on each ordering whose runs were made."""
    return [
        (ordering, lower, higher, verdict(lower, higher))
        for ordering in orderings
        if (lower := cells.get((ordering.lower, ordering.batch)))
        and (higher := cells.get((ordering.higher, ordering.batch)))
    ]


def flat_up_to(cells: Mapping[tuple[str, int], Cell], experiment: Experiment, rule: str) -> int:
    """The largest batch size up to which no result of the rule is clearly higher than the reference's."""
    reference = cells[rule, experiment.reference]
    largest = experiment.reference
    for batch in experiment.batches:
        if (rule, batch) not in cells or verdict(reference, cells[rule, batch]) == "holds":
            break
        largest = batch
    return largest
