"""The sequences count in equal steps, half of them with an error; those of a shifted set count in larger steps."""

import numpy as np
import torch

from largebatch.data.order import derive_seed

VOCABULARY = 16


class Counting:
    def __init__(self, config, num_samples, name, shift=0):
        self.config = config
        self.num_samples = num_samples
        self.name = name
        self.shift = shift

    def __len__(self):
        return self.num_samples

    def fetch(self, indices, epoch):  # noqa: ARG002 - the same in each epoch
        rows = []
        labels = []
        for index in indices.tolist():
            random = np.random.default_rng(derive_seed(self.config.seed, self.name, index))
            steps = np.arange(self.config.data.length) * random.integers(1 + self.shift, 3 + self.shift)
            steps[random.integers(1, self.config.data.length)] += index % 2 * random.integers(0, 4)
            rows.append((random.integers(0, VOCABULARY) + steps) % VOCABULARY)
            labels.append(index % 2)
        return {"tokens": torch.from_numpy(np.stack(rows)), "has_error": torch.tensor(labels)}

    def weight(self, batch):
        return len(batch["tokens"])


# cookbook: data.py
