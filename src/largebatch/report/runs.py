"""What a run's folder says, read while the run may still be writing to it."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from largebatch.errors import UserError
from largebatch.plan import RunPlan
from largebatch.plan.explain import bodies
from largebatch.storage.json_lines import read_json_lines

Line = dict[str, Any]


@dataclass(frozen=True)
class ReportedRun:
    """One run, as its folder tells it.

    Args:
        folder: The folder.
        name: What it is called; no two runs of a report have the same.
        config: The resolved recipe.
        plan: The resolved plan, as JSON.
        words: The plan in words: the name and the lines of each section; None where it is another version's.
        metrics: A line per logged step, by step.
        evaluations: A line per evaluation, by step.
        history: Starts, stops and what went wrong, in the order in which it happened.
        summary: The final numbers; empty unless the run is finished.
        status: Of the latest attempt.
    """

    folder: Path
    name: str
    config: Line
    plan: Line
    words: list[tuple[str, list[str]]] | None
    metrics: list[Line]
    evaluations: list[Line]
    history: list[Line]
    summary: Line
    status: Line

    @property
    def step(self) -> int:
        """The last step that the folder knows of."""
        lines = [*self.metrics[-1:], *self.evaluations[-1:], self.status]
        return max(int(line.get("step", 0)) for line in lines)

    def samples_at(self, step: float) -> float:
        """Samples trained on in the first `step` steps: as logged, on a straight line between logged steps.

        The plan alone would not do: it may have been changed on the way.
        """
        places = [(0.0, 0.0), *((line["step"], line["samples"]) for line in self.metrics if is_number(line, "samples"))]
        steps, samples = np.array(places, dtype=float).T
        if step <= steps[-1]:
            return float(np.interp(step, steps, samples))
        size = (self.metrics or [self.plan])[-1].get("global_batch_size", 0)
        return float(samples[-1] + (step - steps[-1]) * size)


def read_runs(folders: Sequence[Path]) -> list[ReportedRun]:
    """Read the folders of one or several runs.

    Raises:
        UserError: One of them is no run's, or is given twice.
    """
    resolved = [folder.resolve() for folder in folders]
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
            read_json_lines(folder / f"{file}.jsonl") for file in ("metrics", "evaluations", "history")
        )
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error}") from error
    finished = status.get("outcome") == "finished"
    return ReportedRun(
        folder=folder,
        name=name,
        config=config,
        plan=plan,
        words=_words(plan),
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
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}; restore it, or leave the run out") from error
    if not isinstance(value, dict):
        raise UserError(f"{file} is not a JSON object; restore it, or leave the run out")
    return value


def _words(plan: Line) -> list[tuple[str, list[str]]] | None:
    try:
        return bodies(RunPlan.from_json(json.dumps(plan)))
    except ValueError:
        return None


def _by_step(lines: Sequence[Line]) -> list[Line]:
    """In the order of steps, each once: an attempt that goes on takes away what it will log again."""
    latest = {line["step"]: line for line in lines if is_number(line, "step")}
    return [latest[step] for step in sorted(latest)]


def _names(folders: Sequence[Path]) -> list[str]:
    """The last parts of their paths, as many as tell them apart."""
    depths = range(1, max(len(folder.parts) for folder in folders) + 1)
    candidates = (["/".join(folder.parts[-depth:]) for folder in folders] for depth in depths)
    return next(names for names in candidates if len(set(names)) == len(names))


def is_number(line: Line, name: str) -> bool:
    """Whether a line has a finite number of this name."""
    value = line.get(name)
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
