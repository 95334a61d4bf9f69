"""What an attempt writes into the run's folder, besides checkpoints: journals and the outcome."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from largebatch.errors import TrainingFailed
from largebatch.installed import installed_versions
from largebatch.run.attempt import Attempt
from largebatch.run.folder import RunFolder
from largebatch.run.journal import Journal
from largebatch.run.resume import Start
from largebatch.run.status import Status, register
from largebatch.storage.catalog import remove_leftovers, set_aside

SECONDS_UNTIL_WRITTEN = 1.0  # of a line of metrics.jsonl, at most, and the time to the next one


class Record:
    """The record of one attempt. Every process has one; the main process writes, the others in emergencies.

    Args:
        folder: The run's folder, in which the attempt has begun.
        attempt: The attempt.
        start: Where it goes on.
        is_main_process: Whether this process writes.
        say: Tells a person something.
    """

    def __init__(
        self, folder: RunFolder, attempt: Attempt, start: Start, is_main_process: bool, say: Callable[[str], None]
    ):
        self._folder = folder
        self._is_main_process = is_main_process
        self._say = say
        self._start = start
        self._metrics = Journal(folder.metrics_file, attempt, say, SECONDS_UNTIL_WRITTEN)
        self._evaluations, self._history = (
            Journal(file, attempt, say) for file in (folder.evaluations_file, folder.history_file)
        )
        self.attempt = attempt
        self.status = Status(folder.status_file, folder.checkpoints_dir, attempt)
        self.status.step = start.step
        register(self._failed)

    def take_up(self, began: float, about: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Bring the folder into the state that it had at the checkpoint, and begin the attempt's history.

        Args:
            began: When this process began, in seconds since 1970; an older stop file was meant for another attempt.
            about: What the history tells of the attempt.

        Returns:
            The last logged step and the last evaluation that are left of earlier attempts, or empty; on other
            processes than the main one too.
        """
        if not self._is_main_process:
            return {}, {}
        start, folder = self._start, self._folder
        logged: dict[str, Any] | None = None
        evaluation: dict[str, Any] | None = None
        # A crash may have cut its last line short.
        self._history.keep_until(math.inf)
        if start.in_place:
            logged = self._metrics.keep_until(start.step)
            evaluation = self._evaluations.keep_until(start.step)
            remove_leftovers(folder.checkpoints_dir)
            set_aside(folder.checkpoints_dir, start.step, self.attempt.name)
        if folder.stop_file.exists() and folder.stop_file.stat().st_mtime < began:
            folder.stop_file.unlink()
        for reason in start.skipped:
            self._say(f"WARNING: a checkpoint is not used: {reason}")
        for change in start.changes:
            self._say(f"WARNING: changed, as --resume.allow_change says: {change}")
        if start.checkpoint is not None:
            self._say(f"  {'Resume':<14}after step {start.step:,}, from {start.checkpoint}")
        self.event(
            "started",
            start.step,
            attempt=self.attempt.number,
            checkpoint=str(start.checkpoint) if start.checkpoint else None,
            checkpoints_not_used=start.skipped,
            changes=start.changes,
            versions=installed_versions(),
            **about,
        )
        self.outcome("running", f"from step {start.step:,}", resume=True)
        return logged or {}, evaluation or {}

    def logged(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl."""
        if self._is_main_process:
            self._metrics.append(line)

    def evaluated(self, line: dict[str, Any]) -> None:
        """A line of evaluations.jsonl."""
        if self._is_main_process:
            self._evaluations.append(line)

    def event(self, name: str, step: int, **about: Any) -> None:
        """A line of history.jsonl."""
        if self._is_main_process:
            self._history.append({"event": name, "step": step, **about, "time": time.time()})

    def _failed(self, message: str, resume: bool) -> None:
        """By any process, since the main one may be the one that hangs."""
        is_the_cause = self.status.write("failed", message, resume)
        if self._is_main_process:
            # Also where another process was the first to fail; a later attempt has its own lines.
            with suppress(TrainingFailed):
                self._metrics.flush()
        if is_the_cause:
            self._history.append({"event": "failed", "step": self.status.step, "message": message, "time": time.time()})

    def outcome(self, *outcome: Any, **about: Any) -> None:
        """As `Status.write`, by the main process."""
        if self._is_main_process:
            self.status.write(*outcome, **about)

    def flush(self) -> None:
        """Write lines that still wait, or that the file system has not taken."""
        for journal in (self._metrics, self._evaluations, self._history):
            journal.flush()

    @property
    def profile_folder(self) -> Path:
        """Where processes write their traces."""
        return self._folder.profile_dir / f"attempt_{self.attempt.name}"

    @property
    def stack_folder(self) -> Path:
        """Where processes that hang write their stacks."""
        return self._folder.stacks_dir / f"attempt_{self.attempt.name}"
