"""Small file systems that can be filled up; mounting one needs root."""

import errno
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A new folder with a file system of its own."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        # Lazily, because tensors that are still in memory keep their file.
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path, left: int = 0) -> Path:
    """Take the space that is left, but for so many bytes; deleting the returned file gives it back."""
    path = disk / "somebody_elses"
    size = shutil.disk_usage(disk).free - left
    assert size > 0
    try:
        path.write_bytes(b"x" * size)
    except OSError as error:
        # Somebody else has taken some of it meanwhile, and now it is full.
        if left or error.errno != errno.ENOSPC:
            raise
    return path
