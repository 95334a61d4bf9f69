"""The first cause of a failed start, as its logs tell it."""

import re
from pathlib import Path

# The launcher's words for a process that was ended from outside, such as by the kernel for lack of memory.
_KILLED = re.compile(r"Signal \d+ \((SIG[A-Z]+)\) received by PID \d+")


def first_cause(logs: Path) -> str:
    """The first cause of a failed start in one line; "" if the logs in its folder do not tell."""
    for log in sorted(logs.glob("*.log")):
        for match in _KILLED.finditer(log.read_text(encoding="utf-8", errors="replace")):
            # The launcher ends the other processes with it.
            if match[1] != "SIGTERM":
                return f"{log.stem}: {match[0]}"
    return ""
