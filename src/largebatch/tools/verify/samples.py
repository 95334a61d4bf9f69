"""Whether a source's samples, and their weights, depend on what is fetched with them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from largebatch.config import RecipeConfig, load_config
from largebatch.data.loading import sum_of_weights
from largebatch.data.preparation import Preparation
from largebatch.task_folders import import_from

MIN_SAMPLES = 32
"""So many a draw between two values, without a seed, changes in all but one of 2**32 cases."""


def fault_of_samples(recipe: Path, overrides: Sequence[str], task: Path) -> str | None:
    """What is wrong with a recipe's first training samples, at least a micro-batch; None if nothing is."""
    config: RecipeConfig = load_config(recipe, overrides, task=task)
    train, *_ = import_from(task, "data").sources(config, Preparation(f"largebatch prepare {recipe}"))
    indices = np.arange(min(len(train), max(config.batch.micro_batch_size, MIN_SAMPLES)))
    batch = train.fetch(indices, 0)
    reverse = train.fetch(indices[::-1].copy(), 0)
    for name, tensor in batch.items():
        if tensor.shape[:1] == indices.shape and not torch.equal(tensor, reverse[name].flip(0)):
            return (
                f"`fetch` in data.py returns another {name!r} of a sample when it is called again, for another order "
                "of samples: let it depend on a sample's index and the epoch alone (random numbers: draw them from "
                "`derive_seed(seed, name, epoch, index)`)"
            )
    together = sum_of_weights(train, batch)
    alone = sum(sum_of_weights(train, train.fetch(indices[[number]], 0)) for number in indices)
    if alone != together:
        return (
            f"`weight` in data.py counts {together:g} in the first {len(indices)} samples together, and {alone:g} one "
            "by one: count what each sample adds to the loss, without padding"
        )
    return None
