"""Language models that return each token's loss, without ever holding the logits of a whole micro-batch."""

from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from largebatch.data.text import IGNORE_INDEX
from largebatch.errors import UserError
from largebatch.model.linear_token_losses import linear_token_losses, precision_of_losses
from largebatch.model.parts import embedding_layer


def return_token_losses(model: nn.Module) -> None:
    """Make a language model of `transformers`, called with `targets`, return each token's loss, in fp32 or fp64.

    Targets, of shape (batch, tokens), are the tokens to predict at each place, or `IGNORE_INDEX`, whose loss is zero.
    (The `labels` of `transformers` are different: the inputs, which the model itself shifts by one.) Without targets
    the model returns logits as before. Its parameters and their names remain the same.

    The loss is computed inside the output layer's own `forward`, where FSDP2 and ZeRO-3 have gathered its weight. A
    model that changes its logits (scales, caps), or whose output layer is not linear (an adapter), computes losses from
    logits. One forward pass determines which; a model without weights is checked in each forward pass.
    """
    layer = embedding_layer(model, "get_output_embeddings")
    # Exactly linear: an adapter's layer is a subclass or a different class.
    output = OutputWithTargets(layer) if type(layer) is nn.Linear and _gives_plain_logits(model, layer) else None
    forward = model.forward

    @wraps(forward)
    def forward_with_targets(*arguments: Any, targets: torch.Tensor | None = None, **options: Any) -> Any:
        if targets is None:
            return forward(*arguments, **options)
        if output is None:
            logits = forward(*arguments, **options).logits
            logits = logits.to(precision_of_losses(logits.dtype))
            return cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORE_INDEX, reduction="none")
        output.targets = targets
        try:
            outputs = forward(*arguments, **options)
            if output.given is None or not output.given.is_still(outputs.logits):
                raise UserError(
                    f"{type(model).__name__} changes the logits that its output layer returns, so the layer cannot "
                    "return losses instead; remove return_token_losses, and compute the loss from logits"
                )
            return outputs.logits
        finally:
            output.targets = output.given = None

    model.forward = forward_with_targets


class OutputWithTargets:
    """Makes a linear output layer return each token's loss instead of logits while there are targets."""

    def __init__(self, layer: nn.Linear):
        self.targets: torch.Tensor | None = None
        self.given: _Given | None = None
        self._layer = layer
        self._logits = layer.forward
        layer.forward = self._forward  # type: ignore[method-assign]

    # A model that repeats no blocks is compiled whole, and inside it tensors have no address to compare.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.targets is None:
            return self._logits(input)
        if input.shape[:-1] != self.targets.shape:
            raise ValueError(
                f"the output layer has inputs of shape {tuple(input.shape)} and targets of shape "
                f"{tuple(self.targets.shape)}; give a target, or IGNORE_INDEX, for each token"
            )
        losses = linear_token_losses(input, self._layer.weight, self._layer.bias, self.targets)
        self.given = _Given(losses)
        return losses


class _Given:
    """An output of the layer, kept to tell it apart from anything computed from it."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor
        self._version = tensor._version

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def is_still(self, other: torch.Tensor) -> bool:
        """Whether `other` is the same tensor, or a view of it as engines return, not changed in place since."""
        same_place = (other.data_ptr(), other.shape) == (self._tensor.data_ptr(), self._tensor.shape)
        return same_place and self._tensor._version == self._version


@torch.no_grad()
def _gives_plain_logits(model: nn.Module, layer: nn.Linear) -> bool:
    """Whether the model's logits are the layer's outputs; assumed for a model that has no weights yet."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return True
    given: list[_Given] = []
    watch = layer.register_forward_hook(lambda _module, _inputs, outputs: given.append(_Given(outputs)))
    logits = model(input_ids=torch.zeros(1, 2, dtype=torch.int64)).logits
    watch.remove()
    return len(given) == 1 and given[0].is_still(logits)
