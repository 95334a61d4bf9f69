"""The content of a run's folder, read while the run may still be writing to it; what is missing is omitted."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from largebatch.config import flatten
from largebatch.errors import UserError
from largebatch.plan import RunPlan, explain
from largebatch.plan.expected import number
from largebatch.storage.files import Line
from largebatch.storage.layout import read_object
from largebatch.storage.run_folder import RunFolder
from largebatch.system.endings import Ending

Array = NDArray[np.float64]
MAX_NAMES = 200
"""Of numbers in the lines of a file."""
EVALUATION = "evaluation: "
"""Titles of curves of evaluations begin with this."""


@dataclass(frozen=True)
class ReportedRun:
    """One run, as its folder describes it."""

    name: str  # unique among the runs of a report
    config: dict[str, str]  # the resolved recipe: the JSON of each field by its dotted name
    plan: RunPlan | None  # None if plan.json is damaged, or from a different version
    last_step: float | None  # that it shall train, also by the plan of a different version
    metrics: list[Line]  # one line per logged step, in the order of steps
    evaluations: list[Line]  # one line per evaluation, in the order of steps
    history: list[Line]  # one line per event, such as a start
    start: Line  # of the latest attempt, in history.jsonl; if there is none, summary.json, or empty
    ending: Ending | None  # how that has ended; None if it is still running, or was killed

    @property
    def step(self) -> int:
        """The last step that the folder knows of."""
        last_lines = [*self.metrics[-1:], *self.evaluations[-1:]]
        return max([self.ending.step if self.ending else 0, *(int(line["step"]) for line in last_lines)])

    @cached_property
    def curves(self) -> dict[str, Array]:
        """The numbers that were logged, those of evaluations first, as steps and finite values: shape (2, points)."""
        training = {name: columns(self.metrics, "step", name) for name in _names(self.metrics)}
        evaluations = {EVALUATION + name: columns(self.evaluations, "step", name) for name in _names(self.evaluations)}
        return evaluations | training

    @cached_property
    def _axes(self) -> dict[str, Array]:
        samples = columns(_by_step([*self.evaluations, *self.metrics]), "step", "samples")
        axes = {"samples": samples, "minutes": columns(self.metrics, "step", "seconds") / [[1], [60]]}
        if self.plan and self.plan.timeline.tokens_per_sample:
            axes["tokens"] = samples * [[1], [self.plan.timeline.tokens_per_sample]]
        return axes

    def places(self, steps: Sequence[float]) -> dict[str, list[float]]:
        """Steps as "step", "samples", "tokens" and "minutes" in training, as far as they are logged.

        Between two logged numbers each is a straight line; after the last it is constant.
        """
        places = {"step": list(steps)}
        for axis, known in self._axes.items():
            if known.size:
                places[axis] = np.interp(steps, [0.0, *known[0]], [0.0, *known[1]]).tolist()
        return places


def read_runs(folders: Sequence[Path]) -> list[ReportedRun]:
    """Read the folders of one or several runs.

    Raises:
        UserError: One of them is not the folder of a run.
    """
    # Unlike Path.resolve, realpath accepts circular links.
    resolved = [Path(os.path.realpath(folder)) for folder in folders]
    shared = os.path.commonpath([folder.parent for folder in resolved])
    return [_read(folder, str(folder.relative_to(shared))) for folder in resolved]


def _read(folder: Path, name: str) -> ReportedRun:
    run = RunFolder(folder)
    if not run.plan_file.is_file():
        raise UserError(f"{folder} has no plan.json; give the folder of a run, such as runs/resnet_digits")
    try:
        config = {
            field: json.dumps(value, ensure_ascii=False) for field, value in sorted(flatten(run.config()).items())
        }
    except RecursionError:
        config = {}
    plan = run.plan()
    try:
        # Numbers that contradict each other would show here, if anywhere.
        if plan:
            explain(plan, "")
    except (ValueError, ArithmeticError, LookupError):
        plan = None
    history = run.history()
    starts = [line for line in history if line.get("event") == "started"]
    return ReportedRun(
        name=name,
        config=config,
        plan=plan,
        last_step=number(read_object(run.plan_file), "stop_after_steps"),
        metrics=_by_step(run.metrics()),
        evaluations=_by_step(run.evaluations()),
        history=history,
        start=starts[-1] if starts else run.summary(),
        ending=run.ending(),
    )


def _by_step(lines: Sequence[Line]) -> list[Line]:
    """One line per step, in the order of steps, with the latest value of each name; others are damaged."""
    merged: dict[int, Line] = {}
    for line in lines:
        step = line.get("step")
        if type(step) is int and 0 <= step < 2**63:
            merged[step] = merged.get(step, {}) | line
    return [line for _, line in sorted(merged.items())]


def _names(lines: Sequence[Line]) -> list[str]:
    """The first names of numbers in lines, besides where a line is, in the order of their first appearance."""
    names = dict.fromkeys(name for line in lines for name in line if number(line, name) is not None)
    return [name for name in names if name not in ("step", "samples", "epoch", "seconds")][:MAX_NAMES]


def columns(lines: Sequence[Line], *names: str) -> Array:
    """The numbers of those lines that have one under each of these names, as an array of shape (names, lines)."""
    rows = [[number(line, name) for name in names] for line in lines]
    return np.array([row for row in rows if None not in row], dtype=float).reshape(-1, len(names)).T
