"""What stands in for a large recipe's data, batch and model: some steps on a laptop's CPU, nothing from a hub."""

import json

from largebatch.config import RecipeConfig
from largebatch.config.data import HubOrLocal

BLOCKS = {"block_size": 32, "num_train_samples": 256, "num_eval_samples": 16}
# Of a size that leaves BatchNorm more than one position in the last stage of a ResNet.
IMAGES = {"source": "digits", "image_size": 64}
DATA = {
    "image_classification": IMAGES,
    "contrastive": IMAGES,
    "causal_lm": {"source": "pydoc", **BLOCKS},
    "masked_lm": {"source": "pydoc", **BLOCKS},
    "sft": {"source": "addition", **BLOCKS},
}
"""Data that every installation has, of the kind that a task trains on."""


def small_model_overrides(config: RecipeConfig) -> list[str]:
    """What makes the model the one of the recipe's `verify` section; nothing where it has none."""
    small = config.verify.model if config.verify else {}
    return [f"--model.{name}={json.dumps(value)}" for name, value in small.items()]


def stand_in_overrides(config: RecipeConfig) -> list[str]:
    """What to override of a recipe besides its model; nothing where its data are always there.

    Data from a hub gives way to data that is always there, and the batch to 32 samples. The run is made long enough for
    any warmup, and is to be stopped.
    """
    if not isinstance(config.data, HubOrLocal):
        return []
    changes: dict[str, object] = {
        "data": DATA[config.task],
        "batch": {"global_batch_size": 32, "micro_batch_size": 8},
        "train.duration": {"steps": 10**9},
    }
    if config.task == "contrastive":
        changes["neighbours.bank_samples"] = 64
    return [f"--{name}={json.dumps(value)}" for name, value in changes.items()]
