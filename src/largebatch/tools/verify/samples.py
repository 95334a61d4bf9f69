"""Whether a source's samples, and their weights, depend on what is fetched with them."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from largebatch.config import load_config
from largebatch.data.loading import sum_of_weights
from largebatch.data.preparation import Preparation
from largebatch.task_folders import import_from

SAMPLES = 32
"""At least: draws of one of two values, without a seed, are the same ones again in one of 2**32 cases."""


def fault_of_samples(recipe: Path, overrides: Sequence[str], task: Path) -> str | None:
    """What is wrong with a recipe's first training samples; None if nothing is.

    They are fetched from two sources, from the second with the first two thirds exchanged, which hold whole
    micro-batches, because mixup pairs samples within one.
    """
    config = load_config(recipe, overrides, task=task)
    sources = partial(import_from(task, "data").sources, config, Preparation(f"largebatch prepare {recipe}"))
    train, *_ = sources()
    micro_batch_size = config.batch.micro_batch_size
    micro_batches = min(math.ceil(SAMPLES / 3 / micro_batch_size), len(train) // 3 // micro_batch_size)
    third = micro_batches * micro_batch_size
    indices = np.arange(3 * third or min(len(train), micro_batch_size))
    exchanged = np.concatenate([indices[third : 2 * third], indices[:third], indices[2 * third :]])
    batch = train.fetch(indices, 0)
    # Another one, which has not numbered or kept anything in the order of the first call.
    other, *_ = sources()
    again = other.fetch(exchanged, 0)
    for name, tensor in batch.items():
        if tensor.shape[:1] == indices.shape and not torch.equal(tensor[exchanged], again[name]):
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
