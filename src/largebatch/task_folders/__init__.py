"""Task folders as packages: a folder with `config.py`, `data.py`, `model.py` and `train.py`, wherever it is.

A folder is imported as `largebatch.task_folders.<its real path>`, so that folders with files of the same names do not
collide, and its modules import each other relatively. The name leads back to the folder in every process, such as
loader processes and those that read pickles.
"""

import importlib
import os
import re
import runpy
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from largebatch.failures import leave_evidence

SCHEMA = "recipe.schema.json"
"""A task folder's JSON Schema, next to its recipes."""


def package_of(folder: str | Path) -> str:
    """The name under which a task's folder is imported.

    >>> package_of("/home/ann/my_task")
    'largebatch.task_folders._2fhome_2fann_2fmy_5ftask'
    """
    path = os.fsencode(os.path.realpath(folder)).decode("latin-1")
    return f"{__name__}." + re.sub("[^A-Za-z0-9]", lambda match: f"_{ord(match[0]):02x}", path)


def owner_of(module: str) -> str | None:
    """The package of the task folder that a module belongs to; None for every other module."""
    if not module.startswith(f"{__name__}."):
        return None
    return ".".join(module.split(".")[: __name__.count(".") + 2])


def folder_of(module: str) -> Path | None:
    """The task folder that a module belongs to, by the module's name; None for every other module."""
    owner = owner_of(module)
    return Path(_decoded(owner.rpartition(".")[2])) if owner else None


def recipes_in(folder: Path) -> list[Path]:
    """The recipes of all task folders in a folder, sorted."""
    return sorted(path for path in folder.glob("*/*.json") if path.name != SCHEMA)


def import_from(folder: str | Path, module: str) -> ModuleType:
    """A module of a task's folder, such as "model"."""
    return importlib.import_module(f"{package_of(folder)}.{module}")


def run_as_main(script: str | Path) -> dict[str, Any]:
    """Run a file of a task's folder as the main program and as a module of its package; return its globals."""
    script = Path(script)
    if not (script.parent / "config.py").is_file():
        # A symbolic link from another folder.
        script = Path(os.path.realpath(script))
    folder = Path(os.path.realpath(script.parent))
    # Python adds a script's folder, whose config.py could be imported in place of another library's.
    sys.path[:] = [path for path in sys.path if not path or Path(os.path.realpath(path)) != folder]
    try:
        return runpy.run_module(f"{package_of(folder)}.{script.stem}", run_name="__main__", alter_sys=True)
    except Exception as error:
        leave_evidence(error)
        raise


def run_script(script: str, spec: ModuleSpec | None) -> None:
    """For the top of a task's `train.py`: if it was started as a script, run it again in its package, and exit.

    Args:
        script: `__file__` of the train.py.
        spec: `__spec__` of the train.py, which says whether it is in the package already.
    """
    if spec is None or owner_of(spec.name) is None:
        run_as_main(script)
        sys.exit()


def _decoded(name: str) -> str:
    path = re.sub("_([0-9a-f]{2})", lambda match: chr(int(match[1], 16)), name)
    return os.fsdecode(path.encode("latin-1"))


class _TaskFolders(MetaPathFinder):
    def find_spec(self, fullname: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        parent, _, encoded = fullname.rpartition(".")
        if parent != __name__:
            return None
        folder = Path(_decoded(encoded))
        if not folder.is_dir():
            return None
        own = folder / "__init__.py"
        if own.is_file():
            return spec_from_file_location(fullname, own, submodule_search_locations=[str(folder)])
        spec = ModuleSpec(fullname, loader=None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec


sys.meta_path.append(_TaskFolders())
