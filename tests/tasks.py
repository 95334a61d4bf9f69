"""The repository's tasks, by the names of their folders: modules, copies, and overrides for small runs."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from largebatch.data.preparation import Preparation
from largebatch.task_folders import import_from
from paths import ROOT

TASKS = sorted(path.parent.name for path in ROOT.glob("recipes/*/config.py"))
# Overrides that make GPT's recipe small, and those with another batch.
SMALL = ("--model.num_layers=1", "--model.hidden_size=16", "--model.num_heads=2", "--data.block_size=16")
TINY = (*SMALL, "--batch.global_batch_size=24", "--batch.micro_batch_size=4")


def module(task: str, name: str) -> ModuleType:
    """A module of a task, such as "config"."""
    return import_from(ROOT / "recipes" / task, name)


def sources(task: str) -> Callable:
    """The function `sources` of a task, which prepares data as far as a job may if it is not told more."""

    def opened(config, preparation=None):
        return module(task, "data").sources(config, preparation or Preparation())

    return opened


def build_model(recipe: Path):
    """The `build_model` of a recipe's task."""
    return import_from(recipe.parent, "model").build_model


def copy(task: str, folder: Path) -> Path:
    """A copy of a task's folder, with its recipes, inside of another folder."""
    return shutil.copytree(ROOT / "recipes" / task, folder / task, ignore=shutil.ignore_patterns("__pycache__"))


def link_accelerate_configs() -> None:
    """Give the shipped Accelerate configs to the current folder, for tasks that have none next to them."""
    folder = Path("recipes/accelerate_configs")
    folder.parent.mkdir(exist_ok=True)
    if not folder.exists():
        folder.symlink_to(ROOT / folder)
