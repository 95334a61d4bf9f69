"""States and children of processes."""

import gc
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def is_running(pid: int | str) -> bool:
    """Whether it is there, and not only waiting for its parent to notice that it has ended."""
    return state_of(pid) not in "ZX"


def state_of(pid: int | str) -> str:
    """Linux's letter for what a process is doing; "X" if there is none of this number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def children_of(pid: int) -> list[int]:
    """The processes that the main thread of a process has started, and not yet waited for."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def forked(function: Callable[..., Any], *arguments: Any) -> int:
    """Call a function in a process of its own, and return its exit code."""
    pid = os.fork()
    if pid == 0:
        # What is left of the other process may have threads, which this one lacks: not to be destroyed here.
        gc.freeze()
        code = 1
        try:
            function(*arguments)
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
