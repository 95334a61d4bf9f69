"""Files that somebody else may have put there: no pipe, device or endless file, and no link unless asked."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

MAX_BYTES = 2**30
"""More than any file that is read at once has, even the manifest of a checkpoint of thousands of processes."""


def read_bytes(path: Path, follow_links: bool = False) -> bytes:
    """The content of a regular file; OSError, as from `open_to_read`, also if it is too large."""
    with open_to_read(path, follow_links) as file:
        if os.fstat(file.fileno()).st_size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"Larger than {MAX_BYTES:,} bytes", str(path))
        return file.read(MAX_BYTES)


def open_to_read(path: Path, follow_links: bool = False) -> BufferedReader:
    """Open a regular file.

    Args:
        path: The file.
        follow_links: Whether it may be a link. In a folder of somebody else, a link could lead to private files of the
            reader, whose content a command would then show.

    Raises:
        OSError: It is missing, cannot be read, or is not a regular file.
    """
    file = open(path, "rb", opener=_open_at_once if follow_links else _open_no_link)  # noqa: SIM115 - returned open
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "Not a regular file", str(path))


def append(path: Path, text: str) -> None:
    """Add text to a regular file, which may be new; OSError as from `read_bytes`."""
    with open(path, "a", encoding="utf-8", opener=_open_no_link) as file:
        file.write(text)


def _open_at_once(name: str, flags: int) -> int:
    # Opening a pipe would otherwise wait for its other end.
    return os.open(name, flags | os.O_NONBLOCK, 0o666)


def _open_no_link(name: str, flags: int) -> int:
    return _open_at_once(name, flags | os.O_NOFOLLOW)
