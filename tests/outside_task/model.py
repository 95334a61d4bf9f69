"""Convolutions, and a batch to measure them with."""

from itertools import pairwise

import torch
from torch import nn

from .config import Config


def build_model(config: Config):
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise([1, *config.model.channels]):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GELU()]
    return nn.Sequential(*layers, nn.Conv2d(config.model.channels[-1], 2, 1))


def example_batch(config: Config):
    side = config.data.side * config.data.stretch
    return {"input": torch.zeros(config.batch.micro_batch_size, 1, side, side)}
