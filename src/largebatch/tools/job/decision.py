"""Decides what follows when a start of a job has ended: another start, or the end of the job."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from largebatch.system.endings import MAX_MESSAGE_CHARS, Ending, StopReason, decisive
from largebatch.system.failures import Kind

SIGNALED = (143, 138, 130)  # exit codes of a process that SIGTERM, SIGUSR1 or SIGINT ended
OUT_OF_MEMORY = (
    'write a smaller batch.micro_batch_size or "auto", set compute.activation_checkpointing, or choose a strategy that '
    "shards more (`largebatch plan RECIPE --world-sizes N --gpu-memory GIB` compares them)"
)
# The exit codes of a job.
FINISHED = 0
FAILED = 1
REFUSED = 2
STOPPED = 75


@dataclass(frozen=True)
class Evidence:
    """What a start has left behind."""

    exit_code: int  # the launcher's
    endings: Sequence[Ending] = ()  # of its processes, as far as they or their launchers could tell
    begun_at: int | None = None  # the step of the latest checkpoint, if the run had begun; None if it had not
    asked_to_stop: str = ""  # who asked the batch script to stop the job during the start; "" if nobody did
    has_stop_file: bool = False  # whether a person has asked the run to stop, by the stop file, and it has not done so
    earlier: Ending | None = None  # the failure of the latest earlier start of the job that recorded how it ended
    reason_to_give_up: str | None = None  # why there is no progress in checkpoints; None if there is


@dataclass(frozen=True)
class Next:
    """What follows a start."""

    code: int | None  # the exit code of the job, which is over; None if it is to be started again
    message: str  # the reason in one line
    failure: Ending | None = None  # kept, because the failures of later starts are compared with it


def next_start(evidence: Evidence) -> Next:
    """What follows a start: another one, or the end of the job."""
    found = _next_start(evidence)
    if found.code is None and evidence.has_stop_file:
        message = f"stopped by the stop file; before that, {found.message}; submit again to resume"
        found = replace(found, code=STOPPED, message=message)
    elif found.code is None and evidence.reason_to_give_up:
        found = replace(found, code=FAILED, message=f"error: {found.message}; {evidence.reason_to_give_up}")
    return replace(found, message=textwrap.shorten(found.message, MAX_MESSAGE_CHARS, placeholder=" …"))


def _next_start(evidence: Evidence) -> Next:
    code = evidence.exit_code
    ending = decisive(evidence.endings)
    kind = ending.kind if ending else None
    if ending and kind == Kind.REFUSED:
        return Next(REFUSED, f"refused: {ending.message}")
    if kind == Kind.FINISHED:
        return Next(FINISHED, "finished" if code == 0 else f"finished; the launcher exited with {code} afterward")
    if ending and kind == Kind.STOPPED:
        message = f"stopped {ending.message}"
        if ending.reason == StopReason.STOP_FILE:
            return Next(STOPPED, f"{message}; submit again, with the same overrides, to resume")
        return Next(None, message)
    has_begun = evidence.begun_at is not None
    stopped_by = evidence.asked_to_stop or ("a signal to the nodes" if code in SIGNALED else "")
    if stopped_by and not has_begun:
        return Next(None, f"asked to stop by {stopped_by} before the run began")
    failure = decisive(each for each in evidence.endings if each.kind != Kind.KILLED)
    if failure is not None:
        return _after_failure(failure, ending, evidence.earlier)
    # A run that had finished before has no attempt. A wrapper of the launcher may exit with 0 whatever happened.
    if code == 0 and not has_begun:
        return Next(FINISHED, "finished")
    when = f"at step {evidence.begun_at}" if has_begun else f"ended before the run began (exit code {code})"
    if ending is not None:
        return Next(None, f"{ending.where_and_why}; {when}")
    return Next(None, f"killed {when}" if has_begun else when)


def _after_failure(failure: Ending, cause: Ending | None, earlier: Ending | None) -> Next:
    """What follows a failure, whose cause may be that another process was killed."""
    message = f"failed: {failure.where_and_why}"
    if cause is not None and cause is not failure:
        message = f"failed: {cause.where_and_why}; {failure.message}"
    if failure.kind == Kind.OUT_OF_MEMORY:
        message += f"; {OUT_OF_MEMORY}"
    if not failure.retry:
        return Next(FAILED, f"{message}; the same start would fail again: not requeued", failure)
    if earlier is not None and earlier.kind == failure.kind:
        is_same = failure.step == earlier.step and failure.micro_batch_size == earlier.micro_batch_size
        if failure.kind == Kind.OUT_OF_MEMORY and is_same:
            return Next(FAILED, f"{message}; for the second time at the same step: not requeued", failure)
        is_same = failure.exception == earlier.exception and not failure.trained and not earlier.trained
        if failure.kind == Kind.ERROR and is_same:
            return Next(FAILED, f"{message}; for the second time before the first step: not requeued", failure)
    return Next(None, message, failure)
