"""The record of an attempt in the run's folder, besides checkpoints: files of JSON lines.

history.jsonl tells people how the run stands. If an attempt has only begun there after the job is over, the run was
killed, or its first process could not write any more; it can be resumed like a stopped one.
"""

import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from largebatch.errors import TrainingFailed
from largebatch.run.resume import Start
from largebatch.storage.attempts import Attempt
from largebatch.storage.catalog import remove_leftovers, set_aside
from largebatch.storage.files import parse_line, replace_file
from largebatch.storage.layout import read_object
from largebatch.storage.run_folder import RunFolder
from largebatch.storage.source_code import GIT
from largebatch.system.endings import Ending, OwnEnding, decisive, read_endings
from largebatch.system.failures import Kind
from largebatch.system.installed import installed_versions

MAX_PENDING_LINES = 100_000


@dataclass
class Journal:
    """One file of JSON lines, which survives a full disk, a crash, and an earlier attempt that is still running."""

    path: Path
    attempt: Attempt  # the attempt that writes, checked before each write
    warn: Callable[[str], None]  # called with a warning for the user
    _pending: list[str] = field(default_factory=list, init=False)
    _has_warned: bool = field(default=False, init=False)

    def append(self, value: dict[str, Any]) -> None:
        """Add a line; one that the file system refuses is written with later lines. Fails as `flush` does."""
        self._pending.append(json.dumps(value) + "\n")
        self.flush()

    def flush(self) -> None:
        """Try to write lines that the file system has refused; TrainingFailed if a later attempt has begun."""
        if not self._pending:
            return
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
        replace_file(self.path, b"".join(kept))
        return last


@dataclass
class Record:
    """The record of one attempt, of which every process has one: the main process writes it, each its own ending."""

    folder: RunFolder
    attempt: Attempt
    start: Start
    micro_batch_size: int
    is_main_process: bool
    say: Callable[[str], None]  # called with a warning for the user
    ending: OwnEnding  # that of this process

    def __post_init__(self) -> None:
        self._journals = {
            "metrics": Journal(self.folder.metrics_file, self.attempt, self.say),
            "noise_scale": Journal(self.folder.noise_scale_file, self.attempt, self.say),
            "evaluations": Journal(self.folder.evaluations_file, self.attempt, self.say),
            "history": Journal(self.folder.history_file, self.attempt, self.say),
        }
        self.step = self.start.step  # optimizer steps completed
        self.ending.begin(self.attempt.endings_dir, self._progress, self._ended)

    def restore(self, about: dict[str, Any]) -> dict[str, Any]:
        """Restore the folder to its state at the checkpoint, and begin the attempt's history with `about`.

        Returns the latest values in metrics.jsonl; none if there are no lines, or if this is not the main process.
        """
        if not self.is_main_process:
            return {}
        start = self.start
        folder = self.folder
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
            git=read_object(folder.source_dir / GIT),
            versions=installed_versions(),
            **about,
        )
        return latest["metrics"]

    def add(self, journal: str, line: dict[str, Any]) -> None:
        """Add a line to a file of JSON lines, by its name without the suffix."""
        if self.is_main_process:
            self._journals[journal].append(line)

    def event(self, name: str, step: int, **about: Any) -> None:
        """Add a line to history.jsonl."""
        self.add("history", {"event": name, "step": step, **about, "time": time.time()})

    def flush(self) -> None:
        """Try to write lines that the file system has refused."""
        for journal in self._journals.values():
            journal.flush()

    def _progress(self) -> dict[str, Any]:
        """What an ending says of training."""
        trained = self.step > self.start.step
        return {"step": self.step, "trained": trained, "micro_batch_size": self.micro_batch_size}

    def _ended(self, own: Ending) -> None:
        """Add to history.jsonl, on the main process, how the run has ended."""
        if not self.is_main_process:
            return
        # Another process may have failed first.
        ending = decisive([own, *read_endings(self.attempt.endings_dir)]) or own
        event = ending.kind if ending.kind in (Kind.FINISHED, Kind.STOPPED) else "failed"
        # The lines of a later attempt are its own.
        with suppress(TrainingFailed):
            self.event(event, self.step, message=ending.message, kind=ending.kind, reason=ending.reason)
