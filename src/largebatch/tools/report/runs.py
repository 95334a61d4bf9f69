"""What a run's folder says, read while the run may still be writing to it."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from largebatch.batch import Timeline
from largebatch.errors import UserError
from largebatch.plan import RunPlan
from largebatch.plan.explain import bodies
from largebatch.storage.json_lines import read_json_lines

Line = dict[str, Any]


def _kinds(**names: str) -> dict[str, str]:
    """The kind of each name, from the names of each kind."""
    return {name: kind for kind, together in names.items() for name in together.split()}


USED = {
    "plan.json": _kinds(number="total_steps global_batch_size peak_lr", text="loss_unit", object="schedule timeline"),
    "config.json": {},
    "status.json": _kinds(number="step"),
    "summary.json": _kinds(number="train_seconds samples_per_second tokens_per_second mfu attempts"),
    "metrics.jsonl": _kinds(number="samples seconds global_batch_size"),
    "evaluations.jsonl": _kinds(number="samples"),
    "history.jsonl": _kinds(
        number="time attempt first_skipped_step",
        text="checkpoint recipe",
        object="versions",
        list="checkpoints_not_used changes",
    ),
}
"""What a report computes with, of each file: other kinds of values would end in the midst of it."""
LARGEST = 1e300
"""Of numbers that can be drawn; JSON has whole ones of any length."""
MOST_SHOWN = 40
"""Characters of a value in an error."""


@dataclass(frozen=True)
class ReportedRun:
    """One run, as its folder tells it."""

    folder: Path
    name: str  # what it is called; no two runs of a report have the same
    config: Line  # the resolved recipe
    plan: Line  # the resolved plan, as JSON
    # The plan in words: the name and the lines of each section; None where it is another version's.
    words: list[tuple[str, list[str]]] | None
    timeline: Timeline | None  # the plan's samples by step; None where it is another version's
    metrics: list[Line]  # a line per logged step, by step
    evaluations: list[Line]  # a line per evaluation, by step
    history: list[Line]  # starts, stops and what went wrong, in the order in which it happened
    summary: Line  # the final numbers; empty unless the run is finished
    status: Line  # the latest attempt's

    @property
    def starts(self) -> list[Line]:
        """The lines of its starts."""
        return [line for line in self.history if line.get("event") == "started"]

    @property
    def step(self) -> int:
        """The last step that the folder knows of."""
        lines = [*self.metrics[-1:], *self.evaluations[-1:], self.status]
        return max(int(line.get("step", 0)) for line in lines)

    def samples_at(self, step: float) -> float:
        """Samples trained on in the first `step` steps: as logged, on a straight line between logged steps.

        The plan alone would not do: it may have been changed on the way. Behind the last line it is what is in force.
        """
        lines = [line for line in (*self.metrics, *self.evaluations) if "samples" in line]
        logged = {0: 0} | {line["step"]: line["samples"] for line in lines}
        steps = sorted(logged)
        last = steps[-1]
        if step <= last:
            return float(np.interp(step, *np.array([(each, logged[each]) for each in steps], dtype=float).T))
        if self.timeline is not None:
            ahead = self.timeline.at(int(step)).samples_before - self.timeline.at(int(last)).samples_before
        else:
            ahead = (step - last) * (self.metrics or [self.plan])[-1].get("global_batch_size", 0)
        return float(logged[last] + ahead)


def read_runs(folders: Sequence[Path]) -> list[ReportedRun]:
    """Read the folders of one or several runs.

    Raises:
        UserError: One of them is no run's, or is given twice.
    """
    # Unlike Path.resolve, without an exception for links that lead in a circle.
    resolved = [Path(os.path.realpath(folder)) for folder in folders]
    twice = next((folder for folder in resolved if resolved.count(folder) > 1), None)
    if twice is not None:
        raise UserError(f"{twice} is given twice; write each run once")
    return [_read(folder, name) for folder, name in zip(resolved, _names(resolved), strict=True)]


def _read(folder: Path, name: str) -> ReportedRun:
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; write the folder of a run, such as runs/resnet_digits")
    try:
        plan = _read_object(folder / "plan.json", required=True)
        config = _read_object(folder / "config.json", required=True)
        status, summary = (_read_object(folder / file) for file in ("status.json", "summary.json"))
        metrics, evaluations, history = (
            _read_lines(folder / f"{file}.jsonl") for file in ("metrics", "evaluations", "history")
        )
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error}") from error
    finished = status.get("outcome") == "finished"
    words, timeline = _understood(plan)
    return ReportedRun(
        folder=folder,
        name=name,
        config=config,
        plan=plan,
        words=words,
        timeline=timeline,
        metrics=_by_step(metrics),
        evaluations=_by_step(evaluations),
        history=[event for event in history if is_number(event, "step")],
        # A run that goes on behind its end has the summary of that end.
        summary=summary if finished else {},
        status=status,
    )


def _read_object(file: Path, required: bool = False) -> Line:
    if not file.exists():
        if required:
            raise UserError(
                f"{file.parent} has no {file.name}, which a run writes when it starts; write the folder of a run, such "
                "as runs/resnet_digits"
            )
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON: {error}; restore it, or leave the run out") from error
    if not isinstance(value, dict):
        raise UserError(f"{file} is not a JSON object; restore it, or leave the run out")
    return _checked(file, value)


def _read_lines(file: Path) -> list[Line]:
    return [_checked(file, line) for line in read_json_lines(file)]


def _checked(file: Path, value: Line) -> Line:
    """The object itself; what is null is as if it were not there.

    Raises:
        UserError: A value that the report computes with is of another kind.
    """
    for name, kind in USED[file.name].items():
        if value.get(name) is None:
            value.pop(name, None)
        elif not _is(kind, value, name):
            article = "an" if kind == "object" else "a"
            given = json.dumps(value[name])[:MOST_SHOWN]
            raise UserError(
                f'{file} has {given} as "{name}", where {article} {kind} belongs; restore it, or leave the run out'
            )
    return value


def _is(kind: str, value: Line, name: str) -> bool:
    if kind == "number":
        return is_number(value, name)
    return isinstance(value[name], {"text": str, "list": list, "object": dict}[kind])


def _understood(plan: Line) -> tuple[list[tuple[str, list[str]]] | None, Timeline | None]:
    """The plan in words, and its timeline; None where it is another version's."""
    try:
        understood = RunPlan.from_json(json.dumps(plan))
        return bodies(understood), understood.timeline
    # Numbers that no version writes cannot be computed with.
    except (ValueError, ArithmeticError, LookupError):
        return None, None


def _by_step(lines: Sequence[Line]) -> list[Line]:
    """In the order of steps, each once: an attempt that goes on takes away what it will log again."""
    latest = {line["step"]: line for line in lines if is_number(line, "step")}
    return [latest[step] for step in sorted(latest)]


def _names(folders: Sequence[Path]) -> list[str]:
    """The last parts of their paths, as many as tell them apart."""
    # A name may have bytes that are no text.
    parts = [Path(os.fsencode(folder).decode(errors="backslashreplace")).parts for folder in folders]
    depths = range(1, max(map(len, parts)) + 1)
    candidates = (["/".join(each[-depth:]) for each in parts] for depth in depths)
    return next(names for names in candidates if len(set(names)) == len(names))


def is_number(line: Line, name: str) -> bool:
    """Whether a line has a finite number of this name."""
    value = line.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= LARGEST
