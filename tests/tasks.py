"""The repository's tasks, by the names of their folders: their modules, and copies of them."""

import shutil
from pathlib import Path
from types import ModuleType

from largebatch.task_folders import import_from
from paths import ROOT

TASKS = sorted(path.parent.name for path in ROOT.glob("recipes/*/config.py"))


def module(task: str, name: str) -> ModuleType:
    """A module of a task, such as "config"."""
    return import_from(ROOT / "recipes" / task, name)


def build_model(recipe: Path):
    """The `build_model` of a recipe's task."""
    return import_from(recipe.parent, "model").build_model


def copy(task: str, folder: Path) -> Path:
    """A copy of a task's folder, with its recipes, inside of another folder."""
    return shutil.copytree(ROOT / "recipes" / task, folder / task, ignore=shutil.ignore_patterns("__pycache__"))
