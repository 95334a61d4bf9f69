"""The samples: made-up points."""

import numpy as np
import torch

from largebatch.data.order import Indices, derive_seed
from largebatch.data.preparation import Preparation
from largebatch.data.source import Batch, Sources

from .config import Config


class PointSource:
    """Points x and values y. Sample i is the same on every process, whatever else is fetched with it."""

    def __init__(self, num_samples: int, num_inputs: int, name: str):
        points = np.random.default_rng(derive_seed(0, name)).uniform(-1, 1, (num_samples, num_inputs))
        self.x = torch.from_numpy(points).float()
        self.y = torch.sin(3 * self.x).sum(dim=1)

    def __len__(self) -> int:
        return len(self.x)

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:  # noqa: ARG002 - there is no augmentation
        return {"x": self.x[indices], "y": self.y[indices]}

    def weight(self, batch: Batch) -> int:
        return len(batch["x"])


def sources(config: Config, _: Preparation) -> Sources:
    """The training and evaluation samples, which need no preparation."""
    data = config.data
    train = PointSource(data.num_train_samples, data.num_inputs, "train")
    return train, PointSource(data.num_eval_samples, data.num_inputs, "eval")
