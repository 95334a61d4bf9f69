"""Reading files that somebody else may have put there: no pipe, device or endless file, and no link unless asked."""

import errno
import os
import stat
from pathlib import Path

MAX_BYTES = 2**30
"""More than any file that is read at once has, even the manifest of a checkpoint of thousands of processes."""


def read_bytes(path: Path, follow_links: bool = False) -> bytes:
    """The content of a regular file.

    Args:
        path: The file.
        follow_links: Whether it may be a link. Whoever reads another's folder would otherwise show files of their own.

    Raises:
        OSError: It is missing, cannot be read, is not a regular file, or is too large.
    """

    def open_at_once(name: str, flags: int) -> int:
        # Opening a pipe would otherwise wait for its other end.
        return os.open(name, flags | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW))

    with open(path, "rb", opener=open_at_once) as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        if state.st_size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"Larger than {MAX_BYTES:,} bytes", str(path))
        return file.read(MAX_BYTES)
