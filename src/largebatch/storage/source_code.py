"""Copies of source code: what a job runs, from its submission on, and what a run was started with.

Each has a git.json, which names the commit and says whether the files had changed since.
"""

import os
import secrets
import shutil
import stat
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from largebatch.errors import UserError, file_errors
from largebatch.storage.files import remove_folder, replace_json_file
from largebatch.storage.layout import read_object
from largebatch.storage.run_folder import RunFolder
from largebatch.system.presence import is_folder

SECONDS_FOR_GIT = 10
GIT = "git.json"
RECIPE = "recipe"
"""In a snapshot, the path in it of the job's recipe, if that is from elsewhere than the project's recipes/."""
OF_A_JOB = ("launch", "slurm", "recipes", "ds_configs", "src/largebatch")
"""The folders of a project that a job needs, as far as the project has them."""


def take_snapshot(project: Path, target: Path, recipe: Path | None = None, task: Path | None = None) -> None:
    """Copy what a job needs to `target`, which is complete or absent; an existing copy is left as it is.

    A recipe that is not in its task's folder is copied into the copy of that folder, and a task that is not in the
    project's recipes/ into that of recipes/. Links are replaced by what they point to. Data, runs and hidden files are
    left out.

    Raises:
        UserError: The project has no recipes, or the copy cannot be written.
        StorageError: It cannot be written now.
    """
    if (target / GIT).is_file():
        return
    if not (project / "recipes").is_dir():
        raise UserError(f"there is no recipes/ in {project.absolute()} to copy; go to the top of the repository")
    if is_folder(target) and any(target.iterdir()):
        raise UserError(f"{target} holds files that are not a snapshot's; name another folder")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    with file_errors(f"the snapshot {target} cannot be written", "name another folder"):
        try:
            for folder in OF_A_JOB:
                if (project / folder).is_dir():
                    _copy(project / folder, temporary / folder, _is_code)
            if recipe and task:
                task = Path(os.path.normpath(task.absolute()))
                place = Path("recipes", task.name)
                if not task.parent.samefile(project / "recipes"):
                    remove_folder(temporary / place)
                    _copy(task, temporary / place, _is_code)
                _copy_file(recipe, temporary / place / recipe.name)
                if recipe != place / recipe.name:
                    (temporary / RECIPE).write_text(f"{place / recipe.name}\n", encoding="utf-8")
            replace_json_file(temporary / GIT, _state_of(project))
            temporary.rename(target)
        finally:
            remove_folder(temporary)


def keep_source(target: Path, task: Path, recipe: str | None = None) -> None:
    """Replace `target` with a copy of the modules and recipes in a task's folder, under its name, and a git.json.

    A recipe that runs from another folder is copied, too.
    """

    def is_kept(path: Path) -> bool:
        is_recipe = path.suffix == ".json" and path.parent == task
        return (path.suffix == ".py" or is_recipe or path.is_dir()) and _is_code(path)

    remove_folder(target)
    _copy(task, target / task.name, is_kept)
    if recipe:
        _copy_file(Path(recipe), target / task.name / Path(recipe).name)
    # A snapshot, or the source of another run, is not in a repository of its own.
    copied = [read_object(folder / GIT) for folder in task.parents[:2] if (folder / GIT).is_file()]
    replace_json_file(target / GIT, copied[0] if copied else _state_of(task))


def _copy(folder: Path, target: Path, is_kept: Callable[[Path], bool]) -> None:
    """Copy those files and folders in a folder that are kept, and what links to such.

    Folders get the permissions of new ones, so that they can be deleted even if the original is read-only:
    `shutil.copytree` would give them those of the originals.
    """
    target.mkdir(parents=True)
    for source in filter(is_kept, sorted(folder.iterdir())):
        if source.is_dir():
            _copy(source, target / source.name, is_kept)
        elif source.is_file():
            _copy_file(source, target / source.name)


def _copy_file(source: Path, target: Path) -> None:
    """Replace a file by a copy, which nobody can read who cannot read the original: it may be a secret."""
    target.unlink(missing_ok=True)
    create = partial(os.open, mode=stat.S_IMODE(source.stat().st_mode))
    with source.open("rb") as original, open(target, "xb", opener=create) as copy:
        shutil.copyfileobj(original, copy)


def _is_code(path: Path) -> bool:
    """Whether it may be source code: not a hidden file, a cache, a run, data, or a link to a parent."""
    return not (
        path.name.startswith((".", "__pycache__"))
        or RunFolder(path).plan_file.exists()
        or (path.name in ("data", "runs") and path.is_dir() and not any(path.glob("*.py")))
        or path.parent.resolve().is_relative_to(path.resolve())
    )


def _state_of(folder: Path) -> dict[str, Any]:
    """The commit of the repository that a folder is in, and whether files in the folder have changed since.

    Both are None if it is not in a repository, or git is not installed.
    """
    words = ["git", "-C", str(folder), "status", "--porcelain=v2", "--branch", "--", "."]
    try:
        result = subprocess.run(words, capture_output=True, text=True, check=True, timeout=SECONDS_FOR_GIT)
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "changed": None}
    # "# branch.oid COMMIT", more lines about the branch, and one about each file that has changed.
    first, *lines = result.stdout.splitlines()
    return {"commit": first.split()[-1], "changed": not all(line.startswith("#") for line in lines)}
