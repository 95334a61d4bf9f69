"""Which parameters get gradients."""

from torch import nn


class GradientWatch:
    """Notes which trainable parameters of a model get gradients, whatever an engine does with these.

    FSDP2 calls only hooks of this kind on the parameters that it has sharded.
    """

    def __init__(self, model: nn.Module):
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._missing = set(trainable)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._missing.discard(name))  # type: ignore[no-untyped-call]
            for name, parameter in trainable.items()
        ]

    def end(self) -> list[str]:
        """Stop watching, and return the names of the parameters without gradients."""
        for hook in self._hooks:
            hook.remove()
        return sorted(self._missing)
