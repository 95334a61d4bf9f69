"""Finds a run's checkpoints, checks that they are complete and intact, and deletes old ones. Needs no torch."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from largebatch.errors import is_transient
from largebatch.storage.files import FileRecord, read_record, remove_folder, rename_folder, sync_folder
from largebatch.storage.layout import (
    FILE_NAME,
    MANIFEST,
    MARKER,
    TEMPORARY_NAME,
    CheckpointError,
    read_json,
    reading,
    step_of,
    temporary_name,
)
from largebatch.system.presence import exists, is_folder


@dataclass(frozen=True)
class Entry:
    """A checkpoint's folder."""

    path: Path
    step: int  # optimizer steps completed, by the folder's name; -1 if it was renamed
    problem: str | None = None  # why it cannot be used; None if all files are there with the sizes they must have
    size: int = 0  # bytes of its files
    is_transient: bool = False  # whether another try may find no problem


def entries(folder: Path) -> list[Entry]:
    """The checkpoints in a run's folder of checkpoints, latest first, without those that are still being written."""
    paths = folder.iterdir() if is_folder(folder) else []
    found = [entry_at(path) for path in paths if step_of(path.name) is not None]
    return sorted(found, key=lambda entry: entry.step, reverse=True)


def entry_at(path: Path) -> Entry:
    """The checkpoint in a folder, which may have been renamed."""
    named = step_of(path.name)
    entry = Entry(path, -1 if named is None else named)
    try:
        records = read_marker(path)
        for name, record in records.items():
            with reading(name):
                size = (path / name).stat().st_size
            if size != record.size:
                raise CheckpointError(f"{name} has {size} bytes, but had {record.size} when it was complete")
    except (CheckpointError, OSError) as error:
        return unusable(entry, error)
    return replace(entry, size=sum(record.size for record in records.values()))


def read_marker(path: Path) -> dict[str, FileRecord]:
    """The record of each file of a checkpoint; CheckpointError if it is not complete or its marker is not valid."""
    if path.is_symlink():
        raise CheckpointError("it is a link, not a folder")
    if not is_folder(path):
        raise CheckpointError("there is no such folder")
    if not exists(path / MARKER):
        raise CheckpointError(f"there is no {MARKER} in it, so it is not a complete checkpoint")
    raw = read_json(path / MARKER)
    try:
        records = {name: FileRecord(record["size"], record["checksum"]) for name, record in raw["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MARKER} is not a checkpoint's") from error
    named = step_of(path.name)
    if named is not None and raw.get("step") != named:
        raise CheckpointError(f"it is of step {raw.get('step')}, but its name says otherwise")
    for name in records:
        if not FILE_NAME.fullmatch(name):
            raise CheckpointError(f"it names a file {name!r}, which is not a checkpoint's")
    if MANIFEST not in records:
        raise CheckpointError(f"{MARKER} does not name {MANIFEST}")
    return records


def verify_checksums(path: Path, share: int = 0, num_shares: int = 1) -> None:
    """Raise CheckpointError if the content of a complete checkpoint's files has changed; OSError if it cannot be read.

    To divide the work over `num_shares` processes, each reads every `num_shares`-th file, from number `share` on.
    """
    for name, record in sorted(read_marker(path).items())[share::num_shares]:
        with reading(name):
            # A file that is much larger now would take long to read.
            if (path / name).stat().st_size != record.size or read_record(path / name) != record:
                raise CheckpointError(f"{name} has changed since it was written: its checksum differs")


def unusable(entry: Entry, error: CheckpointError | OSError) -> Entry:
    """The entry of a checkpoint that cannot be used because of an error."""
    transient = is_transient(error)
    problem = f"it cannot be read now: {error}" if transient else str(error)
    return replace(entry, problem=problem, is_transient=transient)


def prune(folder: Path, keep_last: int | None, is_kept_forever: Callable[[int], bool], attempt: str) -> None:
    """Delete complete checkpoints that are older than the latest `keep_last` complete ones; None keeps all.

    Those that are not complete are neither counted nor deleted. `is_kept_forever` is asked for each one's step.
    """
    if keep_last is None:
        return
    complete = [entry for entry in entries(folder) if entry.problem is None]
    for entry in complete[keep_last:]:
        if not is_kept_forever(entry.step):
            discard(entry.path, attempt)


def discard(path: Path, attempt: str) -> None:
    """Delete a checkpoint, which loses its name first: an interrupted deletion leaves nothing that looks like one."""
    renamed = path.with_name(temporary_name(path.name, attempt, "old"))
    remove_folder(renamed)
    rename_folder(path, renamed)
    remove_folder(renamed)


def discard_incomplete(path: Path, attempt: str) -> None:
    """Delete a checkpoint if it is there without a marker; if the file system refuses, it stays, and is incomplete."""
    with suppress(OSError):
        if exists(path) and not exists(path / MARKER):
            discard(path, attempt)


def remove_leftovers(folder: Path) -> None:
    """Delete checkpoints that earlier attempts were writing or deleting when they ended, as far as possible."""
    if is_folder(folder):
        for path in folder.iterdir():
            if TEMPORARY_NAME.fullmatch(path.name) and not path.is_symlink():
                # On NFS, files that another process still has open stay.
                with suppress(OSError):
                    remove_folder(path)


def set_aside(folder: Path, step: int, attempt: str) -> None:
    """Move checkpoints after `step`, where the run resumes, to a folder of their own; delete those without a marker."""
    aside = folder / f"set_aside_by_attempt_{attempt}"
    for entry in entries(folder):
        if entry.step > step:
            discard_incomplete(entry.path, attempt)
            if exists(entry.path):
                aside.mkdir(exist_ok=True)
                rename_folder(entry.path, aside / entry.path.name)
                sync_folder(folder)
