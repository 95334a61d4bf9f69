"""The outcome of an attempt, in the run folder's status.json: the launcher answers 1 whatever its workers said.

    {"outcome": "running" | "finished" | "stopped" | "failed", "message": …, "resume": true | false,
     "step": …, "checkpoint_step": …, "attempt": …, "slurm_job_id": …, "slurm_restart_count": …, "time": …}

"running" of a job that is over means that it was killed; it can be resumed like a stopped one.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from largebatch.run.attempt import Attempt, slurm_start
from largebatch.storage.catalog import entries
from largebatch.storage.files import replace_json_file
from largebatch.storage.layout import CheckpointError, read_json

Outcome = Literal["running", "finished", "stopped", "failed"]


class Status:
    """Writes the outcome of an attempt.

    Args:
        path: The file.
        checkpoints: The run's folder of checkpoints.
        attempt: Only the current attempt writes.
    """

    def __init__(self, path: Path, checkpoints: Path, attempt: Attempt):
        self._path = path
        self._checkpoints = checkpoints
        self._attempt = attempt
        self.step = 0
        """Optimizer steps completed."""

    @property
    def checkpoint_step(self) -> int:
        """Step of the newest complete checkpoint; 0 is none."""
        complete = (entry.step for entry in entries(self._checkpoints) if entry.problem is None)
        return next(complete, 0)

    def write(self, outcome: Outcome, message: str, resume: bool) -> bool:
        """Publish the outcome; a file system that does not take it is no reason to fail.

        Of several failures in one job the first to be written is the cause, and stays.

        Returns:
            Whether it was published.
        """
        try:
            if not self._attempt.is_current():
                return False
            if outcome == "failed":
                earlier = read_status(self._path)
                if earlier.get("outcome") == "failed" and earlier.get("attempt") == self._attempt.number:
                    return False
            value = {
                "outcome": outcome,
                "message": message,
                "resume": resume,
                "step": self.step,
                "checkpoint_step": self.checkpoint_step,
                "attempt": self._attempt.number,
                **slurm_start(),
                "time": time.time(),
            }
            replace_json_file(self._path, value)
        except OSError:
            return False
        return True


def read_status(path: Path) -> dict[str, Any]:
    """What status.json says; empty where there is none."""
    try:
        status = read_json(path)
    except CheckpointError:
        return {}
    return status if isinstance(status, dict) else {}


_of_this_process: list[Callable[[str, bool], None]] = []


def register(failed: Callable[[str, bool], None]) -> None:
    """Let `report_failure` know whom to tell."""
    _of_this_process[:] = [failed]


def report_failure(message: str, resume: bool) -> None:
    """Say that the attempt of this process failed, if it had begun.

    Args:
        message: Why.
        resume: Whether the same command may come further: after a crash or hang, but not where the same would recur.
    """
    for failed in _of_this_process:
        failed(message, resume)
