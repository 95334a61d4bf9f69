"""Runs a recipe's train.py in this process."""

from pathlib import Path

from largebatch.config import task_of
from largebatch.task_folders import import_from


def train(recipe: Path, *arguments: str, run_dir: Path, task: Path | None = None) -> None:
    """Run `main` of a task's train.py with the command line of a run; None means the task that the recipe names."""
    from largebatch.run import from_command_line

    module = import_from(task_of(recipe, task), "train")
    words = ["--config", str(recipe), "--run-dir", str(run_dir), *arguments]
    with from_command_line(module.Config, words) as (config, options):
        module.main(config, options)
