"""What happened to a run besides training: the marks in its plots, and its history in words."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from largebatch.storage.layout import step_of
from largebatch.tools.report.runs import ReportedRun

KINDS = {
    "restarted": "started again",
    "stopped": "stopped on request",
    "failed": "failed",
    "skipped": "step left out: not finite",
    "checkpoint_failed": "checkpoint not written",
    "checkpoint_not_used": "checkpoint not used",
}
"""Events that are marked in plots, and what the legend says of them."""


@dataclass(frozen=True)
class Event:
    """Something that happened after `step` steps."""

    kind: str  # one of `KINDS`, or another that is not marked
    step: int  # optimizer steps completed
    time: float  # in seconds since 1970
    text: str  # for a person


def events_of(run: ReportedRun) -> list[Event]:
    """A run's history, in the order in which it happened."""
    events: list[Event] = []
    versions: dict[str, Any] = {}
    for line in run.history:
        events += _events(line, versions)
        versions = line.get("versions", versions)
    return events


def _events(line: dict[str, Any], versions_before: dict[str, Any]) -> Iterator[Event]:
    name, step, time = str(line.get("event")), int(line["step"]), float(line.get("time", 0))
    if name == "started":
        again = line.get("attempt", 1) > 1
        where = f"attempt {line.get('attempt', 1)}, on {line.get('world_size', '?')} x {line.get('strategy', '?')}"
        behind = f", behind {Path(line['checkpoint']).name}" if line.get("checkpoint") else ""
        yield Event(
            "restarted" if again else "started",
            step,
            time,
            f"{'started again' if again else 'started'}: {where}{behind}",
        )
        for reason in line.get("checkpoints_not_used", []):
            # "PATH/step_00000100: why"
            path, _, why = str(reason).partition(": ")
            of = step_of(Path(path).name)
            yield Event("checkpoint_not_used", step if of is None else of, time, f"{Path(path).name} not used: {why}")
        for name, version in line.get("versions", {}).items():
            if versions_before.get(name, version) != version:
                yield Event("changed", step, time, f"changed: {name} {version}, before {versions_before[name]}")
        for change in line.get("changes", []):
            yield Event("changed", step, time, f"changed: {change}")
    elif name == "skipped":
        first = int(line.get("first_skipped_step", step))
        which = f"steps {first:,} to {step:,}" if first < step else f"step {step:,}"
        yield Event("skipped", step, time, f"{which} left out: {line.get('reason', '')}")
    elif name == "checkpoint_failed":
        yield Event(name, step, time, f"checkpoint not written: {line.get('reason', '')}")
    else:
        message = f": {line['message']}" if line.get("message") else ""
        yield Event(name, step, time, f"{name}{message}")
