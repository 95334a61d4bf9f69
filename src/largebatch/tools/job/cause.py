"""The first cause of a failed start, from what its processes and launchers left in the logs; without torch."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from largebatch.system.failures import ERRORS
from largebatch.system.regular_file import read_bytes

MAX_MESSAGE_CHARS = 500
KILLED = re.compile(r"Signal \d+ \((SIG[A-Z0-9]+)\) received by PID \d+")
# Lines of the launcher's report about a process, before the one that names the signal.
REPORTED = re.compile(r"^\s+(time|rank)\s+: (\S+)")
# Sent by the launcher, to end the other processes.
ENDED_BY_THE_LAUNCHER = "SIGTERM"
# What a process also sends itself when a collective failed because another process went away.
ABORTED = "SIGABRT"
MEANINGS = {"SIGKILL": ", which the kernel sends for lack of memory", "SIGSEGV": ", a crash in compiled code"}


@dataclass(frozen=True, order=True)
class _Failure:
    """One failure; the first in order is the one to name."""

    order: int  # 0 for the error of one process, 1 for a signal, 2 for what another process's end brings about
    time: str  # comparable only between failures of the same kind
    text: str
    # What a process left of its error (see `failures`).
    error: Mapping[str, Any] = field(default_factory=dict, compare=False)


def first_cause(logs: Path) -> tuple[str, Mapping[str, Any]]:
    """The first cause of a failed start, and the first error that its processes have left.

    The cause is one line that ends in where to read more; each is empty if there is none. `logs` is the start's folder,
    with `errors/rank_<rank>.json` and a log of each node. Damaged files are skipped.
    """
    failures = sorted([*_errors(logs), *_signals(logs)])
    error = next((failure.error for failure in failures if failure.error), {})
    return (failures[0].text if failures else ""), error


def _errors(logs: Path) -> Iterator[_Failure]:
    for path in sorted(logs.glob(f"{ERRORS}/rank_*.json")):
        try:
            error = json.loads(read_bytes(path))
            # All who wait report a hang, so the rank of one of them would mislead.
            who = "hang" if error["kind"] == "hang" else f"rank {error['rank']} on {error['node']}"
            message = " ".join(str(error["message"]).split())[:MAX_MESSAGE_CHARS]
            order = 2 if error["consequence"] else 0
            yield _Failure(order, f"{float(error['time']):020.6f}", f"{who}: {message} (see {path})", error)
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            continue


def _signals(logs: Path) -> Iterator[_Failure]:
    for path in sorted(logs.glob("*.log")):
        try:
            with path.open(encoding="utf-8", errors="replace") as lines:
                about: dict[str, str] = {}
                for line in lines:
                    if reported := REPORTED.search(line):
                        about[reported[1]] = reported[2]
                    elif (killed := KILLED.search(line)) and killed[1] != ENDED_BY_THE_LAUNCHER:
                        rank = f"rank {about['rank']} on " if "rank" in about else ""
                        # The log is named after the node.
                        text = f"{rank}{path.stem}: {killed[0]}{MEANINGS.get(killed[1], '')} (see {path})"
                        yield _Failure(2 if killed[1] == ABORTED else 1, about.get("time", ""), text)
        except OSError:
            continue
