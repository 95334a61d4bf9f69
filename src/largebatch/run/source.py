"""The copy of a task's files, and its git commit, that a run keeps from its start."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from largebatch.storage.files import replace_json_file

SECONDS_FOR_GIT = 10


def keep_source(target: Path, task: Path) -> None:
    """Replace `target` with a copy of the modules and recipes in a task's folder, under its name, and a git.json."""
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
    """The paths, relative to the task's folder, of its recipes and of its modules, including those in packages."""
    for folder, subfolders, names in os.walk(task):
        # Runs in there keep copies of their own.
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
    """The output of git in a folder; None if it is not in a repository, or git is not installed."""
    try:
        result = subprocess.run(
            ["git", "-C", folder, *words], capture_output=True, text=True, check=False, timeout=SECONDS_FOR_GIT
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
