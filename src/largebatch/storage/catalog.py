"""Which checkpoints a run has, which of them are complete and intact, and which may be deleted. Needs no torch."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from largebatch.storage.files import FileRecord, read_record, remove_folder, rename_folder, sync_folder
from largebatch.storage.layout import (
    MANIFEST,
    MARKER,
    TEMPORARY_NAME,
    CheckpointError,
    check_file_names,
    read_json,
    step_of,
    temporary_name,
)


@dataclass(frozen=True)
class Entry:
    """A checkpoint's folder."""

    path: Path
    step: int
    """Optimizer steps completed, by the folder's name."""
    problem: str | None
    """Why it cannot be used; None if all files are there with the sizes they must have."""
    size: int
    """Bytes of its files."""


def entries(folder: Path) -> list[Entry]:
    """The checkpoints in a run's folder of checkpoints, newest first, without those that are still being written."""
    if not folder.is_dir():
        return []
    steps = {path: step_of(path.name) for path in folder.iterdir()}
    found = [_entry(path, step) for path, step in steps.items() if step is not None]
    return sorted(found, key=lambda entry: entry.step, reverse=True)


def entry_at(path: Path) -> Entry:
    """The checkpoint in a folder, which may have been renamed."""
    step = step_of(path.name)
    return _entry(path, -1 if step is None else step)


def _entry(path: Path, step: int) -> Entry:
    try:
        records = read_marker(path)
        for name, record in records.items():
            if not (path / name).is_file():
                raise CheckpointError(f"{name} is missing")
            if (size := (path / name).stat().st_size) != record.size:
                raise CheckpointError(f"{name} has {size} bytes, it had {record.size} when it was complete")
    except (CheckpointError, OSError) as error:
        return Entry(path, step, str(error), 0)
    return Entry(path, step, None, sum(record.size for record in records.values()))


def read_marker(path: Path) -> dict[str, FileRecord]:
    """What every file of a checkpoint must be; CheckpointError if it was not completed, or its marker is not valid."""
    if path.is_symlink():
        raise CheckpointError("it is a link, not a folder")
    if path.is_dir() and not (path / MARKER).exists():
        raise CheckpointError(f"it was not completed: there is no {MARKER}")
    raw = read_json(path / MARKER)
    try:
        records = {name: FileRecord(record["size"], record["checksum"]) for name, record in raw["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MARKER} is not that of a checkpoint") from error
    named = step_of(path.name)
    if named is not None and raw.get("step") != named:
        raise CheckpointError(f"it is of step {raw.get('step')}, but its name says otherwise")
    check_file_names(records)
    if MANIFEST not in records:
        raise CheckpointError(f"{MARKER} does not name {MANIFEST}")
    return records


def verify_checksums(path: Path, share: int = 0, num_shares: int = 1) -> str | None:
    """What is wrong with the content of a complete checkpoint's files, by their checksums; None if they are intact.

    Several processes can share the work: of `num_shares` parts of the files, this one reads number `share`.
    """
    try:
        for name, record in sorted(read_marker(path).items())[share::num_shares]:
            if read_record(path / name) != record:
                return f"{name} is not what was written: its checksum differs"
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def prune(folder: Path, keep_last: int | None, is_kept_for_ever: Callable[[int], bool], attempt: str) -> Sequence[Path]:
    """Delete complete checkpoints that are older than the `keep_last` newest complete ones; None keeps all.

    A checkpoint is complete if it has a marker and all files in their sizes; checksums are not verified again. Others
    are neither counted nor deleted. A checkpoint loses its name first, so that one whose deletion is interrupted is
    never mistaken for a checkpoint.

    Args:
        folder: The run's folder of checkpoints.
        keep_last: How many to keep.
        is_kept_for_ever: Whether the checkpoint after so many steps stays in any case.
        attempt: Name of the attempt that deletes.

    Returns:
        The folders that were deleted.
    """
    if keep_last is None:
        return []
    complete = [entry for entry in entries(folder) if entry.problem is None]
    old = [entry for entry in complete[keep_last:] if not is_kept_for_ever(entry.step)]
    for entry in old:
        discard(entry, attempt)
    return [entry.path for entry in old]


def discard(entry: Entry, attempt: str) -> None:
    """Delete a checkpoint."""
    renamed = entry.path.with_name(temporary_name(entry.step, attempt, "old"))
    remove_folder(renamed)
    rename_folder(entry.path, renamed)
    remove_folder(renamed)


def discard_incomplete(folder: Path, step: int, attempt: str) -> None:
    """Delete the checkpoint of a step if it has no marker; if it cannot be deleted, it stays, known as incomplete."""
    # The file system may not even list what is there.
    with suppress(OSError):
        for entry in entries(folder):
            if entry.step == step and not (entry.path / MARKER).exists():
                discard(entry, attempt)


def remove_leftovers(folder: Path) -> None:
    """Delete what earlier attempts were writing or deleting when they ended."""
    if folder.is_dir():
        for path in folder.iterdir():
            if TEMPORARY_NAME.fullmatch(path.name) and not path.is_symlink():
                remove_folder(path)


def set_aside(folder: Path, step: int, attempt: str) -> None:
    """Take the checkpoints of steps after `step`, from which the run resumes, out of the way.

    Those that were never completed are deleted, others are moved to a folder of their own.
    """
    later = [entry for entry in entries(folder) if entry.step > step]
    for entry in later:
        discard_incomplete(folder, entry.step, attempt)
    later = [entry for entry in later if entry.path.exists()]
    if later:
        aside = folder / f"set_aside_by_attempt_{attempt}"
        aside.mkdir()
        for entry in later:
            entry.path.rename(aside / entry.path.name)
        sync_folder(folder)
