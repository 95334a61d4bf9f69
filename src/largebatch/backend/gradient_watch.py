"""Which parameters backward passes reach, where their gradients themselves do not tell."""

from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class GradientWatch:
    """Notes which trainable parameters of a model get gradients, whatever an engine does with these."""

    def __init__(self, model: nn.Module):
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._missing = set(trainable)
        self._hooks: list[RemovableHandle] = [
            parameter.register_hook(partial(self._note, name))  # type: ignore[no-untyped-call]
            for name, parameter in trainable.items()
        ]

    def _note(self, name: str, _: torch.Tensor) -> None:
        self._missing.discard(name)

    def end(self) -> list[str]:
        """Stop watching, and return the names of the parameters without gradients."""
        for hook in self._hooks:
            hook.remove()
        return sorted(self._missing)
