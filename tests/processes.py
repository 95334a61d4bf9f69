"""Whether a process is still there."""

from pathlib import Path


def is_running(pid: int | str) -> bool:
    """It is, and is not only waiting for its parent to notice that it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
