"""Targets without end: each sample of each epoch has its own."""

import numpy as np
import torch

from largebatch.data.order import derive_seed

from .config import Config


class Targets:
    def __init__(self, config: Config, num_samples: int):
        self.config = config
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def fetch(self, indices, epoch):
        dimensions = self.config.model.dimensions
        size = self.config.data.size
        signs = [
            np.unpackbits(np.frombuffer(np.random.default_rng(seed).bytes(dimensions // 8), np.uint8))
            for seed in (derive_seed(self.config.seed, "noise", epoch or 0, int(index)) for index in indices)
        ]
        return {"target": (2 * torch.from_numpy(np.stack(signs)).float() - 1) * size}

    def weight(self, batch):
        return torch.ones(len(batch["target"]))


def sources(config: Config, _):
    return Targets(config, config.data.num_train_samples), Targets(config, config.data.num_eval_samples)
