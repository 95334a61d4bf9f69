"""Language models that return each token's loss instead of logits, which there need then never be of a micro-batch."""

from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from largebatch.data.text import IGNORE_INDEX
from largebatch.errors import UserError
from largebatch.model.embedding_layers import embedding_layer
from largebatch.model.linear_token_losses import linear_token_losses, precision_of_losses


def return_token_losses(model: nn.Module) -> None:
    """Have `model(..., targets=targets)` return each token's loss, in fp32 or fp64; without targets it is as before.

    Targets are the tokens to predict at each place, shape (batch, tokens), and `IGNORE_INDEX` where there is none and
    the loss is zero. (The `labels` of `transformers` are others: the inputs, which the model itself shifts by one.)

    The loss is computed inside of the output layer's own `forward`, where FSDP2 and ZeRO-3 have gathered its weight. A
    model that makes more of its logits (scales, caps) or has something else there than a linear layer (an adapter)
    computes them, and its losses from them. The model is asked; one without weights, by each of its forward passes.

    Args:
        model: A language model of `transformers`; changed in place. Parameters and their names stay what they are.
    """
    layer = embedding_layer(model, "get_output_embeddings")
    # Linear, and nothing else than that: an adapter's layer is a class of its own.
    if type(layer) is nn.Linear and _gives_plain_logits(model, layer):
        layer.__class__ = LinearWithTargets
    forward = model.forward

    @wraps(forward)
    def forward_with_targets(*arguments: Any, targets: torch.Tensor | None = None, **options: Any) -> Any:
        if targets is None:
            return forward(*arguments, **options)
        if not isinstance(layer, LinearWithTargets):
            logits = forward(*arguments, **options).logits
            logits = logits.to(precision_of_losses(logits.dtype))
            return cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORE_INDEX, reduction="none")
        layer.targets = targets
        try:
            outputs = forward(*arguments, **options)
            if layer.given is None or not layer.given.is_still(outputs.logits):
                raise UserError(
                    f"{type(model).__name__} makes more of its logits than its output layer gives, which cannot be "
                    "made of losses; remove return_token_losses, and compute the loss from logits"
                )
            return outputs.logits
        finally:
            layer.targets = layer.given = None

    model.forward = forward_with_targets


class LinearWithTargets(nn.Linear):
    """An output layer that gives each token's loss instead of logits while it has targets."""

    targets: torch.Tensor | None = None
    given: "_Given | None" = None

    # A model that repeats no blocks is compiled whole, where tensors have no place by which to know them again.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.targets is None:
            return super().forward(input)
        if input.shape[:-1] != self.targets.shape:
            raise ValueError(
                f"the output layer has inputs of shape {tuple(input.shape)} and targets of shape "
                f"{tuple(self.targets.shape)}; give a target, or IGNORE_INDEX, for each token"
            )
        losses = linear_token_losses(input, self.weight, self.bias, self.targets)
        self.given = _Given(losses)
        return losses


class _Given:
    """What an output layer gave, to be told from what was made of it."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor
        self._version = tensor._version

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def is_still(self, other: torch.Tensor) -> bool:
        """Whether the other is the same tensor, or a view of it as engines return, and not changed in place since."""
        same_place = (other.data_ptr(), other.shape) == (self._tensor.data_ptr(), self._tensor.shape)
        return same_place and self._tensor._version == self._version


@torch.no_grad()
def _gives_plain_logits(model: nn.Module, layer: nn.Linear) -> bool:
    """Whether the model's logits are what the layer gives; taken for granted of a model that has no weights yet."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return True
    given: list[_Given] = []
    watch = layer.register_forward_hook(lambda _module, _inputs, outputs: given.append(_Given(outputs)))
    logits = model(input_ids=torch.zeros(1, 2, dtype=torch.int64)).logits
    watch.remove()
    return len(given) == 1 and given[0].is_still(logits)
