"""Task folders as packages: a folder with `config.py`, `data.py`, `model.py` and `train.py`, wherever it is.

A folder is imported as a package that is named after it and its real path, such as `causal_lm_5f0c2b7e`. So folders of
the same name do not collide, a link to a folder is the same package, and its modules import each other relatively.
"""

import hashlib
import importlib
import os
import re
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType, TracebackType

from largebatch.system.endings import OwnEnding

SCHEMA = "recipe.schema.json"
"""A task folder's JSON Schema, next to its recipes."""


def load_package(script: str) -> str:
    """Load the package of a task's `train.py`, which begins with `__package__ = load_package(__file__)`.

    Python runs a script outside of any package. After this line it imports the modules of its folder under the names
    that every other program uses, and so does a process of `multiprocessing` that imports the script again. An
    exception that ends the script, even one of its imports, is known to `largebatch job-ended`.

    Returns:
        The package's name.
    """
    folder = os.path.realpath(Path(script).parent)
    # Python adds a script's folder, whose config.py could be imported in place of another library's.
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.realpath(entry) != folder]
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) == script:
        # After `python -m`, it names another package. Without it, spawned processes find the script by its path.
        main.__spec__ = None
        sys.excepthook = _end_and_print
    return package_of(folder)


def import_from(folder: str | Path, module: str) -> ModuleType:
    """A module of a task's folder, such as "model"."""
    return importlib.import_module(f"{package_of(folder)}.{module}")


def recipes_in(folder: Path) -> list[Path]:
    """The recipes of all task folders in a folder, sorted."""
    return sorted(path for path in folder.glob("*/*.json") if path.name != SCHEMA)


def _end_and_print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write the ending by what a script's own imports raise, too: they run outside of `from_command_line`."""
    if isinstance(error, Exception):
        OwnEnding().fail(error)
    sys.__excepthook__(kind, error, trace)


def package_of(folder: str | Path) -> str:
    """Make a folder a package, unless it is one already, and return the package's name."""
    folder = os.path.realpath(folder)
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]
    name = re.sub(r"^\d|\W", "_", Path(folder).name) + f"_{digest}"
    if name not in sys.modules:
        spec = ModuleSpec(name, loader=None, is_package=True)
        spec.submodule_search_locations = [folder]
        sys.modules[name] = module_from_spec(spec)
    return name
