"""The vector, which starts at 0."""

import torch
from torch import nn

from .config import Config


class Vector(nn.Module):
    def __init__(self, dimensions: int):
        super().__init__()
        self.place = nn.Parameter(torch.zeros(dimensions))

    def forward(self, target):
        """Half of the squared distance from each target."""
        return (self.place - target).square().sum(1) / 2


def build_model(config: Config):
    return Vector(config.model.dimensions)


def example_batch(config: Config):
    return {"target": torch.zeros(config.batch.micro_batch_size, config.model.dimensions)}
