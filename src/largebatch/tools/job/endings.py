"""Decides what follows when a start of a job has ended: another start, or the end of the job."""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from largebatch.system.failures import HOPELESS

MAX_MESSAGE_CHARS = 500
SIGNALED = (143, 138, 130)  # exit codes of a process that SIGTERM, SIGUSR1 or SIGINT ended
OUT_OF_MEMORY = (
    "write a smaller batch.micro_batch_size, set compute.activation_checkpointing, or choose a strategy that shards "
    "more (`largebatch plan RECIPE --gpu-memory GIB` compares them)"
)
# The exit codes of a job.
FINISHED, FAILED, REFUSED, STOPPED = 0, 1, 2, 75


@dataclass(frozen=True)
class Evidence:
    """What a start has left behind."""

    exit_code: int  # the launcher's
    status: Mapping[str, Any] = field(default_factory=dict)  # the run's status.json; empty if this start wrote none
    failure: Mapping[str, Any] = field(default_factory=dict)  # exception that ended training; empty if there was none
    refusal: str = ""  # why the run was refused; "" if it was not
    cause: str = ""  # the first cause as the logs tell it; "" if they do not
    asked_to_stop: str = ""  # who asked the batch script to stop the job during the start; "" if nobody did
    has_stop_file: bool = False  # whether a person has asked the run to stop, by the stop file, and it has not done so
    earlier: Mapping[str, Any] = field(default_factory=dict)  # what was kept of the latest earlier ending of the job


@dataclass(frozen=True)
class Ending:
    """What follows, and why."""

    code: int | None  # the exit code of the job; None if it is to be started again
    message: str  # the reason in one line
    about: Mapping[str, Any] = field(default_factory=dict)  # facts about a failure with which later ones are compared


def decide(evidence: Evidence, reason_to_give_up: str | None) -> Ending:
    """Decide what follows a start. `reason_to_give_up` says why there is no progress; None if there is."""
    ending = _decide(evidence)
    if ending.code is None and evidence.has_stop_file:
        message = f"stopped by the stop file; before that, {ending.message}; submit again to resume"
        ending = Ending(STOPPED, message, ending.about)
    elif ending.code is None and reason_to_give_up:
        ending = Ending(FAILED, f"error: {ending.message}; {reason_to_give_up}", ending.about)
    return Ending(ending.code, textwrap.shorten(ending.message, MAX_MESSAGE_CHARS, placeholder=" …"), ending.about)


def _decide(evidence: Evidence) -> Ending:
    status, code, cause = evidence.status, evidence.exit_code, evidence.cause
    outcome, message = status.get("outcome"), status.get("message", "")
    if evidence.refusal:
        return Ending(REFUSED, f"refused: {evidence.refusal}")
    if outcome == "finished":
        return Ending(FINISHED, "finished" if code == 0 else f"finished; the launcher exited with {code} afterward")
    if outcome == "stopped" and message.startswith("by the stop file"):
        return Ending(STOPPED, f"stopped {message}; submit again, with the same overrides, to resume")
    if outcome == "stopped":
        return Ending(None, f"stopped {message}")
    if outcome == "failed":
        return _failed(status, status.get("resume") is False, evidence)
    stopped_by = evidence.asked_to_stop or ("a signal to the nodes" if code in SIGNALED else "")
    if outcome is None and stopped_by:
        return Ending(None, f"asked to stop by {stopped_by} before the run began")
    # A run that had finished before writes no status. A wrapper of the launcher may exit with 0 whatever happened.
    if outcome is None and code == 0 and not evidence.failure:
        return Ending(FINISHED, "finished")
    if evidence.failure:
        return _failed({**status, **evidence.failure}, evidence.failure.get("kind") in HOPELESS, evidence)
    if outcome == "running":
        return Ending(None, f"{_first(cause) or 'killed '}at step {status.get('step')}")
    return Ending(None, f"{_first(cause)}ended before the run began (exit code {code})")


def _first(cause: str) -> str:
    return f"{cause}; " if cause else ""


def _failed(failure: Mapping[str, Any], is_hopeless: bool, evidence: Evidence) -> Ending:
    """What follows an exception, which `failure` describes as status.json does."""
    about = {name: failure.get(name) for name in ("kind", "exception", "trained", "step", "micro_batch_size")}
    about["trained"] = bool(about["trained"])
    kind, earlier = about["kind"], evidence.earlier
    what = " ".join(str(failure.get("message", "")).split())
    # The cause is often this very exception, with the rank that raised it.
    message = f"failed: {evidence.cause if what[:200] in evidence.cause else _first(evidence.cause) + what}"
    if kind == "out_of_memory":
        message += f"; {OUT_OF_MEMORY}"
    if is_hopeless:
        return Ending(FAILED, f"{message}; the same start would fail again: not requeued", about)
    same = {name for name, value in about.items() if value == earlier.get(name)}
    if kind == "out_of_memory" and same >= {"kind", "step", "micro_batch_size"}:
        return Ending(FAILED, f"{message}; for the second time at the same step: not requeued", about)
    if kind == "error" and same >= {"kind", "exception", "trained"} and not about["trained"]:
        return Ending(FAILED, f"{message}; for the second time before the first step: not requeued", about)
    return Ending(None, message, about)
