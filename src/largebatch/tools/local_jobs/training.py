"""Runs a recipe's train.py in this process."""

import sys
from pathlib import Path

from largebatch.config import task_of
from largebatch.task_folders import import_from


def train(recipe: Path, *arguments: str, run_dir: Path, task: Path | None = None) -> None:
    """Run `main` of a task's train.py with the command line of a run; None means the task that the recipe names."""
    from largebatch.run import user_errors

    sys.argv = ["train.py", "--config", str(recipe), "--run-dir", str(run_dir), *arguments]
    with user_errors():
        import_from(task_of(recipe, task), "train").main()
