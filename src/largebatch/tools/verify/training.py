"""Runs a recipe's train.py in this process, and the overrides that make a recipe small.

Small are a recipe's debug model, and data and a batch for a laptop's CPU without a hub.
"""

import json
import sys
from pathlib import Path
from typing import Any

from largebatch.config import RecipeConfig, task_of
from largebatch.task_folders import import_from


def train(recipe: Path, *arguments: str, run_dir: Path, task: Path | None = None) -> None:
    """Run `main` of a task's train.py with the command line of a run; None means the task that the recipe names."""
    from largebatch.run import user_errors

    sys.argv = ["train.py", "--config", str(recipe), "--run-dir", str(run_dir), *arguments]
    with user_errors():
        import_from(task_of(recipe, task), "train").main()


def debug_model_overrides(config: RecipeConfig) -> list[str]:
    """The overrides that replace the model with the recipe's `debug_model`; none if it has none."""
    return _words({f"model.{name}": value for name, value in (config.debug_model or {}).items()})


def tiny_data_overrides(config: RecipeConfig) -> list[str]:
    """The overrides that replace the recipe's data with the task's tiny data; none if the recipe's own is small.

    The batch is then 32 samples. The run is long enough for any warmup, and must be stopped early.
    """
    tiny = config.tiny_data()
    if tiny is None:
        return []
    batch = {"global_batch_size": 32, "micro_batch_size": 8}
    return _words({"batch": batch, "train.duration": {"steps": 10**9}, **tiny})


def _words(changes: dict[str, Any]) -> list[str]:
    return [f"--{name}={json.dumps(value)}" for name, value in changes.items()]
