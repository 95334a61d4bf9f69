"""Processes that a signal has ended, which could not write their endings, from the reports of torch's launcher."""

import re
from contextlib import suppress
from pathlib import Path

from largebatch.system.endings import Ending
from largebatch.system.failures import Kind

SIGNALED = re.compile(r"Signal \d+ \((SIG[A-Z0-9]+)\) received by PID \d+")
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
            for line in lines:
                signaled = SIGNALED.search(line)
                if signaled and signaled[1] != ENDED_BY_THE_LAUNCHER:
                    message = signaled[0] + MEANINGS.get(signaled[1], "")
                    is_consequence = signaled[1] == ABORTED
                    found.append(
                        Ending(Kind.KILLED, message, is_consequence=is_consequence, node=path.stem, file=str(path))
                    )
    return found
