"""Attempts: the starts of one run, of which only the latest may write to its folder.

A machine that has lost its network can keep writing to the shared folder for a while after its job was requeued. So
each start takes the next number and, before it publishes anything, checks whether a later one has been taken. A start
has a record, 0001.json, and a folder 0001_<token>/ in which its processes write how they end (see `system.endings`).
"""

import errno
import json
import os
import re
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from largebatch.errors import TrainingFailed
from largebatch.storage.files import sync_folder, write_json_file
from largebatch.system.presence import is_folder
from largebatch.system.regular_file import read_bytes
from largebatch.system.variables import whole_number

FILE_NAME = re.compile(r"([0-9]{4,})\.json")
Record = dict[str, Any]
"""What is recorded of an attempt when it begins."""


@dataclass(frozen=True)
class Attempt:
    """One start of a run."""

    folder: Path  # the run's folder of attempts
    number: int  # the number of the start, counted from 1
    token: str  # distinguishes attempts of the same number if the run folder was replaced

    @property
    def name(self) -> str:
        """A name no other attempt has."""
        return f"{self.number:04d}_{self.token}"

    @property
    def endings_dir(self) -> Path:
        """Where its processes write how they end."""
        return self.folder / self.name

    def check(self) -> None:
        """Raise TrainingFailed if a later attempt has begun or the folder is no longer this run's; OSError if that
        cannot be read.
        """
        latest = latest_attempt(self.folder)
        if latest is None or attempt_name(latest) != self.name:
            who = f"attempt {latest['attempt']} on {latest['host']}" if latest else "another run"
            raise TrainingFailed(
                f"{who} has taken over {self.folder.parent}; this one, attempt {self.number} on "
                f"{socket.gethostname()}, ends here and has published nothing since"
            )


def claim(folder: Path, about: dict[str, Any]) -> Attempt:
    """Begin the next attempt, recorded with `about`; no earlier one can publish from here on."""
    folder.mkdir(exist_ok=True)
    token = secrets.token_hex(4)
    temporary = folder / f".{token}.tmp"
    number = max(_numbers(folder), default=0)
    try:
        while True:
            number += 1
            process = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), **job_start()}
            write_json_file(temporary, {"attempt": number, "token": token, **process, **about})
            with suppress(FileExistsError):
                # Complete when it appears under its name, and only if no other has it: `link` does not replace.
                os.link(temporary, folder / f"{number:04d}.json")
                attempt = Attempt(folder, number, token)
                attempt.endings_dir.mkdir()
                sync_folder(folder)
                return attempt
    finally:
        temporary.unlink(missing_ok=True)


def job_start() -> dict[str, Any]:
    """The scheduler's job, if there is one, and how often it was restarted."""
    return {
        "job_id": os.environ.get("LARGEBATCH_JOB_ID") or None,
        "restart": whole_number("LARGEBATCH_RESTART", 0),
    }


def is_restart_of(earlier: Record) -> bool:
    """Whether this process belongs to the job of an earlier attempt, which the scheduler has restarted."""
    mine = job_start()
    return (
        mine["job_id"] is not None
        and mine["job_id"] == earlier.get("job_id")
        and mine["restart"] > earlier.get("restart", 0)
    )


def latest_attempt(folder: Path) -> Record | None:
    """The record of the latest attempt, if there is one; OSError if it cannot be read."""
    numbers = _numbers(folder)
    return _record(folder, max(numbers)) if numbers else None


def read_attempts(folder: Path) -> list[Record]:
    """The records of all attempts, in their order, without those that cannot be read."""
    found = []
    for number in sorted(_numbers(folder)):
        with suppress(OSError):
            found.append(_record(folder, number))
    return found


def attempt_name(record: Record) -> str:
    """The name of the attempt with a record, which no other attempt has."""
    return f"{record['attempt']:04d}_{record['token']}"


def _record(folder: Path, number: int) -> Record:
    file = folder / f"{number:04d}.json"
    try:
        record: Record = json.loads(read_bytes(file))
        # LookupError or TypeError for one that is damaged.
        record["host"], attempt_name(record)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise OSError(errno.EIO, f"not the record of an attempt: {error}", str(file)) from error
    return record


def _numbers(folder: Path) -> list[int]:
    # Listing opens the folder, which makes network file systems refresh their cache.
    paths = folder.iterdir() if is_folder(folder) else []
    return [int(match[1]) for path in paths if (match := FILE_NAME.fullmatch(path.name))]
