"""What the runs of a sweep have reached, as a table."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from largebatch.errors import UserError
from largebatch.storage.run_folder import RunFolder
from largebatch.system.failures import Kind
from largebatch.tools.reported_runs import ReportedRun, columns, read_runs
from largebatch.tools.sweep.points import BATCH, RATE, Sweep
from largebatch.tools.sweep.verdicts import Cell, is_clearly_lower
from largebatch.words import aligned


@dataclass(frozen=True, eq=False)
class Group:
    """The runs with the same settings, which differ in their seeds."""

    settings: dict[str, Any]  # the values of the swept fields
    runs: dict[int, ReportedRun]  # those that have begun, by seed
    losses: dict[int, float]  # of those that are over: the metric, negated if higher is better; infinite if diverged

    @cached_property
    def cell(self) -> Cell:
        """The losses that are finite."""
        finite = tuple(filter(math.isfinite, self.losses.values()))
        return Cell(finite, len(self.losses) - len(finite))


@dataclass(frozen=True)
class Results:
    """A sweep, and what its runs have reached."""

    sweep: Sweep
    groups: list[Group]

    @classmethod
    def read(cls, folder: Path) -> "Results":
        """The results in a sweep's folder; UserError if no point has begun."""
        sweep = Sweep.read(folder)
        begun = [point for point in sweep.points if RunFolder(folder / point.name).plan_file.is_file()]
        if not begun:
            raise UserError(f"{folder}: no point of the sweep has begun yet")
        groups = {json.dumps(point.settings): Group(point.settings, {}, {}) for point in sweep.points}
        runs = read_runs([folder / point.name for point in begun])
        for point, run in zip(begun, runs, strict=True):
            group = groups[json.dumps(point.settings)]
            group.runs[point.seed] = run
            kind = run.ending.kind if run.ending else None
            (values,) = columns(run.evaluations, sweep.metric)
            if kind == Kind.TRAINING:
                group.losses[point.seed] = math.inf
            elif kind == Kind.FINISHED and values.size:
                group.losses[point.seed] = sweep.sign * float(values[-1])
        return cls(sweep, list(groups.values()))

    def table(self, target: float | None = None) -> str:
        """A row for each group; with a target, a value of the metric, also the training until it was reached."""
        rows = {}
        for group in self.groups:
            cells = {self.sweep.metric: shown(group.cell, self.sweep.sign), "finding": self._finding(group)}
            if target is not None:
                for axis in ("samples", "tokens", "minutes"):
                    cells[f"{axis} to {target:g}"] = shown(self._training_until(target, group, axis))
            values = (f"{name.rpartition('.')[2]}={json.dumps(value)}" for name, value in group.settings.items())
            rows[" ".join(values)] = cells
        title = f"{self.sweep.metric} of the last evaluation, mean ± standard deviation over seeds (number of seeds)"
        over = sum(len(group.losses) for group in self.groups)
        count = len(self.sweep.points)
        return "\n".join([f"{title}; {over} of {count} points are over", *aligned(rows)])

    def _finding(self, group: Group) -> str:
        """Whether its rate is the best of those with the same other settings.

        Also whether the scaling rule predicts, from the first batch size's best rate, the best rate of the others.
        """
        rivals = self._stable(group.settings)
        if not rivals or RATE not in group.settings or not group.losses:
            return ""
        best = rivals[0]
        rate = group.settings[RATE]
        found = []
        if group is best:
            found.append("best")
            rates = [each.settings[RATE] for each in self.groups]
            if rate in (min(rates), max(rates)) and all(each.losses for each in self.groups):
                found[0] += " (at an end of the listed rates: extend the list)"
        first_size = self.groups[0].settings.get(BATCH)
        best_of_first_size = self._stable({**group.settings, BATCH: first_size})[:1]
        is_predicted = rate in [each.settings[RATE] for each in best_of_first_size]
        if is_predicted and group.settings.get(BATCH) != first_size:
            if group is best:
                found.append("as the rule predicts" + ", by one seed" * (len(best.cell.values) == 1))
            elif group.cell.diverged or is_clearly_lower(best.cell, group.cell, len(rivals) - 1):
                found.append("the rule does not hold")
            else:
                found.append("the rule: cannot be told")
        return ", ".join(found)

    def _stable(self, settings: dict[str, Any]) -> list[Group]:
        """The groups that differ from these settings in the rate, if at all, the lowest mean first.

        A rate at which a seed diverges is not a good one, whatever the others reach.
        """
        rivals = [group for group in self.groups if {**group.settings, RATE: None} == {**settings, RATE: None}]
        stable = [group for group in rivals if group.cell.values and not group.cell.diverged]
        return sorted(stable, key=lambda group: group.cell.mean)

    def until(self, target: float) -> Iterator[tuple[int, ReportedRun, Cell, int]]:
        """Each batch size with a run of its best learning rate, the samples until its seeds reached the target, and the
        number of those that did not."""
        for group in self.groups:
            best = self._stable(group.settings)[:1]
            # A batch that grows is no size.
            if group in best and isinstance(group.settings.get(BATCH), int):
                reached = self._training_until(target, group, "samples")
                missing = len(group.runs) - len(reached.values)
                yield group.settings[BATCH], next(iter(group.runs.values())), reached, missing

    def _training_until(self, target: float, group: Group, axis: str) -> Cell:
        """The samples, tokens or minutes until the first evaluation that reaches the target, of runs that do."""
        reached: list[float] = []
        for run in group.runs.values():
            steps, values = columns(run.evaluations, "step", self.sweep.metric)
            first = steps[self.sweep.sign * values <= self.sweep.sign * target][:1]
            reached += run.places(first.tolist()).get(axis, [])
        return Cell(tuple(reached))


def shown(cell: Cell, sign: int = 1) -> str:
    """A cell of a table."""
    if not cell.values:
        return f"diverged ({cell.diverged})" if cell.diverged else "–"
    of_mean, of_std = (",.0f", ",.0f") if abs(cell.mean) >= 1000 else (".4g", ".2g")
    spread = f" ± {cell.std:{of_std}}" if len(cell.values) > 1 else ""
    diverged = f", {cell.diverged} diverged" if cell.diverged else ""
    return f"{sign * cell.mean:{of_mean}}{spread} ({len(cell.values)}{diverged})"
