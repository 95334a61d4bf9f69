"""What takes the place of a large recipe's model, data and batch: some steps on a laptop's CPU, nothing from a hub."""

import json
from typing import Any

from largebatch.config import RecipeConfig


def debug_model_overrides(config: RecipeConfig) -> list[str]:
    """What makes the model the recipe's `debug_model`; nothing if it has none."""
    return _words({f"model.{name}": value for name, value in (config.debug_model or {}).items()})


def tiny_data_overrides(config: RecipeConfig) -> list[str]:
    """What puts the task's tiny data in place of the recipe's; nothing if the recipe's own are small.

    The batch is 32 samples then, and the run long enough for any warmup; it is to be stopped.
    """
    tiny = config.tiny_data()
    if tiny is None:
        return []
    batch = {"global_batch_size": 32, "micro_batch_size": 8}
    return _words({"batch": batch, "train.duration": {"steps": 10**9}, **tiny})


def _words(changes: dict[str, Any]) -> list[str]:
    return [f"--{name}={json.dumps(value)}" for name, value in changes.items()]
