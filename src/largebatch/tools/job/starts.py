"""A job's starts in its run folder, and their progress, which is counted in checkpoints."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from largebatch.errors import UserError
from largebatch.storage.catalog import entries
from largebatch.storage.files import replace_json_file
from largebatch.storage.layout import read_object
from largebatch.system.regular_file import append, read_bytes
from largebatch.system.variables import whole_number
from largebatch.tools.job.cause import first_cause
from largebatch.tools.job.endings import Evidence
from largebatch.words import counted

ENDING = "ending.json"
START = re.compile("start_([0-9]{1,18})")


@dataclass(frozen=True)
class JobStarts:
    """The starts of one job, up to one of them."""

    run_dir: Path
    job: str
    start: int  # how often the scheduler had restarted the job before
    max_restarts: int  # how many restarts are allowed at the same checkpoint

    @classmethod
    def of_this_job(cls, run_dir: Path, start: int, max_restarts: int) -> "JobStarts":
        """The starts of the job that LARGEBATCH_JOB_ID names; UserError if it names none."""
        job = os.environ.get("LARGEBATCH_JOB_ID")
        if not job:
            raise UserError("LARGEBATCH_JOB_ID is not set: this command is for a job's batch script, which sets it")
        return cls(run_dir, job, start, max_restarts)

    @property
    def job_dir(self) -> Path:
        return self.run_dir / "jobs" / self.job

    @property
    def logs(self) -> Path:
        """The folder of this start."""
        return self.job_dir / f"start_{self.start}"

    @cached_property
    def checkpoint_step(self) -> int:
        """The step of the latest complete checkpoint; 0 if there is none."""
        return next((entry.step for entry in entries(self.run_dir / "checkpoints") if entry.problem is None), 0)

    def begin(self) -> None:
        """Note the checkpoint at which this start begins."""
        self.logs.mkdir(parents=True, exist_ok=True)
        append(self.job_dir / "starts", f"{self.checkpoint_step}\n")

    def evidence(self, exit_code: int, asked_to_stop: str) -> Evidence:
        """What this start, which has ended, has left in the run folder."""
        status = read_object(self.run_dir / "status.json")
        # What another job, or an earlier start, has left there is not about this one.
        if (status.get("job_id"), status.get("restart")) != (self.job, self.start):
            status = {}
        cause, failure = first_cause(self.logs)
        refusal, has_stop_file = "", False
        with suppress(OSError):
            refusal = read_bytes(self.logs / "refusal").decode(errors="replace")
        with suppress(OSError):
            # An older stop file was not for this start.
            began = whole_number("LARGEBATCH_BEGAN", 0)
            has_stop_file = (self.run_dir / "stop").stat().st_mtime >= began
        return Evidence(exit_code, status, failure, refusal, cause, asked_to_stop, has_stop_file, self.earlier_ending())

    def end(self, ending: dict[str, Any]) -> None:
        """Keep how this start ended, for later starts."""
        with suppress(OSError):
            replace_json_file(self.logs / ENDING, ending)

    def earlier_ending(self) -> dict[str, Any]:
        """The ending of the latest earlier start that has recorded one; empty if none has."""
        starts = [int(match[1]) for path in self.job_dir.glob("start_*") if (match := START.fullmatch(path.name))]
        earlier = sorted((start for start in starts if start < self.start), reverse=True)
        return next(filter(None, (read_object(self.job_dir / f"start_{start}" / ENDING) for start in earlier)), {})

    def reason_to_give_up(self) -> str | None:
        """Why there should be no further start, if the allowed number began at the latest checkpoint."""
        steps: list[str] = []
        with suppress(OSError):
            # Bytes that are not text count as a step at which no start began.
            steps = read_bytes(self.job_dir / "starts").decode(errors="replace").split()
        if (starts := steps.count(str(self.checkpoint_step))) <= self.max_restarts:
            return None
        return (
            f"giving up after {counted(starts, 'start')} without progress past step {self.checkpoint_step} "
            f"(LARGEBATCH_MAX_RESTARTS {self.max_restarts}); see {self.job_dir}"
        )
