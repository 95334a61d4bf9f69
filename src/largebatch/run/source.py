"""What a run keeps of its task: the folder's files as of its start, and the git commit that they are of."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from largebatch.storage.files import replace_json_file

SECONDS_FOR_GIT = 10


def keep_source(target: Path, task: Path) -> None:
    """Copy a task's modules and recipes into `target`, under the folder's own name, and write git.json beside them.

    Args:
        target: A folder, whose earlier content is removed.
        task: The task's folder, outside of it.
    """
    if target.exists():
        shutil.rmtree(target)
    for file in _files(task):
        copy = target / task.name / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(task / file, copy)
    commit = _git(task, "rev-parse", "HEAD")
    changed = None if commit is None else bool(_git(task, "status", "--porcelain", "--", "."))
    replace_json_file(target / "git.json", {"commit": commit, "changed": changed})


def _files(task: Path) -> Iterator[Path]:
    """Modules, those of packages inside, too, and recipes, by their paths in the folder."""
    for folder, subfolders, names in os.walk(task):
        # Runs may be written there, which keep copies of their own.
        subfolders[:] = [
            name
            for name in sorted(subfolders)
            if not name.startswith((".", "__pycache__")) and not Path(folder, name, "plan.json").exists()
        ]
        inside = Path(folder).relative_to(task)
        yield from (
            inside / name for name in names if name.endswith(".py") or (folder == str(task) and name.endswith(".json"))
        )


def _git(folder: Path, *words: str) -> str | None:
    """What git says of a folder; None if it is not in a repository, or there is no git."""
    try:
        result = subprocess.run(
            ["git", "-C", folder, *words], capture_output=True, text=True, check=False, timeout=SECONDS_FOR_GIT
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
