"""The first cause of a failed start, from what its processes and launchers left in the logs; without torch."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOST_CHARACTERS = 500
HANG = "Hang"  # the type of error that the watchdog keeps
KILLED = re.compile(r"Signal \d+ \((SIG[A-Z0-9]+)\) received by PID \d+")
# Lines of the launcher's report about a process, before the one that names the signal.
REPORTED = re.compile(r"^\s+(time|rank)\s+: (\S+)")
# Sent by the launcher, to end the other processes.
ENDED_BY_THE_LAUNCHER = "SIGTERM"
# What a process also sends itself when a collective failed because another one went away.
ABORTED = "SIGABRT"
MEANINGS = {"SIGKILL": ", as by the kernel for lack of memory", "SIGSEGV": ", a crash in compiled code"}


@dataclass(frozen=True, order=True)
class _Failure:
    """One failure; the first in order is the one to name."""

    is_certain: int
    """0 for the error of one process, 1 for a signal, 2 for what another process's end brings about."""
    time: str
    """Comparable only between failures of the same kind."""
    text: str


def first_cause(logs: Path) -> str:
    """The first cause of a failed start, in one line that ends in where to read more; "" if there is no sign of one.

    Args:
        logs: The start's folder, with `errors/rank_<rank>.json` and a log of each node. Damaged files are passed over.
    """
    failures = [*_errors(logs), *_signals(logs)]
    return min(failures).text if failures else ""


def _errors(logs: Path) -> Iterator[_Failure]:
    for path in sorted(logs.glob("errors/rank_*.json")):
        try:
            error = json.loads(path.read_bytes())
            kind, where = error["type"], f"rank {error['rank']} on {error['node']}"
            # A hang is reported by those who wait, and its message says for whom.
            who = kind if kind == HANG else f"{where}: {kind}"
            message = " ".join(str(error["message"]).split())[:MOST_CHARACTERS]
            order = 2 if error["consequence"] else 0
            yield _Failure(order, f"{float(error['time']):020.6f}", f"{who}: {message} (see {path})")
        except (OSError, ValueError, TypeError, KeyError):
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
