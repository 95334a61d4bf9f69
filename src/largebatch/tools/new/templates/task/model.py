"""The model, and a batch to measure it with."""

import torch
from torch import nn

from .config import Config


def build_model(config: Config) -> nn.Module:
    """The model with its initial weights, drawn from torch's generator, which the run seeds."""
    width = config.model.hidden_size
    return nn.Sequential(nn.Linear(config.data.num_inputs, width), nn.GELU(), nn.Linear(width, 1), nn.Flatten(0))


def example_batch(config: Config) -> dict[str, torch.Tensor]:
    """The model's arguments for a micro-batch, for `largebatch plan --world-sizes`."""
    return {"input": torch.zeros(config.batch.micro_batch_size, config.data.num_inputs)}
