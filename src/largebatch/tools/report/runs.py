"""The content of a run's folder, read while the run may still be writing to it; what is missing is omitted."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from largebatch.errors import UserError
from largebatch.plan import RunPlan
from largebatch.plan.explain import bodies
from largebatch.storage.files import read_json_lines
from largebatch.storage.layout import read_object, step_of

Line = dict[str, Any]


@dataclass(frozen=True)
class Event:
    """Something that happened after `step` optimizer steps."""

    kind: str  # "restarted", "skipped", …; the plots mark those of `plots.MARKS`
    step: int
    time: float  # in seconds since 1970
    text: str  # for the reader


@dataclass(frozen=True)
class ReportedRun:
    """One run, as its folder describes it."""

    name: str  # unique among the runs of a report
    config: Line  # the resolved recipe
    plan: RunPlan | None  # None if plan.json is damaged, or from a different version
    metrics: list[Line]  # one line per logged step, in the order of steps
    evaluations: list[Line]  # one line per evaluation, in the order of steps
    starts: list[Line]  # the line of each start in history.jsonl
    events: list[Event]  # all of history.jsonl, in the order in which it happened
    status: Line  # how the latest attempt stands
    summary: Line  # the final numbers; empty before the end of the run

    @property
    def step(self) -> int:
        """The last step that the folder knows of."""
        return int(max(number(line, "step") or 0 for line in (*self.metrics[-1:], *self.evaluations[-1:], self.status)))

    def samples_at(self, step: int) -> float:
        """Samples trained on in the first `step` steps.

        Logged numbers come first, because the plan may have been changed along the way. Between two of them this is a
        straight line; after the last one it is what the plan says.
        """
        lines = [(line["step"], number(line, "samples")) for line in (*self.metrics, *self.evaluations)]
        logged = {0: 0.0} | {at: samples for at, samples in lines if samples is not None}
        last = max(logged)
        if step > last and self.plan is not None:
            before, after = self.plan.batch_at(int(last)), self.plan.batch_at(step)
            return float(logged[last] + after.samples_before - before.samples_before)
        return float(np.interp(step, *np.array(sorted(logged.items()), dtype=float).T))


def read_runs(folders: Sequence[Path]) -> list[ReportedRun]:
    """Read the folders of one or several runs.

    Raises:
        UserError: One of them is not the folder of a run, or is given twice.
    """
    # Unlike Path.resolve, realpath accepts circular links.
    resolved = [Path(os.path.realpath(folder)) for folder in folders]
    twice = next((folder for folder in resolved if resolved.count(folder) > 1), None)
    if twice is not None:
        raise UserError(f"{twice} is given twice; give each run once")
    shared = os.path.commonpath([folder.parent for folder in resolved])
    return [_read(folder, str(folder.relative_to(shared))) for folder in resolved]


def _read(folder: Path, name: str) -> ReportedRun:
    if not (folder / "plan.json").is_file():
        problem = "has no plan.json, which a run writes when it starts" if folder.is_dir() else "is not a folder"
        raise UserError(f"{folder} {problem}; give the folder of a run, such as runs/resnet_digits")
    try:
        metrics, evaluations, history = (
            [line for line in read_json_lines(folder / f"{file}.jsonl") if number(line, "step") is not None]
            for file in ("metrics", "evaluations", "history")
        )
        plan = _plan((folder / "plan.json").read_bytes())
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error}") from error
    return ReportedRun(
        name=name,
        config=read_object(folder / "config.json"),
        plan=plan,
        metrics=_by_step(metrics),
        evaluations=_by_step(evaluations),
        starts=[line for line in history if line.get("event") == "started"],
        events=_events(history),
        status=read_object(folder / "status.json"),
        summary=read_object(folder / "summary.json"),
    )


def _plan(text: bytes) -> RunPlan | None:
    try:
        plan = RunPlan.from_json(text.decode())
        # A plan whose numbers contradict each other fails here, if anywhere.
        bodies(plan)
    except (ValueError, ArithmeticError, LookupError):
        return None
    return plan


def _by_step(lines: Sequence[Line]) -> list[Line]:
    """Lines in the order of steps, the latest of each step."""
    return [line for _, line in sorted({line["step"]: line for line in lines}.items())]


def _events(history: Sequence[Line]) -> list[Event]:
    events: list[Event] = []
    versions: dict[str, Any] = {}
    for line in history:
        kind, step, time = str(line.get("event")), int(line["step"]), number(line, "time") or 0.0
        reason = line.get("reason") or line.get("message") or ""
        if kind == "skipped":
            first = int(number(line, "first_skipped_step") or step)
            which = f"steps {first:,} to {step:,}" if first < step else f"step {step:,}"
            text = f"skipped {which}: {reason}"
        elif kind == "checkpoint_failed":
            text = f"checkpoint not written: {reason}"
        elif kind == "slow_process":
            text = reason
        elif kind != "started":
            text = f"{kind}: {reason}" if reason else kind
        else:
            attempt = line.get("attempt", 1)
            kind, text = ("restarted", "started again") if attempt > 1 else (kind, kind)
            text += f": attempt {attempt}, on {line.get('world_size', '?')} x {line.get('strategy', '?')}"
            if checkpoint := line.get("checkpoint"):
                text += f", from {Path(checkpoint).name}"
        events.append(Event(kind, step, time, text))
        for unused in line.get("checkpoints_not_used", []):
            # "PATH/step_00000100: why"
            path, _, why = unused.partition(": ")
            of = step_of(Path(path).name)
            text = f"{Path(path).name} not used: {why}"
            events.append(Event("checkpoint_not_used", step if of is None else of, time, text))
        new = line.get("versions", {})
        changed = [name for name in new if versions.get(name, new[name]) != new[name]]
        changes = [f"{name} {new[name]}, previously {versions[name]}" for name in changed]
        changes += line.get("changes", [])
        events += [Event("changed", step, time, f"changed: {change}") for change in changes]
        versions = new or versions
    return events


def number(line: Line, name: str) -> float | None:
    """The number of this name in a line; None if there is none, or it is not finite."""
    value: float | None = line.get(name)
    return value if value is not None and math.isfinite(value) else None
