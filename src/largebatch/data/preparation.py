"""What may be prepared: by `largebatch prepare` everything, by a job, whose GPUs wait, only what is small."""

import shutil
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Literal, TypeVar

from huggingface_hub.constants import HF_HOME

from largebatch.config.data import HubOrLocal
from largebatch.errors import DataError

MOST_BYTES_IN_A_JOB = 2**30
SECONDS_BETWEEN_CALLS = 1.0

T = TypeVar("T")


@dataclass(frozen=True)
class Preparation:
    """Who prepares data, and how."""

    command: str  # the command that prepares it, for messages
    allowed: Literal["everything", "small", "nothing"] = "small"  # "small" unless `data.prepare` says otherwise
    checks: bool = False  # whether the checksums of what is prepared are compared
    num_workers: int | None = None  # processes; None means `data.num_workers`
    part: int = 0  # of the shards, the part that this process makes
    num_parts: int = 1
    progress: Callable[[], object] = lambda: None  # called about once per second, or more often
    # The bytes that each section of a mixture was found to need; None outside of a job.
    needed: dict[str, int] | None = None


_BY_A_JOB = Preparation("largebatch prepare RECIPE")
preparation: ContextVar[Preparation] = ContextVar("preparation", default=_BY_A_JOB)


def num_workers_for(data: HubOrLocal) -> int:
    """The processes that prepare this data."""
    asked_for = preparation.get().num_workers
    return data.num_workers if asked_for is None else asked_for


def with_progress(function: Callable[[], T]) -> T:
    """The result of a function, such as a download, that does not call `progress` itself; this does so meanwhile.

    If `progress` raises because the run was asked to stop, the function goes on until the process ends.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    Thread(target=copy_context().run, args=(run,), name="preparation", daemon=True).start()
    while not wait([result], SECONDS_BETWEEN_CALLS).done:
        preparation.get().progress()
    return result.result()


def cannot_be_written(folder: Path, error: OSError) -> DataError:
    """The error for a folder of prepared data."""
    return DataError(
        f"{folder} cannot be written: {error}; make room, or name another folder in HF_HOME, and run the same command "
        "again: what is finished is kept"
    )


class NotPrepared(DataError):
    """Data is missing that may not be prepared here."""

    would_be_refused = True  # by a job


def check_may_prepare(data: HubOrLocal, num_bytes: int) -> None:
    """Raise NotPrepared if so many bytes would have to be downloaded, decoded or tokenized, and may not be.

    Those of the other sources of a mixture are added to them.
    """
    current, total = preparation.get(), num_bytes
    if current.needed is not None:
        section = data.model_dump_json()
        current.needed[section] = max(num_bytes, current.needed.get(section, 0))
        total = sum(current.needed.values())
    by_a_job = data.prepare == "allow" or (data.prepare is None and total <= MOST_BYTES_IN_A_JOB)
    if current.allowed == "everything" or (current.allowed == "small" and by_a_job):
        return
    if current.allowed == "nothing":
        home = next(path for path in (Path(HF_HOME), *Path(HF_HOME).absolute().parents) if path.exists())
        what = (
            "a job does that when it starts" if by_a_job else f"a job would refuse that; run `{current.command}` first"
        )
        missing = NotPrepared(
            f"{num_bytes / 2**20:,.1f} MiB of data must still be prepared: {what}; "
            f"{shutil.disk_usage(home).free / 2**30:,.0f} GiB are free in {home}"
        )
        missing.would_be_refused = not by_a_job
        raise missing
    raise NotPrepared(
        f"data.prepare: {total / 2**20:,.1f} MiB would have to be prepared while this job's devices wait; run "
        f'`{current.command}` with the same overrides and HF_HOME first, or write "allow"'
    )
