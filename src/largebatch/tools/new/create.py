"""Making a bundle: all of it, or nothing."""

import errno
import os
import re
import shutil
from pathlib import Path

from largebatch.errors import UserError
from largebatch.task_folders import SCHEMA
from largebatch.tools.new.job import PACKAGE, BundledJob, shipped_folder
from largebatch.tools.new.texts import texts

COPIED = ("recipes/accelerate_configs/*.yaml", "ds_configs/*.json", "slurm/launch.sh")

LICENSE = "LICENSE.largebatch"


def create_bundle(folder: Path, job: BundledJob, vendor: bool) -> None:
    """Copy a recipe, and all that it runs with, into a folder that stands alone.

    The layout is the repository's, so that every command works there as it does here. The folder may be there if it is
    empty. With `vendor` the package is copied as well, instead of being named in requirements.txt.

    Raises:
        UserError: There is something in the folder already, it cannot be written, or the recipe's script does not set
            STRATEGY as others do. Nothing is left of it then.
    """
    try:
        # Unlike Path.resolve, without an exception for links that lead in a circle.
        target = Path(os.path.realpath(folder))
        exists = _require_nothing_there(folder, target)
        staging = (target if exists else target.parent) / f".largebatch_new_{os.getpid()}"
        staging.mkdir()
        try:
            _write(staging, job, vendor)
            _move(staging, target, exists)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"{folder} cannot be made ({why}); give a new folder where you may write") from error


def _require_nothing_there(folder: Path, target: Path) -> bool:
    """Whether the folder is there, and empty."""
    if not target.parent.is_dir():
        raise UserError(f"{folder}: there is no folder {target.parent}; make it first, or give another place")
    if not target.exists():
        return False
    if not target.is_dir():
        raise UserError(f"{folder} is there, and is no folder; give a new one")
    found = sorted(path.name for path in target.iterdir())
    if found:
        shown = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
        raise UserError(f"{folder} is not empty ({shown}), and nothing is overwritten; give a new folder")
    return True


def _move(staging: Path, target: Path, exists: bool) -> None:
    if not exists:
        staging.rename(target)
        return
    # Somebody else may have begun there meanwhile.
    if any(path != staging for path in target.iterdir()):
        raise FileExistsError(errno.EEXIST, "something else was put there meanwhile")
    # The folder itself stays, because somebody's shell may be in it.
    for path in sorted(staging.iterdir()):
        path.rename(target / path.name)


def _write(folder: Path, job: BundledJob, vendor: bool) -> None:
    shipped, task = shipped_folder(), job.source.parent
    for path in (path for path in task.iterdir() if path.suffix in (".py", ".md") or path.name == SCHEMA):
        _copy(path, folder / job.recipe.parent / path.name)
    _copy(job.source, folder / job.recipe)
    _copy(job.batch_script, folder / job.script)
    for path in (path for pattern in COPIED for path in shipped.glob(pattern)):
        _copy(path, folder / path.relative_to(shipped))
    # Of the copied files, not of the repository that they begin. A bundle with the package in it has it by that name.
    license_file = next(path for name in (LICENSE, "LICENSE") if (path := shipped / name).is_file())
    _copy(license_file, folder / LICENSE)
    for name, text in texts(job, vendor).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    _set_strategy(folder / job.script, job.strategy)
    if vendor:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE, folder / "src/largebatch", ignore=ignored, copy_function=shutil.copyfile)
        shutil.rmtree(folder / "src/largebatch/shipped", ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    # Not with the source's permissions: an installation may be read-only.
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _set_strategy(script: Path, strategy: str) -> None:
    text, count = re.subn(r"(?<=\nSTRATEGY=\$\{STRATEGY:-)\w+(?=\}\n)", strategy, script.read_text(encoding="utf-8"))
    if count != 1:
        raise UserError(f"{script.name} sets STRATEGY {count} times by default; write STRATEGY=${{STRATEGY:-ddp}} once")
    script.write_text(text, encoding="utf-8")
