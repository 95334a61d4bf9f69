"""Processes that a signal has ended, which could not write their endings, from the reports of torch's launcher."""

import re
import time
from contextlib import suppress
from pathlib import Path

from largebatch.system.endings import Ending
from largebatch.system.failures import Kind

SIGNALED = re.compile(r"Signal \d+ \((SIG[A-Z0-9]+)\) received by PID \d+")
# Lines of the launcher's report about a process, before the one that names the signal.
REPORTED = re.compile(r"^\s+(time|rank)\s+: (\S+)")
# Sent by the launcher, to end the other processes.
ENDED_BY_THE_LAUNCHER = "SIGTERM"
# What a process also sends itself when a collective failed because another process went away.
ABORTED = "SIGABRT"
MEANINGS = {"SIGKILL": ", which the kernel sends for lack of memory", "SIGSEGV": ", a crash in compiled code"}


def killed_processes(logs: Path) -> list[Ending]:
    """The processes that were killed, from the logs of all nodes in the folder of a start, without torch."""
    found: list[Ending] = []
    for path in sorted(logs.glob("*.log")):
        with suppress(OSError), path.open(encoding="utf-8", errors="replace") as lines:
            about: dict[str, str] = {}
            for line in lines:
                if reported := REPORTED.search(line):
                    about[reported[1]] = reported[2]
                elif (signaled := SIGNALED.search(line)) and signaled[1] != ENDED_BY_THE_LAUNCHER:
                    ending = Ending(
                        Kind.KILLED,
                        signaled[0] + MEANINGS.get(signaled[1], ""),
                        is_consequence=signaled[1] == ABORTED,
                        rank=int(about["rank"]) if about.get("rank", "").isdecimal() else None,
                        node=path.stem,
                        time=_seconds(about.get("time", "")),
                        file=path,
                    )
                    found.append(ending)
    return found


def _seconds(text: str) -> float:
    """A time as the launcher writes it, in seconds since 1970; 0 if it is none."""
    with suppress(ValueError, OverflowError):
        return time.mktime(time.strptime(text, "%Y-%m-%d_%H:%M:%S"))
    return 0.0
