"""Collects what a start of a job has left behind."""

import os
from contextlib import suppress

from largebatch.failures import FAILURE
from largebatch.storage.layout import read_object
from largebatch.tools.job.cause import first_cause
from largebatch.tools.job.endings import Evidence
from largebatch.tools.job.progress import Progress


def evidence_of(progress: Progress, exit_code: int, asked_to_stop: str) -> Evidence:
    """The evidence in the run folder about a start that has ended."""
    status = read_object(progress.run_dir / "status.json")
    # What another job, or an earlier start, has left there is not about this one.
    if (status.get("job_id"), status.get("restart")) != (progress.job, progress.start):
        status = {}
    refusal = ""
    with suppress(OSError):
        refusal = (progress.logs / "refusal").read_text(encoding="utf-8", errors="replace")
    return Evidence(
        exit_code,
        status,
        read_object(progress.logs / FAILURE),
        refusal,
        first_cause(progress.logs),
        asked_to_stop,
        _has_stop_file(progress),
        progress.earlier_ending(),
    )


def _has_stop_file(progress: Progress) -> bool:
    """Whether there is a stop file that is not older than the start."""
    with suppress(OSError):
        return (progress.run_dir / "stop").stat().st_mtime >= float(os.environ.get("LARGEBATCH_BEGAN") or 0)
    return False
