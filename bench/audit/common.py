"""What the audited loops share."""

import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

CLASSES = 3
IGNORED = 2
"""The class that has no target in loops with `unequal_targets`."""


def samples(indices):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(100, 6, generator=generator)
    return Subset(TensorDataset(inputs, torch.randint(CLASSES, (100,), generator=generator)), indices)


def network(layer=nn.Tanh):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), layer(), nn.Linear(8, CLASSES))


def audited(train, *settings, **named):
    """A function of the audit's contract that calls `train` with further settings."""

    def audit(indices, micro_batch_size, accumulation):
        return train(indices, micro_batch_size, accumulation, *settings, **named)

    return audit
