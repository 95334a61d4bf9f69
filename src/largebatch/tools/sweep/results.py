"""What the runs of a sweep have reached, by batch size and learning rate, as tables of text."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from largebatch.errors import UserError
from largebatch.tools.report.runs import EVALUATION, ReportedRun, number, read_runs
from largebatch.tools.sweep.points import BATCH, RATE, Point, Sweep
from largebatch.tools.sweep.verdicts import Cell, verdict


class Place(NamedTuple):
    """Settings that runs share, apart from their seeds."""

    others: str  # those besides rate and batch size
    base_lr: float
    batch: int  # the largest size, if it changes


class Table(NamedTuple):
    """A title, and rows of which the first is the header."""

    title: str
    rows: list[list[str]]

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in self.rows]
        return "\n".join([self.title, *(f"  {line.rstrip()}" for line in lines)])


@dataclass(frozen=True)
class Results:
    """A sweep, and those of its runs that have begun, by the names of their points."""

    sweep: Sweep
    runs: Mapping[str, ReportedRun]

    @classmethod
    def read(cls, folder: Path) -> "Results":
        """The results in a sweep's folder; UserError if no point has begun."""
        sweep = Sweep.read(folder)
        begun = [point.name for point in sweep.points if (folder / point.name / "plan.json").is_file()]
        if not begun:
            raise UserError(f"{folder}: no point of the sweep has begun yet")
        runs = read_runs([folder / name for name in begun])
        return cls(sweep, dict(zip(begun, runs, strict=True)))

    def value_of(self, run: ReportedRun) -> float | None:
        """The metric in the last evaluation of a finished run; None if there is none."""
        values = [number(line, self.sweep.metric) for line in run.evaluations]
        known = [value for value in values if value is not None]
        return known[-1] if run.status.outcome == "finished" and known else None

    @cached_property
    def groups(self) -> dict[Place, list[tuple[Point, ReportedRun]]]:
        """The points that have begun, with their runs, by what they share; sorted."""
        found: dict[Place, list[tuple[Point, ReportedRun]]] = {}
        for point in self.sweep.points:
            run = self.runs.get(point.name)
            if run and run.plan:
                own = {n: v for n, v in point.settings.items() if n != RATE and not (n == BATCH and type(v) is int)}
                others = ", ".join(f"{name}={json.dumps(value)}" for name, value in own.items())
                place = Place(others, run.plan.learning_rate.base_lr, run.plan.max_global_batch_size)
                found.setdefault(place, []).append((point, run))
        return dict(sorted(found.items()))

    @cached_property
    def cells(self) -> dict[Place, Cell]:
        """The results of the seeds of each group that has any."""
        cells = {}
        for place, members in self.groups.items():
            values = [self.value_of(run) for _, run in members]
            diverged = sum(run.status.outcome == "failed" and run.status.kind == "training" for _, run in members)
            cell = Cell(tuple(value for value in values if value is not None), diverged)
            if cell.values or diverged:
                cells[place] = cell
        return cells

    def tables(self, target: float | None = None) -> list[Table]:
        """All that can be said so far; `target` is a value of the metric."""
        found = [self._results(), *self._rule(), *([] if target is None else [self._times_to(target)])]
        return [table for table in found if len(table.rows) > 1]

    def _results(self) -> Table:
        batches = sorted({place.batch for place in self.cells})
        rows = [["base_lr", *(f"batch {batch:,}" for batch in batches)]]
        for others, rate in dict.fromkeys((place.others, place.base_lr) for place in self.cells):
            cells = [self.cells.get(Place(others, rate, batch)) for batch in batches]
            rows.append([_label(others, rate), *(shown(cell) if cell else "–" for cell in cells)])
        what = f"{self.sweep.metric} of the last evaluation: mean ± standard deviation over seeds (number of seeds)"
        waiting = len(self.sweep.points) - sum(len(cell.values) + cell.diverged for cell in self.cells.values())
        return Table(
            what + (f"; {waiting} of {len(self.sweep.points)} points are not finished" if waiting else ""), rows
        )

    @property
    def _order(self) -> Callable[[Place], float]:
        sign = -1 if self.sweep.higher_is_better else 1
        return lambda place: sign * self.cells[place].mean

    def _rule(self) -> list[Table]:
        """Whether the best rate at each batch size is the one that the recipe's rule predicts from the reference."""
        tables = []
        for others in dict.fromkeys(place.others for place in self.cells):
            # A rate at which a seed diverges is not a good one, whatever the others reach.
            places = [place for place in self.cells if place.others == others and not self.cells[place].diverged]
            batches = sorted({place.batch for place in places})
            best = {batch: min((p for p in places if p.batch == batch), key=self._order) for batch in batches}
            if len(batches) < 2 or len({place.base_lr for place in places}) < 2:
                continue
            plan = self.groups[places[0]][0][1].plan
            assert plan is not None
            rate = plan.learning_rate
            reference = rate.reference_batch_size if rate.reference_batch_size in best else batches[0]
            rows = [
                ["batch", "best base_lr", self.sweep.metric, "standard error", "predicted", self.sweep.metric, "rule"]
            ]
            for batch, place in best.items():
                predicted = place._replace(base_lr=best[reference].base_lr)
                cell, other = self.cells[place], self.cells.get(predicted)
                error = f"{cell.standard_error:.2g}" if len(cell.values) > 1 else "–"
                row = [f"{batch:,}", f"{place.base_lr:g}", shown(cell), error, f"{predicted.base_lr:g}"]
                verdict = "reference" if batch == reference else self._held(place, predicted)
                rows.append([*row, shown(other) if other else "–", verdict])
            title = f"the {rate.scaling} rule, with the best base_lr at batch {reference:,}"
            tables.append(Table(f"{title}{others and ', '}{others}", rows))
        return tables

    def _held(self, best: Place, predicted: Place) -> str:
        """The verdict on a prediction."""
        if best == predicted:
            return "holds"
        if predicted not in self.cells:
            return "not trained"
        cell, other = self.cells[best], self.cells[predicted]
        if other.diverged:
            return "does not hold"
        lower, higher = (other, cell) if self.sweep.higher_is_better else (cell, other)
        return "does not hold" if verdict(lower, higher) == "holds" else "cannot be told"

    def _times_to(self, target: float) -> Table:
        """The training until the first evaluation that reaches the target, as mean ± standard deviation."""
        rows = [["base_lr", "batch", "reached by", "samples", "tokens", "minutes"]]
        for place, members in self.groups.items():
            reached = [places for _, run in members if (places := self._place_at(run, target))]
            spans = [Cell(tuple(each[axis] for each in reached if axis in each)) for axis in rows[0][3:]]
            texts = [f"{cell.mean:,.4g} ± {cell.std:,.2g}" if cell.values else "–" for cell in spans]
            row = [_label(place.others, place.base_lr), f"{place.batch:,}", f"{len(reached)} of {len(members)}"]
            rows.append([*row, *texts])
        return Table(f"training until the first evaluation with a {self.sweep.metric} of {target:g}", rows)

    def _place_at(self, run: ReportedRun, target: float) -> dict[str, float]:
        steps, values = run.curves.get(EVALUATION + self.sweep.metric, [[], []])
        for step, value in zip(steps, values, strict=True):
            if value >= target if self.sweep.higher_is_better else value <= target:
                return {axis: place for axis, (place,) in run.places([float(step)]).items()}
        return {}


def shown(cell: Cell) -> str:
    """A cell of a table."""
    if not cell.values:
        return f"diverged ({cell.diverged})"
    spread = f" ± {cell.std:.2g}" if len(cell.values) > 1 else ""
    diverged = f", {cell.diverged} diverged" if cell.diverged else ""
    return f"{cell.mean:.4g}{spread} ({len(cell.values)}{diverged})"


def _label(others: str, base_lr: float) -> str:
    return f"{base_lr:g}{others and ', '}{others}"


def print_tables(tables: Sequence[Table]) -> None:
    """Print tables, with a blank line before each."""
    for table in tables:
        print(f"\n{table}")
