"""States and children of processes."""

from pathlib import Path


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
