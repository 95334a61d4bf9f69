"""`largebatch checkpoints`: which checkpoints a run has. Needs no torch."""

import time
from pathlib import Path

from largebatch.errors import UserError
from largebatch.storage.catalog import Entry, damage, entries
from largebatch.storage.layout import CheckpointError, read_manifest

LINE = "{:<16}{:>10}  {:<18}{:>10}  {:<12}  {}"
COLUMNS = ("checkpoint", "step", "written by", "size", "age", "state")


def print_checkpoints(run_dir: Path, verify: bool) -> bool:
    """Print a line per checkpoint of a run, the newest first.

    Args:
        run_dir: The run's folder.
        verify: Whether to read all files and compare their checksums.

    Returns:
        Whether the newest can be resumed from.

    Raises:
        UserError: There is no such folder, or it has no checkpoints.
    """
    folder = run_dir / "checkpoints"
    found = entries(folder)
    if not found:
        what = "has no checkpoints" if run_dir.is_dir() else "is no folder"
        raise UserError(f"{run_dir} {what}; write the folder of a run, such as runs/resnet_digits")
    print(LINE.format(*COLUMNS))
    problems = [entry.problem or (damage(entry.path) if verify else None) for entry in found]
    for entry, problem in zip(found, problems, strict=True):
        print(LINE.format(entry.path.name, f"{entry.step:,}", *_about(entry, problem)))
    return problems[0] is None


def _about(entry: Entry, problem: str | None) -> tuple[str, str, str, str]:
    if problem is not None:
        return "-", "-", "-", f"cannot be used: {problem}"
    try:
        manifest = read_manifest(entry.path)
    except CheckpointError as error:
        return "-", "-", "-", f"cannot be used: {error}"
    writer = f"{manifest.world_size} x {manifest.strategy}, #{manifest.attempt}"
    return writer, _bytes(entry.size), _age(time.time() - manifest.time), "complete"


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        # What is less would be rounded to 1e+03.
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} seconds"
