"""What the runs of a sweep have reached, as a table."""

import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from largebatch.errors import UserError
from largebatch.storage.run_folder import RunFolder
from largebatch.system.failures import Kind
from largebatch.tools.reported_runs import EVALUATION, ReportedRun, columns, read_runs
from largebatch.tools.sweep.points import BATCH, RATE, Sweep
from largebatch.tools.sweep.verdicts import Cell, is_clearly_lower
from largebatch.words import aligned


@dataclass(frozen=True, eq=False)
class Group:
    """The runs with the same settings, which differ in their seeds."""

    settings: dict[str, Any]  # the values of the swept fields
    num_seeds: int  # of the sweep
    runs: dict[int, ReportedRun]  # those that have begun, by seed
    losses: dict[int, float]  # of those that are over: the metric, negated if higher is better; infinite if diverged

    @cached_property
    def cell(self) -> Cell:
        """The losses that are finite."""
        finite = tuple(filter(math.isfinite, self.losses.values()))
        return Cell(finite, len(self.losses) - len(finite))

    @property
    def is_over(self) -> bool:
        """Whether all of its runs have a result."""
        return len(self.losses) == self.num_seeds


@dataclass(frozen=True)
class Results:
    """A sweep, and what its runs have reached."""

    sweep: Sweep
    groups: list[Group]

    @classmethod
    def read(cls, folder: Path) -> "Results":
        """The results in a sweep's folder; UserError if no point has begun, or none was evaluated by the metric."""
        sweep = Sweep.read(folder)
        begun = [point for point in sweep.points if RunFolder(folder / point.name).plan_file.is_file()]
        if not begun:
            raise UserError(f"{folder}: no point of the sweep has begun yet")
        num_seeds = Counter(json.dumps(point.settings) for point in sweep.points)
        groups = {name: Group(json.loads(name), count, {}, {}) for name, count in num_seeds.items()}
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
        finished = [run for run in runs if run.ending and run.ending.kind == Kind.FINISHED]
        if finished and not any(columns(run.evaluations, sweep.metric).size for run in finished):
            curves = (name.partition(EVALUATION)[2] for name in finished[0].curves)
            raise UserError(f"--metric {sweep.metric}: runs are evaluated by {', '.join(filter(None, curves))}")
        return cls(sweep, list(groups.values()))

    def table(self, target: float | None = None) -> str:
        """A row for each group; with a target, a value of the metric, also the training until it was reached."""
        rows = {}
        findings = []
        for group in self.groups:
            cells = {self.sweep.metric: shown(group.cell, self.sweep.sign)}
            if target is not None:
                for axis in ("samples", "tokens", "minutes"):
                    cells[f"{axis} to {target:g}"] = shown(self.training_until(target, group, axis))
            values = (f"{name.rpartition('.')[2]}={json.dumps(value)}" for name, value in group.settings.items())
            name = " ".join(values)
            rows[name] = cells
            if finding := self._finding(group):
                findings.append(f"  {name}: {finding}")
        title = f"{self.sweep.metric} of the last evaluation, mean ± standard deviation over seeds (number of seeds)"
        over = sum(len(group.losses) for group in self.groups)
        count = len(self.sweep.points)
        return "\n".join([f"{title}; {over} of {count} points have ended", *aligned(rows), *findings])

    def _finding(self, group: Group) -> str:
        """Whether its rate is the best of those with the same other settings, and whether the scaling rule holds.

        It does if one rate is clearly the best at this batch size and at the first, and does not if none may be.
        """
        rivals = self._rivals(group.settings)
        if RATE not in group.settings or not self.is_best(group):
            return ""
        if not all(each.is_over for each in rivals):
            return "best so far"
        finding = "best"
        rates = [each.settings[RATE] for each in self.groups]
        ends = {max(rates): "highest", min(rates): "lowest"}
        if group.settings[RATE] in ends and all(each.losses for each in self.groups):
            finding += f" (the {ends[group.settings[RATE]]} of the listed rates: extend the list)"
        first_size = self.groups[0].settings.get(BATCH)
        first = self._rivals({**group.settings, BATCH: first_size})
        here = self._possibly_best(rivals)
        there = self._possibly_best(first)
        is_tested = group.settings.get(BATCH) != first_size and len(rivals) > 1
        if not is_tested or not there or not all(each.is_over for each in first):
            return finding
        if not here & there:
            return f"{finding}; the rule does not hold"
        # Beyond an end of the list, each may have another best.
        if len(here | there) > 1 or group.settings[RATE] in ends:
            return f"{finding}; the rule: cannot be told"
        return f"{finding}, as the rule predicts"

    def is_best(self, group: Group) -> bool:
        """Whether no other rate has a lower mean, at the same other settings."""
        return group in self._stable(self._rivals(group.settings))[:1]

    def _rivals(self, settings: dict[str, Any]) -> list[Group]:
        """The groups that differ from these settings in the rate, if at all."""
        return [group for group in self.groups if {**group.settings, RATE: None} == {**settings, RATE: None}]

    def _stable(self, rivals: list[Group]) -> list[Group]:
        """Those of which no seed has diverged, the lowest mean first: a rate that may diverge is not a good one."""
        stable = [group for group in rivals if group.cell.values and not group.cell.diverged]
        return sorted(stable, key=lambda group: group.cell.mean)

    def _possibly_best(self, rivals: list[Group]) -> set[float]:
        """The rates of those that are not clearly worse than the best."""
        stable = self._stable(rivals)
        others = [each for each in stable[1:] if not is_clearly_lower(stable[0].cell, each.cell, len(stable) - 1)]
        return {each.settings[RATE] for each in (*stable[:1], *others)}

    def training_until(self, target: float, group: Group, axis: str) -> Cell:
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
    spread = f" ± {_figures(cell.std, 2)}" if len(cell.values) > 1 else ""
    diverged = f", {cell.diverged} diverged" if cell.diverged else ""
    return f"{_figures(sign * cell.mean, 4)}{spread} ({len(cell.values)}{diverged})"


def _figures(number: float, digits: int) -> str:
    """A number with so many digits that tell, without an exponent if it is large."""
    return f"{number:,.0f}" if abs(number) >= 10 ** (digits - 1) else f"{number:.{digits}g}"
