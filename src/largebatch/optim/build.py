"""The optimizer that a recipe's config describes."""

import torch
from torch import nn

from largebatch.config.optimizers import AdamW, Sgd
from largebatch.optim.groups import parameter_groups


def build_optimizer(model: nn.Module, config: Sgd | AdamW) -> torch.optim.Optimizer:
    """A torch optimizer over the model's trainable parameters, before `prepare`.

    Its learning rate is 0 until a step's own is set: the plan's schedule is the only source of learning rates.
    """
    groups = parameter_groups(model, config.weight_decay, config.no_decay)
    if isinstance(config, Sgd):
        return torch.optim.SGD(groups, lr=0.0, momentum=config.momentum, nesterov=config.nesterov)
    return torch.optim.AdamW(groups, lr=0.0, betas=config.betas, eps=config.eps)
