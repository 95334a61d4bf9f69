"""Maps, and which of their pixels are labeled."""

from dataclasses import dataclass

import numpy as np
import torch

from largebatch.data.order import derive_seed

from .config import Config

UNLABELED = -1


@dataclass(eq=False)
class MapSource:
    """Noisy discs; a map is mirrored at random in training."""

    config: Config
    num_samples: int
    name: str

    def __len__(self):
        return self.num_samples

    def fetch(self, indices, epoch):
        maps, labels = zip(*(self._one(int(index), epoch) for index in indices), strict=True)
        # Some maps count more than others: 1, 1.1, 1.2 …, rounded to what can be summed exactly.
        of_maps = torch.from_numpy((1 + indices % 7 / 10) * 2**20).round() / 2**20
        weights = (torch.stack(labels) != UNLABELED) * of_maps.view(-1, 1, 1)
        return {"map": torch.stack(maps), "labels": torch.stack(labels), "weights": weights}

    def weight(self, batch):
        return batch["weights"]

    def _one(self, index, epoch):
        random = np.random.default_rng(derive_seed(0, self.name, index))
        side = self.config.data.side * self.config.data.stretch
        border = self.config.border.width
        y, x = np.mgrid[:side, :side]
        row, column, radius = random.uniform(0, side, 3)
        inside = (y - row) ** 2 + (x - column) ** 2 < (radius / 2) ** 2
        values = inside + random.normal(0, 0.5, (side, side))
        seen = random.random((side, side)) < random.uniform(0.1, 0.9)
        seen &= (np.minimum(y, x) >= border) & (np.maximum(y, x) < side - border)
        labels = np.where(seen, inside, UNLABELED)
        if epoch is not None and derive_seed(self.config.seed, "mirror", epoch, index) % 2:
            values = values[:, ::-1]
            labels = labels[:, ::-1]
        return torch.tensor(values.copy(), dtype=torch.float32)[None], torch.tensor(labels.copy(), dtype=torch.int64)


def sources(config: Config, _):
    train = MapSource(config, config.data.num_train_samples, "train")
    return train, MapSource(config, config.data.num_eval_samples, "eval")
