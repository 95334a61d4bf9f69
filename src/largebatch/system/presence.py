"""Whether something is there. What cannot be told now raises OSError; `pathlib` takes it for no since Python 3.14."""

import errno
import stat
from pathlib import Path

# There is nothing; as `pathlib` before.
NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP)


def exists(path: Path) -> bool:
    """Whether a path leads to something; OSError if that cannot be told."""
    return _mode(path) is not None


def is_folder(path: Path) -> bool:
    """Whether a path leads to a folder; OSError if that cannot be told."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except OSError as error:
        if error.errno in NOTHING:
            return None
        raise
