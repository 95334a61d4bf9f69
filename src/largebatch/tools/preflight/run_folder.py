"""Whether the file system of the run folder can do what runs need of it."""

import fcntl
from pathlib import Path


def missing_ability(folder: Path, name: str) -> str | None:
    """What the file system of a folder in the run folder lacks first, with a remedy; None if it has all.

    `name` starts the names of the files to write; no other node uses it.

    Raises:
        OSError: The folder cannot be written.
    """
    file = folder / f"{name}.probe_1"
    other = folder / f"{name}.probe_2"
    try:
        other.touch()
        with file.open("w", encoding="utf-8") as opened:
            ability = "locks (flock)"
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                ability = "renaming a file over another"
                file.rename(other)
                ability = "hard links"
                file.hardlink_to(other)
            except OSError as error:
                return (
                    f"the run folder's file system does not support {ability}: {error.strerror}; set RUN_DIR to a "
                    "POSIX file system, such as NFS, or Lustre mounted with -o flock, and not a mounted object store"
                )
    finally:
        file.unlink(missing_ok=True)
        other.unlink(missing_ok=True)
    return None
