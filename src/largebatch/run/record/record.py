"""The record of an attempt in the run's folder, besides checkpoints: files of JSON lines, and the outcome.

The outcome is in status.json, because the launcher exits with 1 whatever the exit code of its workers:

    {"outcome": "running" | "finished" | "stopped" | "failed", "message": …, "resume": true | false,
     "step": …, "checkpoint_step": …, "trained": true | false, "micro_batch_size": …,
     "kind": a kind of `failures` or null, "exception": the name of a type or null,
     "attempt": …, "job_id": …, "restart": …, "time": …}

"trained" says whether this start has completed a step. A job that is over and has the outcome "running" was killed; it
can be resumed like a stopped one.
"""

import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from largebatch.errors import TrainingFailed
from largebatch.run.record.folder import RunFolder
from largebatch.run.resume import Start
from largebatch.storage.attempts import Attempt, job_start
from largebatch.storage.catalog import entries, remove_leftovers, set_aside
from largebatch.storage.files import parse_line, replace_file, replace_json_file
from largebatch.storage.layout import read_object
from largebatch.system.failures import HOPELESS, Kind
from largebatch.system.installed import installed_versions

MAX_PENDING_LINES = 100_000
SECONDS_UNTIL_WRITTEN = 1.0  # at most, for a line of metrics.jsonl, plus the time to the next one

_of_this_process: list["Record"] = []


def report_failure(message: str, kind: Kind, exception: str | None = None) -> None:
    """Record that the attempt of this process, if it had begun, failed, and the type of the exception if it was one."""
    for record in _of_this_process:
        record.fail(message, kind, exception)


@dataclass
class Journal:
    """One file of JSON lines, which survives a full disk, a crash, and an earlier attempt that is still running."""

    path: Path
    attempt: Attempt  # the attempt that writes, checked before each write
    warn: Callable[[str], None]  # called with a warning for the user
    max_seconds: float = 0.0  # how long lines may wait for the next ones, to be written together
    _flushed: float = field(default=-math.inf, init=False)
    _pending: list[str] = field(default_factory=list, init=False)
    _has_warned: bool = field(default=False, init=False)

    def append(self, value: dict[str, Any]) -> None:
        """Add a line; one that the file system refuses is written with later lines. Fails as `flush` does."""
        self._pending.append(json.dumps(value) + "\n")
        if time.monotonic() - self._flushed >= self.max_seconds:
            self.flush()

    def flush(self) -> None:
        """Try to write the lines that wait; TrainingFailed if a later attempt has begun."""
        if not self._pending:
            return
        self._flushed = time.monotonic()
        size = None
        try:
            self.attempt.check()
            size = self.path.stat().st_size if self.path.exists() else 0
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(self._pending))
        except OSError as error:
            if size is not None and self.path.exists():
                # Part of a line may have been written.
                with suppress(OSError), self.path.open("r+b") as file:
                    file.truncate(size)
            if not self._has_warned:
                self.warn(f"WARNING: {self.path} cannot be written: {error}; its lines are kept in memory until it can")
            self._has_warned = True
            del self._pending[:-MAX_PENDING_LINES]
            return
        self._pending.clear()
        self._has_warned = False

    def keep_until(self, step: float) -> dict[str, Any]:
        """Remove lines of steps after `step`, which training will repeat, and a last line that was cut short.

        Returns the latest value of each name in the lines that are left. Other lines that cannot be read stay.
        """
        last: dict[str, Any] = {}
        if not self.path.exists():
            return last
        kept: list[bytes] = []
        lines = self.path.read_bytes().split(b"\n")
        for number, text in enumerate(lines, 1):
            line = parse_line(text)
            if line is None and number < len(lines):
                self.warn(f"WARNING: line {number} of {self.path} cannot be read; it is left as it is")
                kept.append(text + b"\n")
            elif line is not None and line.get("step", 0) <= step:
                kept.append(text + b"\n")
                last |= line
        replace_file(self.path, [memoryview(b"".join(kept))])
        return last


@dataclass
class Record:
    """The record of one attempt, of which every process has one: the main process writes, others only failures."""

    folder: RunFolder
    attempt: Attempt
    start: Start
    micro_batch_size: int
    is_main_process: bool
    say: Callable[[str], None]  # called with a warning for the user

    def __post_init__(self) -> None:
        self._journals = {
            "metrics": Journal(self.folder.metrics_file, self.attempt, self.say, SECONDS_UNTIL_WRITTEN),
            "noise_scale": Journal(self.folder.noise_scale_file, self.attempt, self.say, SECONDS_UNTIL_WRITTEN),
            "evaluations": Journal(self.folder.evaluations_file, self.attempt, self.say),
            "history": Journal(self.folder.history_file, self.attempt, self.say),
        }
        self.step = self.start.step  # optimizer steps completed
        _of_this_process[:] = [self]

    def restore(self, about: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Restore the folder to its state at the checkpoint, and begin the attempt's history with `about`.

        Returns the latest values in metrics.jsonl and in evaluations.jsonl; none if there are no lines, or if this is
        not the main process.
        """
        if not self.is_main_process:
            return {}, {}
        start, folder = self.start, self.folder
        last_steps = dict.fromkeys(self._journals, float(start.step)) | {"history": math.inf}
        latest = {name: journal.keep_until(last_steps[name]) for name, journal in self._journals.items()}
        remove_leftovers(folder.checkpoints_dir)
        set_aside(folder.checkpoints_dir, start.step, self.attempt.name)
        for reason in start.skipped:
            self.say(f"WARNING: a checkpoint is not used: {reason}")
        for change in start.changes:
            self.say(f"WARNING: changed, as --allow-change permits: {change}")
        if start.checkpoint is not None:
            self.say(f"  {'Resume':<14}after step {start.step:,}, from {start.checkpoint}")
        self.event(
            "started",
            start.step,
            attempt=self.attempt.number,
            checkpoint=str(start.checkpoint) if start.checkpoint else None,
            checkpoints_not_used=start.skipped,
            changes=start.changes,
            git=read_object(folder.source_dir / "git.json"),
            versions=installed_versions(),
            **about,
        )
        self.running()
        return latest["metrics"], latest["evaluations"]

    def add(self, journal: str, line: dict[str, Any]) -> None:
        """Add a line to a file of JSON lines, by its name without the suffix."""
        if self.is_main_process:
            self._journals[journal].append(line)

    def event(self, name: str, step: int, **about: Any) -> None:
        """Add a line to history.jsonl."""
        self.add("history", {"event": name, "step": step, **about, "time": time.time()})

    def flush(self) -> None:
        """Write lines that still wait, or that the file system has refused."""
        for journal in self._journals.values():
            journal.flush()

    def running(self) -> None:
        """Publish that the attempt is training, and its latest checkpoint."""
        if self.is_main_process:
            with suppress(OSError):
                self._publish("running", f"from step {self.start.step:,}", resume=True)

    def end(self, outcome: Literal["finished", "stopped"], message: str, /, **about: Any) -> None:
        """Publish how the attempt ended, and add it to history.jsonl; OSError if the former cannot be written."""
        self.event(outcome, self.step, **about)
        if self.is_main_process:
            self._publish(outcome, message, resume=outcome == "stopped")

    def fail(self, message: str, kind: Kind, exception: str | None = None) -> None:
        """Like `report_failure`; on any process, because the main one may be the one that hangs."""
        is_the_cause = False
        with suppress(OSError):
            is_the_cause = self._publish("failed", message, kind not in HOPELESS, kind, exception)
        if self.is_main_process:
            # Even if another process failed first; the lines of a later attempt are its own.
            with suppress(TrainingFailed):
                self._journals["metrics"].flush()
        if is_the_cause:
            self._journals["history"].append(
                {"event": "failed", "step": self.step, "message": message, "kind": kind, "time": time.time()}
            )

    def _publish(
        self, outcome: str, message: str, resume: bool, kind: Kind | None = None, exception: str | None = None
    ) -> bool:
        """Write status.json, unless another attempt or failure has, and return whether that was done."""
        if not self.attempt.is_current():
            return False
        # The first of several failures in one job is the cause, and stays; after a hang, all processes end.
        earlier = read_object(self.folder.status_file)
        failed_already = earlier.get("outcome") == "failed" and earlier.get("attempt") == self.attempt.number
        if failed_already and (outcome == "failed" or earlier.get("kind") == "hang"):
            return False
        complete = (entry.step for entry in entries(self.folder.checkpoints_dir) if entry.problem is None)
        value = {
            "outcome": outcome,
            "message": message,
            "resume": resume,
            "step": self.step,
            "checkpoint_step": next(complete, 0),
            "trained": self.step > self.start.step,
            "micro_batch_size": self.micro_batch_size,
            "kind": kind,
            "exception": exception,
            "attempt": self.attempt.number,
            **job_start(),
            "time": time.time(),
        }
        replace_json_file(self.folder.status_file, value)
        return True
